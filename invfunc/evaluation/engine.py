"""From a function to its statistics: run the model part in blocks, the loss part once, pull back, and fold."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from invfunc import thresholds, tree
from invfunc._alike import added
from invfunc._extras import ticking
from invfunc._torch.generators import set_states, state_of, torchs_own
from invfunc._torch.values import checked_at_the_end
from invfunc.core.evaluate import Way, by_ways
from invfunc.errors import ArgumentError, InvFuncError, SampleAxisError, SplitError, to_be_split
from invfunc.evaluation.fold import SLOPE, Fold
from invfunc.evaluation.parts import Parts
from invfunc.evaluation.weights import LossPart
from invfunc.loss.outputs import OutputFinder, searched
from invfunc.loss.square_root import Columns, Gradient
from invfunc.operations.axis import Axis
from invfunc.operations.second_derivatives import TwiceDifferentiable
from invfunc.passes.by_place import neither, runs_on_part
from invfunc.passes.certified import check_roots
from invfunc.passes.loss import Made, Split, at_found, at_given
from invfunc.passes.run import WHOLE, Run
from invfunc.passes.runs import Runner
from invfunc.plan import Options
from invfunc.recording import Trace
from invfunc.recording.checks import cannot_draw, check_loss
from invfunc.recording.joined import check_batches, check_fewer, moved
from invfunc.recording.problem import Problem
from invfunc.recording.random import Draws, Drew
from invfunc.recording.scope import Scope
from invfunc.recording.steps import any_step, nonlinear
from invfunc.reductions.quantity import Quantity
from invfunc.sparsity.pattern import Pattern, alike, same_outputs

Rerun = Callable[[Any, int, Pattern | None], Run]
"""Runs the model part on some samples, so many of them, perhaps under a pattern."""


def budget(device: torch.device) -> int:
    """How many numbers an intermediate tensor may have: what a CPU keeps in its cache, what keeps a GPU busy."""
    return thresholds.CACHE.get(device.type, thresholds.ELSEWHERE)


class Engine:
    """One evaluation of one statistic, or of several of the same function together."""

    def __init__(
        self,
        problem: Problem,
        options: Options,
        quantities: Sequence[Quantity],
        called: Hashable = None,
    ) -> None:
        """`called` is what is asked of f, if the core may follow it."""
        self.called = called
        self.problem, self.plan, self.quantities = problem, options.plan, quantities
        kinds = {q.kind for q in quantities}
        averaged = any(k.averaged for k in kinds)
        self.first_order, self.second_order = all(k.first_order for k in kinds), any(k.second_order for k in kinds)
        constants = [x for q in quantities for x in q.reduction.constants]
        self.scope = Scope([*problem.tensors(), *constants], twice=self.second_order)
        limit = budget(problem.leaves[0].device)
        remember = any_step if averaged else nonlinear if self.second_order else None
        thin = all(q.reduction.phases[0].thin for q in quantities)
        pairs = any(q.reduction.pairs for q in quantities)
        whole = options.reduce is not None or averaged or thin or pairs
        apart = problem.samples is not None or any(not q.kind.second_order or q.reduction.each for q in quantities)
        self.runner = Runner(problem, self.scope, options, limit, remember, whole, apart)
        self.fold = Fold(problem, self.scope, options, quantities, limit, self.runner.places, None)
        self.sweeps, self.drawn = max(q.reduction.sweeps for q in quantities), any(q.drawing for q in quantities)
        self.scalar = False
        """Whether f, or the loss, has turned out to return one number for all samples."""
        self.joined = False
        """Whether its results will be joined with others, and f has not been seen to allow it."""
        self.loss_part: LossPart | None = None
        self.refused: Exception | None = None
        """Why f cannot run on chunks of samples alone."""

    def result(self) -> tuple[list[Any], Any]:
        """What is asked for, and aux."""
        with ticking(self.fold.options.progress, self.problem.n * self.sweeps) as self.fold.ticks:
            if (found := self._by_core()) is not None:
                return self.fold.finished(), found[0]
            with self.scope:
                aux = self._run()
                return self.fold.finished(), self.scope.result(aux)

    def kept(self) -> Any:
        """Fold one of several batches, so that there are no results yet; aux."""
        self.fold.last = False
        with checked_at_the_end(own=True):
            if (found := self._by_core()) is not None:
                return found[0]
            with self.scope:
                return self.scope.result(self._run())

    def finished(self) -> list[Any]:
        """The results of all batches that the fold has seen."""
        with self.scope:
            return self.fold.finished()

    def check_others(self) -> None:
        """Check that f gives two batches that were joined what it gives each of them alone."""
        with self.scope:
            check_batches(self.problem, self._batch_alone(slice(0, self.problem.n)), self._batch_alone)

    def check_joined(self, whole: Any = None) -> None:
        """Check that f gives samples in the `whole` batch what it gives them alone, if they are to be joined."""
        if self.joined:
            p = self.problem
            if whole is None:
                with suppress(Exception, Drew):  # which are told of elsewhere
                    whole = self._batch_alone(slice(0, p.n))
            self.joined = not check_fewer(tree.tensors((whole,)), p.out_dims, p.n, p.tensors(), self._batch_alone)

    def _by_core(self) -> tuple[Any] | None:
        """aux, where the core follows f; the fold has then what it keeps."""
        if self.called is None or self.fold.keeper is not None:  # which gives away what it keeps at once
            return None
        fold, sources = self.fold, [q.drawing.generator for q in self.quantities if q.drawing is not None]
        before = [(g, state_of(g)) for g in (*torchs_own(), *sources)], [t.saved() for t in fold.accumulators]

        def undo() -> None:
            set_states(before[0])
            for t, kept in zip(fold.accumulators, before[1], strict=True):
                t.restore(kept)

        def call(way: Way) -> tuple[Parts, Any]:
            parts = Parts(self.problem, fold, way)
            return parts, parts.kept(self.joined)

        try:
            parts, aux = by_ways(self.problem.f, self.called, call, undo)
        except InvFuncError:
            return None
        self.scalar, self.joined = parts.scalar, parts.joined
        self.scope.wanted = self.scope.outside  # what is kept has been taken out of the run
        if parts.outputs is not None:
            self.loss_part = LossPart.of(self.problem, parts.outputs)
        return (aux,)

    # Of what: each folds over the runs of the function and returns aux

    def _run(self) -> Any:
        if self.plan.asked("samples") and self.problem.loss is None and not self.drawn and self.sweeps == 1:
            return self._in_chunks()
        if self.first_order and self.problem.loss is None:
            return self._gradient()
        self.check_joined()
        of_model = {q.kind.of_model for q in self.quantities}
        if of_model != {"no"}:
            return self._jacobian() if "yes" in of_model else self._gradient_or_jacobian()
        return self._found_split() if self.problem.loss is None else self._given_split()

    def _gradient(self) -> Any:
        """The shares of a loss function."""
        run = self.runner.loss()
        self.scalar = not run.result.ndim
        self.check_joined(self.scope.leave(run.result))
        self.fold.over(lambda: [run], self._ones)
        return run.aux

    def _jacobian(self) -> Any:
        """The rows of the Jacobian of a model function."""
        run = self.runner.model(WHOLE, self.problem.n, draws=Draws(stop=False))
        self.fold.over(lambda: [run], self.fold.units)
        return run.aux

    def _gradient_or_jacobian(self) -> Any:
        """The shares of a loss function, or the rows of the Jacobian of a model function."""
        run = self.runner.loss(or_model=True)
        self.scalar = isinstance(run.result, torch.Tensor) and not run.result.ndim
        if self.problem.others:
            z = run.result if isinstance(run.result, torch.Tensor) else run.outputs[0][0]
            with suppress(Drew):  # what draws at random is not the same again
                check_batches(self.problem, z, self._batch_alone if self.runner.alone is None else None)
        self.fold.over(lambda: [run], self._ones if isinstance(run.result, torch.Tensor) else self.fold.units)
        return run.aux

    def _batch_alone(self, part: slice, *, elsewhere: bool = False) -> Any:
        """What f returns for some samples alone, perhaps at other parameters."""
        runner = copy(self.runner)
        if elsewhere:
            runner.problem = replace(self.problem, leaves=moved(self.problem.leaves))
        with runs_on_part(True):
            return runner.run(part, part.stop - part.start, with_uses=False, draws=Draws(stop=True)).result

    def _ones(self, run: Run) -> Made:
        """The columns of a run whose output is the loss itself, of which no part is an affine function."""
        one: list[Columns] = [Gradient({0: torch.ones_like(self.scope.leave(run.result))[None]})]
        return {SLOPE: one, **{q.columns: [] if q.kind.second_order else one for q in self.quantities}}

    # Chunks of samples

    def _in_chunks(self) -> Any:
        """The results of chunks of the samples, each of which f sees alone: as those of the batches of a loader.

        Where the loss is neither one for each sample nor their mean or sum, its model part alone is divided.
        """
        parts, aux, model = self._parts, list[Any](), any(q.kind.of_model == "yes" for q in self.quantities)
        size, before = max(b - a for a, b in parts), [t.saved() for t in self.fold.accumulators]
        try:
            kind = self.runner.of_parts(size, "outputs" if model else "loss") if size < self.problem.n else "each"
            for a, b in self.runner.places.alike(parts, last=True):
                part = self._of_chunk(a, b, (b - a) / self.problem.n if kind == "mean" else 1)
                added("samples", aux.append, part._run())
                self.scalar = part.scalar
                if kind != "each" and (part.runner.places.counted or part.runner.places.order is not None):
                    raise neither()
        except (SampleAxisError, ArgumentError) as error:
            if model or self.drawn or self.fold.keeper is not None:
                raise
            self.refused = error
            for t, kept in zip(self.fold.accumulators, before, strict=True):
                t.restore(kept)
            self.check_joined()
            return self._found_split()
        return aux

    @property
    def _parts(self) -> list[tuple[int, int]]:
        return self.plan.ranges("samples", self.problem.n)

    def _of_chunk(self, start: int, stop: int, factor: float) -> Engine:
        """The evaluation of some samples alone, which are added to the fold."""
        part, runner = copy(self), self.runner
        part.problem, part.joined = self.problem.chunk(slice(start, stop), stop - start, factor), False
        part.plan = self.plan.without("samples")
        self.fold.decide()
        options = replace(runner.options, plan=part.plan)
        part.runner = Runner(
            part.problem, self.scope, options, runner.budget, runner.remember, runner.whole, runner.apart
        )
        return part

    # Splits

    def _given_split(self) -> Any:
        """diag_ggn(f, loss): blocks of the model function, then the loss of all outputs."""
        problem, draws, parts = self.problem, Draws(stop=False), self._parts
        if self.plan.asked("samples"):
            if len(parts) > 1:
                self.runner.of_parts(max(b - a for a, b in parts), "outputs")
            runs = list[Run]()
            for a, b in self.runner.places.alike(parts):
                run = self.runner.model(slice(a, b), b - a, with_uses=False, draws=Draws(stop=False))
                added("samples", lambda z, run=run: runs.append(replace(run, outputs=z)), run.outputs)
        else:
            runs = self.runner.blocks(self._few, draws)
        trace = Trace(self.scope, problem.n, with_uses=False, watcher=OutputFinder())
        joined, target = self._joined(runs), problem.target(trace)
        split = at_given(trace, joined, runs[0].result, self._lost, target, partial(problem.drawn, trace))
        check_roots(self.scope, trace, split.result, split.roots)
        self.scalar = not split.result.ndim
        self.loss_part = LossPart.of(problem, tree.unflatten([z for z, _ in joined], runs[0].result))
        made = self._made(split)

        def again(part: slice | torch.Tensor, n: int, pattern: Pattern | None) -> Run:
            return self.runner.model(part, n, isinstance(part, slice), Draws(stop=True), pattern)

        look = partial(self._look, again)
        aux = [run.aux for run in runs] if self.plan.asked("samples") else runs[0].aux
        # where the gradient of the loss keeps its graph, that must not be the one of the run that is differentiated
        if self.plan.asked("samples") or (self.second_order and self.scope.wanted):
            each = partial(self.runner.places.alike, runs, lambda run: (run.start, run.start + run.trace.n))
            model = self.runner.model
            self.fold.over(lambda: (model(r.part, r.trace.n, draws=r.trace.draws) for r in each()), made, look)
        else:
            self.fold.over(lambda: runs, made, look)
        return aux

    def _lost(self, outputs: Any, target: Any) -> Any:
        assert self.problem.loss is not None
        with TwiceDifferentiable():
            return self.problem.loss(outputs, target)

    def _made(self, split: Split) -> Made:
        """The columns of all quantities."""
        made = split.made(self.quantities)
        return {**made, SLOPE: [split.gradient()]} if self.second_order else made

    def _joined(self, runs: list[Run]) -> list[tuple[torch.Tensor, Axis]]:
        """The outputs of all blocks, and where the loss is to see the samples."""
        joined = []
        for i in runs[0].outputs:
            blocks = [axis.expose(self.scope.leave(z), run.trace.n) for run in runs for z, axis in (run.outputs[i],)]
            exposed = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
            axis = Axis(None) if self.problem.n == 1 else Axis(self.problem.out_dims % (exposed.ndim - 1))
            joined.append((axis.restore(exposed, self.problem.n), axis))
        return joined

    def _found_split(self) -> Any:
        """A loss function: run once for its outputs and their cotangents, then its model part again, part by part."""
        n, draws = self.problem.n, Draws(stop=False)
        within = set[int]()

        def followed() -> Run:
            finder = OutputFinder(within=within)
            run = self.runner.run(WHOLE, n, with_uses=False, draws=draws, finder=finder)
            check_loss(run.trace, run.result)
            self.runner.check_places(run, draws)
            check_roots(self.scope, run.trace, run.result, list(finder.roots.values()))
            return run

        try:
            light = self.runner.places.settled(lambda: searched(followed, draws), draws, loss=True)
        except SampleAxisError as error:
            if self.first_order and self.refused is not None:
                raise self.refused from None
            raise to_be_split(error) if error.unknown and error.reason else error from None
        if draws.drew and len(self._parts) > 1:
            if self.sweeps > 1:
                raise cannot_draw()
            draws.rewind()
            return self._in_chunks()
        trace, finder = light.trace, light.trace.watcher
        self.scalar = not light.result.ndim
        assert isinstance(finder, OutputFinder)
        wanted = finder.selected(check_loss(trace, light.result), self.scope.wanted)
        try:
            split = at_found(trace, finder, wanted, light.result, light.params)
        except SplitError:
            if self.refused is not None:
                raise self.refused from None
            if any(q.kind.convex for q in self.quantities):
                raise
            self.fold.over(lambda: [self.runner.loss(draws=draws)], self._ones)
            return [light.aux] if self.plan.asked("samples") else light.aux
        made, roots = self._made(split), split.roots

        def again(part: slice | torch.Tensor, n: int, pattern: Pattern | None) -> Run:
            return self.runner.up_to(roots, part, n, draws, pattern)

        look = None if draws.drew else partial(self._look, again)
        columns = max(sum(c.count for c in columns) for columns in made.values())
        self.fold.over(lambda: self.runner.parts(light, roots, columns, draws), made, look)
        return [light.aux] if self.plan.asked("samples") else light.aux

    def _look(self, rerun: Rerun, pattern: Pattern, run: Run) -> Run | None:
        """The model part on one sample under a pattern, unless it is something else in the batch."""
        n, first = run.trace.n, run.start - self.problem.first
        try:
            with checked_at_the_end(own=True):
                alone = rerun(slice(first, first + 1), 1, pattern)
                if not alike(run, alone):
                    return None
                if n > 1:  # each sample at the place of the next: nothing may belong to a place
                    places = first + torch.arange(n, device=self.problem.leaves[0].device).roll(1)
                    return alone if same_outputs(run, rerun(places, n, None), shift=1) else None
                return alone
        except Exception as error:  # f may not run on one sample (a constant of size N, random numbers)
            pattern.failed(error)
            return None

    @property
    def _few(self) -> bool:
        """Whether there are so few columns that blocks of samples would not pay."""
        return all(
            q.kind.first_order or (q.drawing is not None and q.drawing.count < thresholds.BLOCK_COLUMNS)
            for q in self.quantities
        )
