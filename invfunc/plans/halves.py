"""A plan in two parts: what some of its inputs do not change is computed once, the rest for each of their values."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from invfunc._torch.functorch import storage_of, version
from invfunc.errors import ModifiedError
from invfunc.plans.backends import Backend
from invfunc.plans.draws import draws, put_back, saved
from invfunc.plans.facts import Operator
from invfunc.plans.memory import memory_of, part_of, written
from invfunc.plans.plan import Plan, computed
from invfunc.plans.watch import Watch

States = list[tuple[torch.Generator, torch.Tensor]]


@dataclass(eq=False)
class Halves:
    """The two parts of a plan."""

    plan: Plan
    once: Any
    """From all inputs but the first ones to what the other part takes of it, and the numbers of the guards."""
    each: Any
    """From those first ones and that to the results."""

    def at(self, tensors: list[torch.Tensor], count: int, watch: Watch, before: States) -> Point:
        """Compute what the first inputs do not change, so many as `count` says."""
        kept = self.plan.checked(tensors, lambda *given: self.once(*given[count:]))
        closed = [x for held, _ in self.plan.closed if (x := held()) is not None]
        known = {*map(storage_of, (*tensors, *closed))}
        of_caller = [(x, version(x)) for x in kept if storage_of(x) in known]
        return Point(self, kept, of_caller, [(x, version(x)) for x in (*tensors, *closed)], watch, before)


@dataclass(eq=False)
class Point:
    """What the first part has found."""

    halves: Halves
    kept: list[torch.Tensor]
    of_caller: list[tuple[torch.Tensor, int]]
    """What of it is in memory of the caller's, with its version."""
    given: list[tuple[torch.Tensor, int]]
    """All that it was computed from."""
    watch: Watch
    before: States
    """The generators from which it drew, as they were."""

    def changed(self) -> str:
        """What would make another point; empty if it would be the same one."""
        written = any(version(x) != known for x, known in self.given)
        return "a tensor that was written in place" if written else self.watch.changed()

    def __call__(self, first: Sequence[torch.Tensor]) -> Any:
        """The result for other first inputs."""
        if any(version(x) != known for x, known in self.of_caller):
            raise ModifiedError(
                "parameters or data were written in place since `.linearize`, whose map is that at what they were. "
                "Linearise again, or pass copies."
            )
        plan = self.halves.plan
        with computed(plan.inference):
            return plan.form.join(self.halves.each(*first, *self.kept))


def halves_of(plan: Plan, count: int, backend: Backend, say: Callable[[str], None]) -> Halves | str:
    """The parts of a plan, of which the second takes the first inputs, so many; or why it has none."""
    graph = plan.module.graph
    *nodes, output = graph.nodes
    results, read = output.args[0]
    second = _moved(nodes, {*nodes[:count]})
    if any(node in second for node in read):
        return "a number that is read depends on the vector"
    if any(_draws(node) for node in second):
        return "random numbers are drawn for each vector"
    given, called = ([n for n in nodes if (n.op == "placeholder") == inputs] for inputs in (True, False))
    used = [x for n in called if n in second for x in n.all_input_nodes]
    kept = [*dict.fromkeys(x for x in (*used, *results) if x not in second)]
    once = part_of(given[count:], [n for n in called if n not in second], (kept, read))
    each = part_of([*given[:count], *kept], [n for n in called if n in second], results)
    own = backend.of(plan)
    return Halves(plan, own.runs(once, say), own.runs(each, say))


def _moved(nodes: list[fx.Node], first: set[fx.Node]) -> set[fx.Node]:
    """All that depends on some inputs: by its numbers, or by memory that is written where they have come in."""
    memory, order = memory_of(nodes), {node: i for i, node in enumerate(nodes)}
    members: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        members[memory[node]].append(node)
    writes: dict[fx.Node, list[fx.Node]] = defaultdict(list)
    for node in nodes:
        for place in {memory[x] for x in written(node)}:
            writes[place].append(node)
    found, before = {*first}, -1
    while len(found) != before:
        before = len(found)
        for node in nodes:
            if any(x in found for x in node.all_input_nodes):
                found.add(node)
        for place, writing in writes.items():
            own, last = members[place], max(order[node] for node in writing)
            early = any(user in found and order[user] < last for node in own for user in node.users)
            if early or any(node in found for node in writing):
                found.update(node for node in own if node.op != "placeholder")
                found.update(writing)
    return found


def _draws(node: fx.Node) -> bool:
    target: Any = node.target
    return target in (saved, put_back) or (isinstance(target, Operator) and draws(target, node.args, node.kwargs))
