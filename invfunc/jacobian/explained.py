"""What a fold is going to do, gathered in place of doing it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field, replace

import torch

from invfunc import thresholds
from invfunc.jacobian.loss.columns import Gradient
from invfunc.jacobian.measures import Measure
from invfunc.jacobian.measures.eigenbasis import InEigenbasis
from invfunc.jacobian.problem import Problem
from invfunc.jacobian.pullback import Pass, Pullback
from invfunc.jacobian.quantity import Quantity, Tally
from invfunc.jacobian.residual import residual
from invfunc.jacobian.runs import Run
from invfunc.jacobian.structure.groups import Grouped
from invfunc.jacobian.structure.report import Explanation, Parameter, Part, chosen_parts
from invfunc.jacobian.structure.stages import Stages
from invfunc.jacobian.structure.ways import Chosen, Facts
from invfunc.jacobian.trace.tags import Tap

WHY = {
    "gradient": "the gradient is one column",
    "ggn": "",
    "hessian": "the columns of the loss, and those of the operations that bend",
    "chain": "one matrix, averaged over the samples at each layer",
    "jacobian": "the rows of the Jacobian",
    "gradient_or_jacobian": "the gradient, or the rows of the Jacobian",
}


@dataclass
class Entry:
    """Of the columns of one kind."""

    columns: int
    why: str
    passes: int = 0
    pullbacks: int = 0
    numbers: int = 0
    cost: float = 1.0
    parts: list[Part] = field(default_factory=list)


@dataclass
class Decision:
    """Whether columns take a shorter way, and why."""

    why: str
    way: Chosen | None = None
    sources: list[Grouped] = field(default_factory=list)
    facts: Facts | None = None


class Report:
    """What the runs of a function would be followed by."""

    def __init__(self, problem: Problem, budget: int, asked: bool) -> None:
        """`asked` says that the caller said how many passes there are to be."""
        self.problem, self.budget, self.asked = problem, budget, asked
        self.entries: dict[Hashable, Entry] = {}
        self.stage = 0
        self._operations: dict[int, dict[str, bool]] = {i: {} for i in range(len(problem.leaves))}
        """By the place of a parameter, with whether it is generic there."""

    def ran(self, run: Run) -> None:
        """Which operations read the parameters."""
        for tap in run.trace.taps:
            name = tap.call.name if tap.call is not None else "f"
            for i in tap.derived.leaves:
                known = self._operations[i]
                known[name] = known.get(name, False) or tap.recipe.generic

    def on(self, way: Pullback | Stages, group: Sequence[Tally], chosen: Decision | None) -> None:
        """How the columns of some quantities go."""
        pullback = way.pullback if isinstance(way, Stages) else way
        entry = self._entry(group, pullback.total, chosen.why if chosen else "")
        measures = [t.measure if self.stage == 0 else InEigenbasis({}, False) for t in group]  # there is no other then
        if isinstance(way, Stages) and chosen is not None and chosen.facts is not None:
            self._structured(entry, way, chosen.facts, measures)
        else:
            self._pulled(entry, pullback, measures)

    def bent(self, pullback: Pullback, group: Sequence[Tally], once: frozenset[int], slope: Gradient) -> None:
        """Those of a Hessian: the columns of the loss, and the rest at each call that bends, or entry by entry."""
        entry, measures = self._entry(group, pullback.total, ""), [t.measure for t in group]
        others = {i for t in pullback.run.trace.taps for i in t.derived.leaves} - once
        bent = residual(pullback.scope, pullback.run, slope) if pullback.run.trace.steps and once else []
        made = [*pullback.made, *bent]
        entry.columns = sum(c.count for c in made)
        self._pulled(entry, replace(pullback, made=made, leaves=once), measures)
        if others:
            self._pulled(entry, replace(pullback, leaves=frozenset(others)), measures)
            names, size = tuple(self.problem.name(i) for i in sorted(others)), 0
            size = sum(self.problem.leaves[i].numel() for i in others)
            entry.passes += size
            entry.parts = entry.parts or [Part("entry by entry", names, size, size)]

    def chain(self, pullback: Pullback, group: Sequence[Tally]) -> None:
        """A matrix that is averaged at each layer."""
        entry = self._entry(group, pullback.total, "")
        entry.passes, entry.pullbacks = 0, 0
        entry.numbers = 2 * pullback.run.trace.n * max(s**2 for s in [*pullback.run.trace.sizes, 1])

    def _entry(self, group: Sequence[Tally], columns: int, why: str) -> Entry:
        q = group[0].quantity
        entry = self.entries.setdefault(q.columns, Entry(columns, why or WHY[q.of]))
        entry.columns = columns
        return entry

    def _pulled(self, entry: Entry, pullback: Pullback, measures: Sequence[Measure]) -> None:
        """Every column is pulled back."""
        passes = pullback.passes(measures)
        if not passes:
            return
        sides = pullback.sides
        times = sides * (2 if len(passes) > 1 and any(m.before is not None for m in measures) else 1)
        entry.pullbacks += times * len(passes)
        entry.passes += times * len(passes) if self.asked else sides * pullback.total
        entry.numbers = max(
            entry.numbers, *(sides * _numbers(pullback, each, measures, self._parts(pullback)) for each in passes)
        )

    def _parts(self, pullback: Pullback) -> int:
        return -(-self.problem.n // pullback.run.trace.n)

    def _structured(self, entry: Entry, way: Stages, facts: Facts, measures: Sequence[Measure]) -> None:
        """The columns take a shorter way."""
        parts, most = chosen_parts(facts, way.chosen, self.budget, self.problem.name)
        passes, pullbacks = way.sent(measures)
        entry.passes, entry.pullbacks = entry.passes + passes, entry.pullbacks + pullbacks
        entry.numbers, entry.cost = max(entry.numbers, most), way.chosen.cost / facts.dense_cost
        entry.parts = entry.parts or list(parts)

    def explanations(self, quantities: Sequence[Quantity]) -> list[Explanation]:
        """Of each quantity."""
        params = tuple(
            Parameter(self.problem.name(i), tuple(known), tuple(name for name, generic in known.items() if generic))
            for i, known in self._operations.items()
        )
        size = max(x.element_size() for x in self.problem.leaves)
        found = []
        for q in quantities:
            e = self.entries.get(q.columns) or Entry(0, "nothing is wanted of any sample")
            found.append(
                Explanation(
                    "", e.columns, e.passes, e.pullbacks, size * e.numbers, e.cost, e.why, tuple(e.parts), params
                )
            )
        return found


def joined(name: str, quantities: Sequence[Quantity], found: Sequence[Explanation]) -> Explanation:
    """Of several quantities that share what they can."""
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


def _numbers(pullback: Pullback, each: Pass, measures: Sequence[Measure], parts: int) -> int:
    """In the cotangents of a pass, in what is made of them at one site, and in shares that are not the result yet."""
    trace, width = pullback.run.trace, each.stop - each.start
    sizes = [trace.sizes[s] for s in each.sites]
    kept = max(sizes) if pullback.streams([each]) else sum(sizes)
    work = max(tap.recipe.work for taps in each.taps.values() for tap in taps)
    block = pullback.budget if measures[0].thin else pullback.budget // thresholds.SHARES
    numbers = width * trace.n * (kept + max(sizes)) + 2 * min(trace.n * work, max(work, block))
    leaves = [pullback.run.params[i].numel() for i in each.taps]
    forms = {m.forms for m in measures}
    if "all" in forms and (parts > 1 or pullback.one_by_one):
        numbers += width * trace.n * (sum(leaves) * parts if parts > 1 else max(leaves))
    elif "blocks" in forms:
        shares = [_share(pullback.run.params[i], taps) for i, taps in each.taps.items()]
        numbers += 2 * min(trace.n * width * max(shares), max(width * max(shares), block))
    if any(m.squares for m in measures):
        numbers += 2 * max(_squares(pullback.run.params[i], taps) for i, taps in each.taps.items())
    return numbers


def _share(leaf: torch.Tensor, taps: Sequence[Tap]) -> int:
    """In what is formed of a parameter for one sample and column: of a table, the rows that are picked."""
    return min(leaf.numel(), max(tap.recipe.work for tap in taps)) if _picked(taps) else leaf.numel()


def _picked(taps: Sequence[Tap]) -> bool:
    return all(tap.recipe.rows is not None for tap in taps)


def _squares(leaf: torch.Tensor, taps: Sequence[Tap]) -> int:
    """In the matrices of the sides of a parameter; of rows that are picked, the diagonal of one."""
    rows = leaf.shape[0] if leaf.ndim else 1
    others = leaf.numel() // max(rows, 1)
    return (rows if _picked(taps) else rows**2) + (others**2 if leaf.ndim > 1 else 0)
