"""An inverse that was found, in a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from invfunc.pairs.automatic.graph import Constant, Node
from invfunc.pairs.automatic.search import Step


def formulas(steps: Sequence[Step], names: Mapping[Node, str]) -> str:
    """`x[1] = y[1] - F1(y[0]), x[0] = y[0] - F2(x[1])`"""
    return _Formulas(steps, names).text()


class _Formulas:
    def __init__(self, steps: Sequence[Step], names: Mapping[Node, str]) -> None:
        self._steps, self._names = {step.node: step for step in steps}, dict(names)
        self._given = {node for node, name in names.items() if name.startswith("y")}
        self._functions: dict[Node, str] = {}
        for step in steps:
            if step.how == "together" and len(step.pieces) == 1 and step.pieces[0] in self._given:
                self._names.setdefault(step.node, self._names[step.pieces[0]])  # the same, seen in another way
                self._given.add(step.node)
            if step.how == "part" and step.call is not None and (out := step.call.outputs[0]) in self._given:
                at = [leaf for leaf in step.call.leaves if isinstance(leaf, (Node, Constant))].index(step.node)
                self._names.setdefault(step.node, f"{self._names[out]}.part[{at}]")
        for step in reversed(steps):
            if step.how == "together" and len(step.pieces) > 1:
                whole = self._names.setdefault(step.node, "z")
                for i, piece in enumerate(sorted(step.pieces, key=lambda piece: piece.offset)):
                    self._names.setdefault(piece, f"{whole}.part[{i}]")

    def text(self) -> str:
        """A formula for each part."""
        lines = []
        for node, step in self._steps.items():
            if step.how != "given" and node in self._names and not self._names[node].startswith("y"):
                if step.how != "together":
                    lines.append(f"{self._names[node]} = {self._of(step)}")
        return ", ".join(lines) or "x is in y"

    def _of(self, step: Step) -> str:
        """What a step computes."""
        call, node = step.call, step.node
        if step.how == "undo" and call is not None and step.rule is not None:
            others = [n for n in call.operands if n is not node]
            other, y = ", ".join(self._term(n) for n in others) or "c", self._term(call.outputs[0])
            return step.rule[1].format(other, y=f"({y})" if " " in y else y)
        return self._function(node)

    def _term(self, node: Node) -> str:
        if node in self._names:
            return self._names[node]
        step = self._steps.get(node)
        return "?" if step is None else self._of(step)

    def _function(self, node: Node) -> str:
        """A number of calls as a function of what they read that has a name."""
        reads, seen, waiting = list[str](), {node}, [node]
        while waiting:
            now = waiting.pop(0)
            if now in self._names and now is not node:
                reads.append(self._names[now])
                continue
            step = self._steps.get(now)
            new = [n for n in (step.reads if step is not None else ()) if n not in seen]
            seen.update(new)
            waiting += new
        name = self._functions.setdefault(node, f"F{len(self._functions) + 1}")
        return f"{name}({', '.join(sorted(set(reads)))})"
