"""In which order the tensors of x are had from those of y."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from invfunc.pairs.automatic.graph import Call, Node, refuse
from invfunc.pairs.automatic.rules import JOINS, Undo, covering, needs_nonzero, undo


@dataclass(eq=False)
class Step:
    """How one tensor is had: given, or of a call that is run, undone or taken apart, or its views are put together."""

    node: Node
    how: str
    call: Call | None = None
    rule: Undo | None = None
    pieces: tuple[Node, ...] = ()

    @property
    def reads(self) -> list[Node]:
        """What has to be had before."""
        if self.call is None:
            return list(self.pieces)
        if self.how == "run":
            return self.call.operands
        return [*self.call.outputs, *(n for n in self.call.operands if n is not self.node and self.how == "undo")]


def search(inputs: Sequence[Node], given: Iterable[Node], names: Mapping[Node, str]) -> list[Step]:
    """The steps from what is given to the inputs, in order; an error says what prevents them."""
    found = _Found()
    for node in given:
        found.learn(node, Step(node, "given"))
    found.go_on()
    missing = [node for node in inputs if node not in found.steps]
    if missing:
        refuse(_why(missing, found, names))
    needed, steps = set(inputs), []
    for node, step in reversed(found.steps.items()):  # which are in an order in which they can be taken
        if node in needed:
            needed.update(n for n in step.reads if n in found.steps)
            steps.append(step)
    return steps[::-1]


class _Found:
    def __init__(self) -> None:
        self.steps: dict[Node, Step] = {}
        self._waiting: list[Node] = []

    def learn(self, node: Node, step: Step) -> None:
        if node not in self.steps:
            self.steps[node] = step
            self._waiting.append(node)

    def go_on(self) -> None:
        while self._waiting:
            node = self._waiting.pop(0)
            for call in (*node.readers, *((node.made,) if node.made else ())):
                self._look(call)

    def _look(self, call: Call) -> None:
        unknown = [node for node in call.operands if node not in self.steps]
        if not unknown:
            for node in call.outputs:
                self.learn(node, Step(node, "run", call))
        elif call.views:
            self._put_together(unknown[0])
        elif all(node in self.steps for node in call.outputs):
            if _joins(call):
                for node in unknown:
                    if sum(leaf is node for leaf in call.leaves) == 1 and node.dtype == call.outputs[0].dtype:
                        self.learn(node, Step(node, "part", call))
            elif len(unknown) == 1 and (rule := undo(call, unknown[0])) is not None:
                self.learn(unknown[0], Step(unknown[0], "undo", call, rule))

    def _put_together(self, base: Node) -> None:
        """What is a view of it, or of a view of it, is known; and so on for what it is a view of."""
        known = {_laid(n): n for n in _views(base) if n in self.steps}
        if pieces := covering(base, list(known.values())):
            self.learn(base, Step(base, "together", pieces=tuple(pieces)))
        elif base.made is not None and base.made.views:
            self._put_together(base.made.operands[0])


def _views(base: Node) -> Iterator[Node]:
    for call in base.readers:
        for node in call.outputs if call.views else ():
            yield node
            yield from _views(node)


def _joins(call: Call) -> bool:
    """Whether a call puts parts together, which can be taken apart again."""
    return call.function.name in JOINS and not call.writes


def _laid(node: Node) -> tuple:
    return tuple(node.shape), node.stride, node.offset


# Errors


def _why(missing: Sequence[Node], found: _Found, names: Mapping[Node, str]) -> str:
    """What prevents the first of these."""
    parts = [(part, names.get(part) or names.get(node) or "x") for node in missing for part in _parts(node, found)]
    carriers = {part: _carriers(part) for part, _ in parts}
    for part, name in parts:
        if not any(node in found.steps for node in carriers[part]):
            return _lost(carriers[part], name, found)
    for part, name in parts:
        for carrier in carriers[part]:
            for call in carrier.readers:
                if (why := _refusal(call, carrier, part, name, found, names)) is not None:
                    return why
    return _lost(carriers[parts[0][0]], parts[0][1], found)


def _lost(carriers: Sequence[Node], name: str, found: _Found) -> str:
    """What becomes of a tensor that y does not have."""
    for carrier in carriers[::-1]:
        for call in carrier.readers:
            comes_back = _joins(call) and not all(out in found.steps for out in call.outputs)
            if undo(call, carrier) is None and not (call.views or comes_back):
                return f"{name} goes through {call}, which is not undone, and y has nothing else of it."
    return f"y has nothing of {name}."


def _parts(node: Node, found: _Found) -> list[Node]:
    """The smallest parts into which f takes a tensor that are not known."""
    views = [n for call in node.readers if call.views for n in call.outputs if n not in found.steps]
    return [part for view in views for part in _parts(view, found)] or [node]


def _carriers(node: Node) -> list[Node]:
    """A tensor, and those of which it would come back."""
    found = [node]
    for now in found:  # which grows
        for call in now.readers:
            if undo(call, now) is not None or needs_nonzero(call, now) or _joins(call):
                found += [out for out in call.outputs if out not in found]
    return found


def _refusal(call: Call, carrier: Node, part: Node, name: str, found: _Found, names: Mapping[Node, str]) -> str | None:
    """Why a call is not undone whose result is known."""
    if call.views or not all(n in found.steps for n in call.outputs):
        return None
    others = [n for n in call.operands if n not in found.steps and n is not carrier]
    if undo(call, carrier) is None:
        return f"{why} ({name})." if (why := needs_nonzero(call, carrier)) else None
    for other in others:
        if (reader := _reader(part, other)) is not None:
            return (
                f"F reads {name}, to which it is added: {reader} reads it, and {call} adds what comes of that. F may "
                "read the other parts alone."
            )
        for of, label in names.items():
            if of not in found.steps and (reader := _reader(of, other)) is not None:
                return (
                    f"F reads {label}, which is not known when {name} is computed: {reader} reads it, and {call} adds "
                    f"what comes of that to {name}. After an update read the new value, as in y2 = x2 + G(y1)."
                )
    return None


def _reader(source: Node, node: Node) -> Call | None:
    """The call by which what a tensor is computed from reads another one first."""
    seen, waiting = {node}, [node]
    while waiting:
        call = waiting.pop().made
        if call is None:
            continue
        if source in call.operands:
            return call
        new = [n for n in call.operands if n not in seen]
        seen.update(new)
        waiting += new
    return None
