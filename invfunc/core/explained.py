"""Explanations of statistics: f runs, and what would be done with its uses is told in place of being done."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from invfunc import thresholds, tree
from invfunc.budget import bytes_of
from invfunc.core.columns import Output, columns_at
from invfunc.core.evaluate import Fold, Pullback, by_kinds, kept, of_each_kind, uses_of
from invfunc.core.hessian import HessianDiagonal
from invfunc.core.marks import spelled
from invfunc.core.refusals import matrices
from invfunc.core.run import Run
from invfunc.core.uses import Copies, Use
from invfunc.core.ways import WAYS, Way
from invfunc.loss.square_root import Columns
from invfunc.plan import Explanation, Options, Parameter, ReportPart
from invfunc.problem import BoundProblem
from invfunc.reductions.reduction import Quantity
from invfunc.structure.plan import Shortcut, Structure

HOW = {
    WAYS[0]: "",
    WAYS[1]: "on each sample alone, with a copy of the parameters for each, as f is not followed: ",
    WAYS[2]: "by the rows of the Jacobian of the [N] losses, as f is not followed: ",
}


@dataclass
class Entry:
    """The steps that are taken with the columns of one kind."""

    columns: int = 0
    passes: int = 0
    pullbacks: int = 0
    cost: float = 1.0
    why: str = ""
    parts: list[ReportPart] = field(default_factory=list)


@dataclass
class Teller(Pullback):
    """Tells how vectors would be pulled back."""

    notes: dict[int, Entry] = field(default_factory=dict)
    """An entry for each fold, by its id."""

    def __post_init__(self) -> None:
        self.of = uses_of(self.run, self.uses)[0]

    @property
    def entry(self) -> Entry:
        """The steps for these folds."""
        found = self.notes.setdefault(id(self.folds[0]), Entry())
        self.notes.update(dict.fromkeys(map(id, self.folds), found))
        return found

    def stream(self, out: Any, cotangent: Any) -> None:
        entry, chunks = self.entry, len(self._chunks())
        entry.columns, entry.passes, entry.pullbacks = 1, entry.passes + chunks, entry.pullbacks + chunks

    pull = stream

    def columns(self, roots: Sequence[Output], columns: Sequence[Columns]) -> None:
        self.entry.columns = sum(c.count for c in columns)
        super().columns(roots, columns)

    def _group(
        self, leaves: range, roots: Sequence[Output], columns: Sequence[Columns], start: int, stop: int, count: int
    ) -> None:
        self.entry.passes += stop - start
        self.entry.pullbacks += 1

    def taken(self, structure: Structure, way: Shortcut) -> bool:
        entry, count = self.entry, structure.columns.count
        entry.columns, entry.cost, entry.why = count, way.cost, "by the structure of the function"
        entry.parts = self._parts(way, count)
        entry.passes = sum(part.passes for part in entry.parts)
        entry.pullbacks = sum(-(-part.passes // self._most) for part in entry.parts)
        return True

    @property
    def _most(self) -> int:
        """The number of columns that are pulled back at once."""
        return max(1, thresholds.GROUPED // max(1, self.run.numbers))

    def _parts(self, way: Shortcut, columns: int) -> list[ReportPart]:
        """The parts of a way, for so many columns."""
        found, given = self._part("closed form", way.closed, columns, 0), columns
        for stage in way.stages:
            for reach in stage.reaches:
                how = "local" if reach.colouring is not None else "dense" if given == columns else "narrow"
                found += self._part(how, reach.leaves, given, reach.passes)
            given = given if stage.end is None else stage.end.rank * stage.end.count
        return found + self._part("dense", way.dense, columns, columns)

    def _part(self, how: str, leaves: frozenset[int], columns: int, passes: int) -> list[ReportPart]:
        return [ReportPart(how, tuple(map(self.problem.name, sorted(leaves))), columns, passes)] if leaves else []

    def hessian(self, diagonal: HessianDiagonal, out: torch.Tensor, cotangent: torch.Tensor) -> None:
        entry = self.entry
        for part, uses in diagonal.sent(out, cotangent):
            entry.columns += part.count
            if len(uses) > len(diagonal.nearest(part, uses)):
                entry.passes += part.count
                entry.pullbacks += -(-part.count // self._most)
        if rest := frozenset(diagonal.rest):
            size = sum(self.run.leaves[i].numel() for i in rest)
            entry.parts, entry.passes = self._part("entry by entry", rest, size, size), entry.passes + size

    def rest(self, places: Sequence[int], cast: bool) -> None:
        pass  # as `hessian` has told

    def entries(self, run: Run, out: torch.Tensor, places: Sequence[int]) -> None:
        entry, size = self.entry, sum(leaf.numel() for leaf in self.problem.leaves)
        entry.columns = entry.passes = entry.pullbacks = size
        entry.parts = self._part("entry by entry", frozenset(places), size, size)

    def chain(self, quantity: Quantity, out: torch.Tensor) -> None:
        with torch.enable_grad():
            self.entry.columns = sum(c.count for c in columns_at(self.run, out, quantity))


def explained(
    problem: BoundProblem, quantities: Sequence[Quantity], options: Options, way: Way, undo: Callable[[], Any]
) -> list[Explanation]:
    """The steps to each of some quantities, if f is called in a way; of chunks of samples, one is looked at."""
    if len(of_each_kind(quantities)) > 1:
        every = by_kinds(quantities, way, lambda some, way: explained(problem, some, options, way, undo))
        each = {i: e for group, found in every for i, e in zip(group, found, strict=True)}
        return [each[i] for i in range(len(quantities))]
    chunks = options.plan.ranges("samples", problem.n) if options.plan.asked("samples") else [(0, problem.n)]
    first = problem
    if len(chunks) > 1:
        a, b = max(chunks, key=lambda chunk: chunk[1] - chunk[0])
        first = problem.chunk(slice(a, b), b - a)
    asked = any(options.plan.splits.values())
    plan, notes, tellers = options.plan.without("samples"), dict[int, Entry](), list[Teller]()

    def look(*given: Any) -> Teller:
        tellers.append(Teller(*given, notes=notes))
        return tellers[-1]

    told, phased = replace(options, plan=plan, reduce=None), plan.asked("params")  # phase by phase
    folds = kept(first, quantities, told, way, phased=phased, undo=undo, pullback=look).folds
    run, of, found = tellers[-1].run, tellers[-1].of, []
    for fold, q in zip(folds, quantities, strict=True):
        e = notes[id(fold)]
        pullbacks = e.pullbacks * (len(chunks) * q.reduction.sweeps if len(chunks) > 1 else 1)
        params = [_parameter(problem, q, i, uses) for i, uses in enumerate(of)]
        found.append(
            Explanation(
                "",
                e.columns,
                pullbacks if asked else e.passes,
                pullbacks,
                sum(p.bytes for p in params) or _size(fold),
                e.cost,
                HOW[way] + (e.why or _why(run, q, options, e)),
                tuple(e.parts),
                tuple(params),
            )
        )
    return found


def _why(run: Run, q: Quantity, options: Options, entry: Entry) -> str:
    """The reason why every column is pulled back."""
    if any(options.plan.splits.values()):
        return "because chunked asks for it"
    if q.kind.why:
        return q.kind.why
    if q.drawing is not None:
        return "they are drawn"
    reasons = {
        "with method='dense'": options.dense,
        "the result will be differentiated": run.deep,
        "samples are chosen": run.chosen is not None,
        "there are few columns": entry.columns < thresholds.FEW,
        "all of them are wanted": q.reduction.shortcuts == "no",
    }
    return next((why for why, holds in reasons.items() if holds), "the structure would save nothing")


def _parameter(problem: BoundProblem, q: Quantity, i: int, uses: Sequence[Use]) -> Parameter:
    """The places where a parameter is read, and the states that are kept of it."""
    names = {("f" if u.func is None else spelled(u.func)): isinstance(u, Copies) for u in uses}
    shapes = matrices(q.reduction, problem.leaves[i], uses)
    size = bytes_of(shapes, problem.leaves[i])
    generic = tuple(name for name, copies in names.items() if copies)
    return Parameter(problem.name(i), tuple(names), generic, tuple(map(tuple, shapes)), size)


def _size(fold: Fold) -> int:
    """The bytes of the result, made of nothing on a device without memory."""
    plain = [x.detach().to("meta") for x in fold.problem.leaves]
    fold.problem = replace(fold.problem, leaves=plain)
    fold.states, fold.results, fold.reduce = {}, {}, None
    fold.found = replace(fold.found, aside={})
    return sum(x.nbytes for x in tree.tensors(fold.finished()))
