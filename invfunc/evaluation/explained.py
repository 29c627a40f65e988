"""What a fold is going to do, gathered in place of doing it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch

from invfunc import thresholds
from invfunc.budget.size import bytes_of
from invfunc.evaluation.decisions import Decision
from invfunc.passes.part import Pass
from invfunc.passes.pullback import Pullback
from invfunc.passes.run import Run
from invfunc.recording.problem import Problem
from invfunc.recording.tags import ParameterUse
from invfunc.reductions import Reduction
from invfunc.reductions.quantity import Accumulator, Quantity
from invfunc.report import Explanation, Parameter, Part, planned


@dataclass
class Entry:
    """What is done with the columns of one kind."""

    columns: int
    why: str
    passes: int = 0
    pullbacks: int = 0
    numbers: int = 0
    cost: float = 1.0
    parts: list[Part] = field(default_factory=list)


class Report:
    """Gathers what a fold would do after the runs of a function."""

    def __init__(self, problem: Problem, budget: int, asked: bool) -> None:
        """`asked` says that the caller said how many passes there are to be."""
        self.problem, self.budget, self.asked = problem, budget, asked
        self.entries: dict[Hashable, Entry] = {}
        self._operations: dict[int, dict[str, bool]] = {i: {} for i in range(len(problem.leaves))}
        """The operations that read each parameter, and whether its share is generic there."""
        self._matrices: dict[int, dict[int, tuple[tuple[tuple[int, ...], ...], int]]] = {}
        """The shapes of the matrices of each parameter and their bytes, of each quantity."""

    def ran(self, run: Run) -> None:
        """Note which operations read the parameters."""
        for use in run.trace.uses:
            name = use.call.name if use.call is not None else "f"
            for i in use.derived.leaves:
                known = self._operations[i]
                known[name] = known.get(name, False) or use.recipe.generic

    def matrices(self, run: Run, accumulator: Accumulator, shapes: dict[int, list[list[int]]]) -> None:
        """Note which matrices are kept of each parameter."""
        kept = {i: (tuple(map(tuple, x)), bytes_of(x, run.params[i])) for i, x in shapes.items()}
        self._matrices.setdefault(id(accumulator.quantity), kept)

    def on(self, pullback: Pullback, group: Sequence[Accumulator], decision: Decision) -> None:
        """Note how the columns of some quantities are pulled back."""
        entry, reductions = self._entry(group, pullback.total, decision.why), [t.reduction for t in group]
        parts = decision.pullbacks(pullback)
        if decision.way is None or parts[0] is pullback:
            self._pulled(entry, pullback, reductions)
            return
        for part in parts:
            sides = part.sides if part.run is pullback.run else 1  # at a bottleneck, columns are those of a root
            entry.passes += sides * part.total
            entry.pullbacks += sides * len(part.passes(reductions)) if part.total else 0
        told, numbers = planned(decision.way, pullback.total, pullback.run, self.budget, self.problem.name)
        entry.numbers, entry.cost = max(entry.numbers, numbers), decision.way.cost
        entry.parts = entry.parts or told

    def second_order(self, pullback: Pullback, group: Sequence[Accumulator], decision: Decision) -> None:
        """Note how a Hessian is computed: columns of the loss and of each nonlinear call, or entries one by one."""
        self.on(pullback, group, decision)
        entry, once = self._entry(group, pullback.total, decision.why), pullback.leaves or frozenset()
        others = {i for t in pullback.run.trace.uses for i in t.derived.leaves} - once
        if others:
            self._pulled(entry, replace(pullback, leaves=frozenset(others)), [t.reduction for t in group])
            names, size = tuple(self.problem.name(i) for i in sorted(others)), 0
            size = sum(self.problem.leaves[i].numel() for i in others)
            entry.passes += size
            entry.parts = entry.parts or [Part("entry by entry", names, size, size)]

    def chain(self, pullback: Pullback, group: Sequence[Accumulator]) -> None:
        """Note that one matrix is averaged at each layer."""
        entry = self._entry(group, pullback.total, "")
        entry.passes, entry.pullbacks = 0, 0
        entry.numbers = 2 * pullback.run.trace.n * max(s**2 for s in [*pullback.run.trace.sizes, 1])

    def _entry(self, group: Sequence[Accumulator], columns: int, why: str) -> Entry:
        q = group[0].quantity
        entry = self.entries.setdefault(q.columns, Entry(columns, why or q.kind.why))
        entry.columns = columns
        return entry

    def _pulled(self, entry: Entry, pullback: Pullback, reductions: Sequence[Reduction]) -> None:
        """Note that every column is pulled back."""
        passes = pullback.passes(reductions)
        if not passes:
            return
        sides = pullback.sides
        times = sides * (2 if len(passes) > 1 and any(m.apart for m in reductions) else 1)
        entry.pullbacks += times * len(passes)
        entry.passes += times * len(passes) if self.asked else sides * pullback.total
        entry.numbers = max(
            entry.numbers, *(sides * _numbers(pullback, each, reductions, self._parts(pullback)) for each in passes)
        )

    def _parts(self, pullback: Pullback) -> int:
        return -(-self.problem.n // pullback.run.trace.n)

    def explanations(self, quantities: Sequence[Quantity]) -> list[Explanation]:
        """The explanation of each quantity."""
        size = max(x.element_size() for x in self.problem.leaves)
        found = []
        for q in quantities:
            e = self.entries.get(q.columns) or Entry(0, "nothing is wanted of any sample")
            kept = self._matrices.get(id(q), {})
            params = tuple(
                Parameter(
                    self.problem.name(i),
                    tuple(known),
                    tuple(name for name, generic in known.items() if generic),
                    *kept.get(i, ((), 0)),
                )
                for i, known in self._operations.items()
            )
            found.append(
                Explanation(
                    "", e.columns, e.passes, e.pullbacks, size * e.numbers, e.cost, e.why, tuple(e.parts), params
                )
            )
        return found


def joined(name: str, quantities: Sequence[Quantity], found: Sequence[Explanation]) -> Explanation:
    """One explanation of several quantities that share what they can."""
    each = list({q.columns: e for q, e in zip(quantities, found, strict=True)}.values())
    return replace(
        found[0],
        name=name,
        columns=sum(e.columns for e in each),
        passes=sum(e.passes for e in each),
        pullbacks=sum(e.pullbacks for e in each),
        bytes=max(e.bytes for e in each),
        cost=sum(e.cost * e.columns for e in each) / max(1, sum(e.columns for e in each)),
        why="from one forward pass",
        parts=(),
        members=tuple(found),
    )


def _numbers(pullback: Pullback, each: Pass, reductions: Sequence[Reduction], parts: int) -> int:
    """How many numbers a pass keeps: cotangents, what is made of them at one site, and shares that are not the result
    yet."""
    trace, width = pullback.run.trace, each.stop - each.start
    sizes = [trace.sizes[s] for s in each.sites]
    kept = max(sizes) if pullback.streams([each]) else sum(sizes)
    work = max(use.recipe.work for uses in each.uses.values() for use in uses)
    block = pullback.budget if reductions[0].thin else pullback.budget // thresholds.SHARES
    numbers = width * trace.n * (kept + max(sizes)) + 2 * min(trace.n * work, max(work, block))
    leaves = [pullback.run.params[i].numel() for i in each.uses]
    forms, squares = {m.forms for m in reductions}, any(m.squares for m in reductions)
    if "all" in forms and (parts > 1 or pullback.one_by_one):
        numbers += width * trace.n * (sum(leaves) * parts if parts > 1 else max(leaves))
    elif "blocks" in forms:
        shares = [_share(pullback.run.params[i], uses) for i, uses in each.uses.items()]
        copies = 2 if squares else 1  # others are squared and centred where they are
        numbers += copies * min(trace.n * width * max(shares), max(width * max(shares), block))
    if squares:
        copies = 1 if reductions[0].thin else 2  # products of all that is read are written where they stay
        numbers += copies * max(_squares(pullback.run.params[i], uses) for i, uses in each.uses.items())
    return numbers


def _share(leaf: torch.Tensor, uses: Sequence[ParameterUse]) -> int:
    """How many numbers the share of one sample and column has; for a table, only those of the rows that are picked."""
    return min(leaf.numel(), max(use.recipe.work for use in uses)) if _picked(uses) else leaf.numel()


def _picked(uses: Sequence[ParameterUse]) -> bool:
    return all(use.recipe.picks is not None for use in uses)


def _squares(leaf: torch.Tensor, uses: Sequence[ParameterUse]) -> int:
    """How many numbers the matrices of the sides of a parameter have; that of rows that are picked is diagonal."""
    rows = leaf.shape[0] if leaf.ndim else 1
    others = leaf.numel() // max(rows, 1)
    return (rows if _picked(uses) else rows**2) + (others**2 if leaf.ndim > 1 else 0)
