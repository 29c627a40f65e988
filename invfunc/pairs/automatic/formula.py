"""An inverse that was found, in a line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from invfunc.pairs.automatic.graph import Constant, Node
from invfunc.pairs.automatic.search import Step


def formulas(steps: Sequence[Step], inputs: Sequence[Node], names: Mapping[Node, str]) -> str:
    """`x[1] = y[1] - F1(y[0]), x[0] = y[0] - F2(x[1])`"""
    return _Formulas(steps, inputs, names).text()


class _Formulas:
    def __init__(self, steps: Sequence[Step], inputs: Sequence[Node], names: Mapping[Node, str]) -> None:
        self._steps, self._inputs, self._names = {step.node: step for step in steps}, inputs, dict(names)
        self._functions: dict[Node, str] = {}
        for node in inputs:
            self._name_views(node)
        for step in steps:
            if step.how == "part" and step.call is not None and (out := step.call.outputs[0]) in self._names:
                at = [leaf for leaf in step.call.leaves if isinstance(leaf, (Node, Constant))].index(step.node)
                self._names.setdefault(step.node, f"{self._names[out]}.{step.call.function.called}[{at}]")

    def _name_views(self, node: Node) -> None:
        for call in node.readers:
            for i, piece in enumerate(call.outputs if call.views else ()):
                if piece not in self._names:
                    at = f"[{i}]" if len(call.outputs) > 1 else ""
                    self._names[piece] = f"{self._names[node]}.{call.function.called.strip('_')}{at}"
                    self._name_views(piece)

    def text(self) -> str:
        lines = []
        for node, step in self._steps.items():
            if step.how in ("undo", "part") and self._names.get(node, "y").startswith("x"):
                lines.append(f"{self._names[node]} = {self._of(step)}")
        return ", ".join(lines) or "x is in y"

    def _of(self, step: Step) -> str:
        """What a step computes."""
        call, node = step.call, step.node
        if step.how == "undo" and call is not None and step.rule is not None:
            others = [n for n in call.operands if n is not node]
            other = ", ".join(self._term(n) for n in others) if others else "c"
            return step.rule[1].format(other, y=self._term(call.outputs[0]))
        if step.how == "part" and call is not None:
            return f"{self._term(call.outputs[0])}.{call.function.called}"
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
            if now in self._names:
                reads.append(self._names[now])
                continue
            step = self._steps.get(now)
            new = [n for n in (step.reads if step is not None else ()) if n not in seen]
            seen.update(new)
            waiting += new
        name = self._functions.setdefault(node, f"F{len(self._functions) + 1}")
        return f"{name}({', '.join(sorted(set(reads)))})"
