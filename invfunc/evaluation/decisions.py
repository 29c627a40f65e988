"""Whether columns take a shorter way than through every operation, and why."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from invfunc._torch.values import fake
from invfunc.loss.square_root import Columns
from invfunc.operations.axis import Axis
from invfunc.passes.pullback import Pullback
from invfunc.passes.run import Run
from invfunc.passes.second_order import Local
from invfunc.plan import Options
from invfunc.recording.problem import Problem
from invfunc.recording.scope import Scope
from invfunc.reductions.quantity import Accumulator
from invfunc.sparsity.execute import possible, pullbacks
from invfunc.sparsity.groups import Grouped, OfRun
from invfunc.sparsity.moved import grouped
from invfunc.sparsity.pattern import Pattern
from invfunc.sparsity.planner import Planner, Way

Look = Callable[[Pattern, Run], Run | None]
"""Runs the model part on one sample under a pattern; None where that is something else than in the batch."""
Outputs = dict[int, tuple[torch.Tensor, Axis]]
MIXED = "the loss mixes the outputs before its criterion"


@dataclass
class Decision:
    """Whether columns take a shorter way, and why."""

    why: str
    way: Way | None = None
    columns: list[Grouped] = field(default_factory=list)

    def pullbacks(self, pullback: Pullback) -> list[Pullback]:
        """What is pulled back in place of all columns, if all that this needs can be had."""
        return pullbacks(pullback, self.way, self.columns)

    def taken(self, pullback: Pullback) -> list[Pullback]:
        """What is pulled back, then: all columns if it cannot."""
        parts = self.pullbacks(pullback)
        return parts if self.way is None or possible(parts) else [pullback]


class Decisions:
    """Those of one evaluation: that of the first run is that of all."""

    def __init__(self, problem: Problem, scope: Scope, options: Options) -> None:
        self.problem, self.scope, self.options = problem, scope, options
        self._known: dict[Hashable, Decision] = {}
        self._steps: dict[Hashable, list[int]] = {}
        """Of a Hessian, the calls whose columns were looked at."""

    def of(self, pullback: Pullback, look: Look | None, group: Sequence[Accumulator]) -> Decision:
        """How the columns of a GGN are pulled back."""
        key = group[0].quantity.columns
        if key not in self._known:
            self._known[key] = self._of_ggn(pullback, look, group)
        return self._known[key]

    def _of_ggn(self, pullback: Pullback, look: Look | None, group: Sequence[Accumulator]) -> Decision:
        why = self._why_dense(pullback, look, group)
        if why or look is None:
            return Decision(why)
        columns = _grouped(pullback.made)
        if columns is None:
            return Decision(MIXED)
        planner = Planner(pullback.run, columns, look, {t.reduction.shortcuts for t in group})
        way = planner.way()
        return Decision(planner.why, way, columns)

    def of_hessian(
        self,
        pullback: Pullback,
        look: Look | None,
        group: Sequence[Accumulator],
        outputs: Outputs,
        made: Sequence[Columns],
        second_order: Sequence[Local],
    ) -> Decision:
        """How those of a Hessian are: of the loss at the outputs, and of nonlinear calls at what these read."""
        key = group[0].quantity.columns
        if key not in self._known:
            self._known[key] = self._of_hessian(pullback, look, group, outputs, made, second_order)
            self._steps[key] = [c.step for c in second_order]
        known = self._known[key]
        if known.way is None:
            return known
        if self._steps[key] != [c.step for c in second_order]:  # of these samples, all that one gives may be zero
            return Decision("other calls are nonlinear in this block of samples")
        return replace(known, columns=[*known.columns, *_of_run(second_order)])

    def _of_hessian(
        self,
        pullback: Pullback,
        look: Look | None,
        group: Sequence[Accumulator],
        outputs: Outputs,
        made: Sequence[Columns],
        second_order: Sequence[Local],
    ) -> Decision:
        """That of the first run, with the columns of the loss alone."""
        why, run = self._why_dense(pullback, look, group), pullback.run
        if why or look is None:
            return Decision(why)
        if not {i for t in run.trace.uses for i in t.derived.leaves} <= (pullback.leaves or frozenset()):
            return Decision("a parameter is read again by what depends on it, or not linearly")
        columns, calls = _grouped(made, any_sign=True), _of_run(second_order)
        if columns is None:
            return Decision("the loss has a Hessian without known structure")
        if len(calls) < len(second_order):
            return Decision("a nonlinear call has a second derivative without known structure")
        added = not calls and all(_added(g) for g in columns)
        columns = (_grouped(made) or columns) if added else columns
        read = {i: c.step for c, g in zip(second_order, calls, strict=True) for i in g.groups}
        under, of_all = partial(_looked, look, outputs, read), [*columns, *calls]
        planner = Planner(run, of_all, under, {t.reduction.shortcuts for t in group}, added)
        way = planner.way()
        return Decision(planner.why, way, columns)

    def _why_dense(self, pullback: Pullback, look: Look | None, group: Sequence[Accumulator]) -> str:
        """Why every column has to be pulled back, if it has."""
        if self.options.dense:
            return "because method='dense' asks for it"
        if any(self.options.plan.asked(over) for over in ("outputs", "params")):
            return "because chunked asks for it"
        if look is None or group[0].quantity.drawing or any(t.reduction.shortcuts == "no" for t in group):
            return "there is no other way for this statistic or function"
        if fake(self.problem.leaves[0]):
            return "tensors have no numbers here (FakeTensorMode)"
        if self.scope.create_graph:
            return "the result will be differentiated, or a transform of torch.func is around it"
        return "" if self.options.fast and pullback.total else "there is nothing to pull back"


def _looked(look: Look, outputs: Outputs, read: dict[int, int], pattern: Pattern, run: Run) -> Run | None:
    """A run of one sample whose outputs are also what some steps read; these, by their numbers there, are `read`."""
    alone = look(pattern, replace(run, outputs=outputs))
    if alone is None or len(alone.trace.steps) != len(run.trace.steps):
        return None
    inputs = {i: (alone.trace.steps[k].inputs[0], run.outputs[i][1]) for i, k in read.items()}
    return replace(alone, outputs=alone.outputs | inputs)


def _grouped(made: Sequence[Columns], any_sign: bool = False) -> list[Grouped] | None:
    """Columns in groups, of those that there are (a cross entropy over one class has none); None if not all can be."""
    found = [grouped(c, any_sign) for c in made if c.count]
    known = [g for g in found if g is not None]
    return known if len(known) == len(found) else None


def _of_run(second_order: Sequence[Local]) -> list[Grouped]:
    """The columns of nonlinear calls in groups, of those whose second derivatives have a known structure."""
    return [OfRun(g) for c in second_order if (g := grouped(c.inner, any_sign=True)) is not None]


def _added(columns: Grouped) -> bool:
    """Whether no square is subtracted."""
    signs = columns.signs(slice(None))
    return signs is None or bool((signs >= 0).all())
