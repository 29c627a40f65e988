"""Parts of a call that do the same, as chunks do: their operations are written down once, and called for each."""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx

from invfunc import thresholds

T = TypeVar("T")
NUMBER = "number"
"""What inputs of a part are called that are no tensors."""
Tidy = Callable[[fx.Graph], None]
"""Leaves out what is not needed."""
Constant = Callable[[torch.Tensor], fx.Node]
"""An input that is always this tensor."""


class Step:
    """An operation of a part, as long as it is not known whether the part is another one again."""

    __slots__ = ("args", "kwargs", "node", "part", "place", "target")

    def __init__(self, part: Part, place: int, target: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.part, self.place, self.target, self.args, self.kwargs = part, place, target, args, kwargs
        self.node: fx.Node | None = None

    def outside(self) -> fx.Node:
        """What it is in the graph, for what comes behind its part."""
        if self.node is None:
            call = self.part.call
            assert call is not None
            with call.graph.inserting_after(call):
                self.node = call.graph.call_function(operator.getitem, (call, self.place))
        return self.node


@dataclass(eq=False)
class Part:
    """What was done since it has begun."""

    steps: list[Step] = field(default_factory=list)
    call: fx.Node | None = None
    """That of its operations in the graph, once it has ended."""
    values: dict[int, torch.Tensor] = field(default_factory=dict)
    """Small results that depend on no argument."""


class Repeated:
    """The operations of parts that differ in tensors and numbers alone, which are given in each call."""

    def __init__(self, number: int, steps: list[Step]) -> None:
        self.__name__, self.steps = f"part_{number}", steps
        self.parts: dict[fx.Node, Part] = {}
        self.given: dict[fx.Node, tuple] = {}
        """Of each call all tensors and numbers, in their order, and behind them what is `folded`."""
        self.folded: list[int] = []
        self.module = fx.GraphModule(torch.nn.Module(), fx.Graph())
        self.call: Callable[..., Any] = self.module.forward

    def __call__(self, *given: Any) -> Any:
        return self.call(*given)

    @property
    def nodes(self) -> list[Any]:
        """Its operations."""
        return self.steps or [node for node in self.module.graph.nodes if node.op == "call_function"]

    def calls(self, graph: fx.Graph) -> list[fx.Node]:
        """Those that are in a graph."""
        return [node for node in graph.nodes if node.target is self]

    def build(self, calls: list[fx.Node], tidy: Tidy, constant: Constant) -> None:
        """Make a graph of what is needed of it, with no more inputs than differ, and call it with these."""
        if not self.given:
            self.folded = self._folded(set.intersection(*(set(self.parts[call].values) for call in calls)))
            self.given = {call: (*call.args, *self._values(call, constant)) for call in calls}
        graph, inputs = fx.Graph(), dict[Hashable, tuple[fx.Node, tuple]]()

        def placed(column: tuple) -> Any:
            known = tuple(map(_identity, column))
            if not isinstance(column[0], fx.Node) and len({*known}) == 1:
                return column[0]
            if known not in inputs:
                kind = "given" if isinstance(column[0], fx.Node) else NUMBER
                inputs[known] = graph.placeholder(f"{kind}_{len(inputs)}"), column
            return inputs[known][0]

        given = [placed(column) for column in zip(*(self.given[call] for call in calls), strict=True)]
        own = self._written(graph, given)
        read: Any = dict.fromkeys(user.args[1] for call in calls for user in call.users)
        graph.output({i: own[i] for i in sorted(read)})
        tidy(graph)
        used = [(node, column) for node, column in inputs.values() if node.users]
        for node, _ in inputs.values():
            if not node.users:
                graph.erase_node(node)
        for i, call in enumerate(calls):
            call.args = tuple(column[i] for _, column in used)
        self.module = fx.GraphModule(torch.nn.Module(), graph)
        self.call = self.module.forward

    def inline(self, call: fx.Node, constant: Constant) -> None:
        """Write its operations where a call is, which has all that they are given."""
        self.folded = self._folded(set(self.parts[call].values))
        given = [*call.args, *self._values(call, constant)]
        with call.graph.inserting_before(call):
            own = self._written(call.graph, given)
        for user in list(call.users):
            place: Any = user.args[1]
            user.replace_all_uses_with(own[place])
            call.graph.erase_node(user)
        call.graph.erase_node(call)

    def _values(self, call: fx.Node, constant: Constant) -> list[fx.Node]:
        return [constant(self.parts[call].values[i]) for i in self.folded]

    def _folded(self, known: set[int]) -> list[int]:
        """Which results that are known are taken by operations whose results are not."""
        found = set[int]()

        def leaf(x: Any) -> None:
            if isinstance(x, Step):
                found.add(x.place)

        for step in self.steps:
            if step.place not in known:
                mapped(leaf, (step.args, step.kwargs))
        return sorted(found & known)

    def _written(self, graph: fx.Graph, given: list[Any]) -> list[fx.Node]:
        """Write its operations into a graph, of what is given in the place of tensors and numbers."""
        own, rest = list[fx.Node](), iter(given)
        folded = dict(zip(self.folded, given[len(given) - len(self.folded) :], strict=True))

        def leaf(x: Any) -> Any:
            return own[x.place] if isinstance(x, Step) else next(rest) if varies(x) else x

        for step in self.steps:
            node = graph.call_function(step.target, mapped(leaf, step.args), mapped(leaf, step.kwargs))
            own.append(folded.get(step.place, node))
        return own


class Parts:
    """Writes the operations of a call into its graph; those of a part when it has ended, if they are known."""

    def __init__(self, graph: fx.Graph) -> None:
        self.graph = graph
        self.part: Part | None = None
        self.known: dict[Hashable, Repeated] = {}
        self.ended: list[Callable[[], None]] = []
        """What is to be done when the part has."""

    def each(self, parts: Iterable[T]) -> Iterator[T]:
        """The parts, one after the other, unless they are few, or within one."""
        parts = list(parts)
        for part in parts:
            own = Part() if self.part is None and len(parts) > thresholds.REPEATED else None
            self.part = self.part or own
            yield part
            if own is not None and self.part is own:
                self._end(own)

    @property
    def operations(self) -> int:
        """How many have been written down."""
        own = len(self.part.steps) if self.part is not None else 0
        return len(self.graph.nodes) + sum(len(repeated.steps) for repeated in self.known.values()) + own

    def write(self, target: Callable[..., Any], args: Any, kwargs: Any = None) -> Any:
        """Write an operation down."""
        if self.part is None:
            return self.graph.call_function(target, args, kwargs)
        step = Step(self.part, len(self.part.steps), target, args, kwargs or {})
        self.part.steps.append(step)
        return step

    def now(self, node: Any) -> Any:
        """What is written down, as what is written next may take it."""
        return node.outside() if isinstance(node, Step) and node.part is not self.part else node

    def spill(self) -> None:
        """Write the operations of a part one by one: it is none that could come again."""
        part, self.part = self.part, None
        for step in [] if part is None else part.steps:
            args, kwargs = mapped(self.now, step.args), mapped(self.now, step.kwargs)
            step.node = self.graph.call_function(step.target, args, kwargs)
        self._told()

    def _end(self, part: Part) -> None:
        given, self.part = list[Any](), None
        if not part.steps:
            return

        def leaf(x: Any) -> Hashable:
            if isinstance(x, Step):
                return "step", x.place
            if varies(x):
                given.append(x)
                return type(x)
            return type(x), x

        key = tuple([(step.target, form(leaf, step.args), form(leaf, step.kwargs)) for step in part.steps])
        repeated = self.known.get(key) or self.known.setdefault(key, Repeated(len(self.known), part.steps))
        part.call = self.graph.call_function(repeated, tuple(given))
        repeated.parts[part.call] = part
        for step in part.steps if repeated.steps is not part.steps else []:
            step.args = step.kwargs = None  # which have others in them
        part.steps = []
        self._told()

    def _told(self) -> None:
        for tell in self.ended:
            tell()
        self.ended.clear()

    def finish(self, tidy: Tidy, constant: Constant) -> None:
        """Leave out what is not needed; what has not been done often is written where it is."""
        tidy(self.graph)
        for repeated in self.known.values():
            calls = repeated.calls(self.graph)
            for call in calls if len(calls) < thresholds.REPEATED else []:
                repeated.inline(call, constant)
        tidy(self.graph)
        before = -1
        while len(self.graph.nodes) != before:
            before = len(self.graph.nodes)
            for repeated in repeats(self.graph):
                repeated.build(repeated.calls(self.graph), tidy, constant)
            tidy(self.graph)
        for repeated in self.known.values():
            repeated.steps, repeated.parts, repeated.given = [], {}, {}


def varies(x: Any) -> bool:
    """Whether it may differ from part to part."""
    return isinstance(x, (fx.Node, Step)) or type(x) in (int, float)


def _identity(x: Any) -> Hashable:
    return x if isinstance(x, fx.Node) else repr(x)


def mapped(leaf: Callable[[Any], Any], x: Any) -> Any:
    """Arguments of an operation, with others in the place of what is in them."""
    if type(x) in (list, tuple):
        return type(x)([mapped(leaf, y) for y in x])
    return {key: mapped(leaf, y) for key, y in x.items()} if type(x) is dict else leaf(x)


def form(leaf: Callable[[Any], Hashable], x: Any) -> Hashable:
    """What arguments of an operation are made of, to be compared."""
    if type(x) in (list, tuple):
        return type(x), *[form(leaf, y) for y in x]
    return (dict, *[(key, form(leaf, y)) for key, y in x.items()]) if type(x) is dict else leaf(x)


def every(graph: fx.Graph) -> Iterator[fx.Node]:
    """The nodes of a graph, and those of the parts that it calls."""
    yield from graph.nodes
    for repeated in repeats(graph):
        yield from repeated.nodes


def repeats(graph: fx.Graph) -> Counter[Repeated]:
    """The parts that a graph calls, and how often."""
    return Counter(node.target for node in graph.nodes if isinstance(node.target, Repeated))
