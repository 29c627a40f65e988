"""Runs of a problem's function: whole, in parts of the batch, up to its outputs, or sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext, suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from invfunc import thresholds, tree
from invfunc._torch.functorch import version
from invfunc._torch.values import checked_at_the_end
from invfunc.errors import ArgumentError, SampleAxisError, not_alone
from invfunc.loss.outputs import ModelOutput, OutputFinder, Reached, marking
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import BATCH_SUM
from invfunc.operations.factors import Part
from invfunc.passes.alone import Alone, NotAlone
from invfunc.passes.by_place import (
    check_again,
    check_parameters,
    check_part,
    not_in_parts,
    other_again,
    other_in_part,
    other_losses_in_part,
    runs_on_part,
)
from invfunc.passes.by_rows import Places
from invfunc.passes.certified import check_uses
from invfunc.passes.evidence import Evidence
from invfunc.passes.run import WHOLE, Run, exposed
from invfunc.passes.sizes import Sizes, see, seen
from invfunc.plan import Options, even
from invfunc.recording import Trace
from invfunc.recording.checks import cannot_draw, check_in_part, check_loss, check_same, no_outputs, output_axis
from invfunc.recording.follower import Follower
from invfunc.recording.problem import Problem
from invfunc.recording.random import Draws, Drew, restore
from invfunc.recording.scope import Scope
from invfunc.recording.steps import Remember
from invfunc.recording.tags import Derived, Sampled


class Runner:
    """Runs the function of a problem; `budget` bounds the numbers in an intermediate tensor of a block."""

    def __init__(
        self,
        problem: Problem,
        scope: Scope,
        options: Options,
        budget: int,
        remember: Remember | None,
        whole: bool,
        apart: bool,
    ) -> None:
        """`remember` says which calls are to be run again; `whole` that blocks of samples do not pay; `apart` that the
        samples are told apart in the result."""
        self.problem, self.scope, self.budget = problem, scope, budget
        self.options, self.plan, self.fast = options, options.plan, options.fast
        self.remember, self.whole = remember, whole or budget > thresholds.BUSY
        self.alone: Alone | None = None  # the last resort, once the function could not be followed
        self.apart = apart
        self.places = Places(problem, Evidence(problem, scope))

    def run(
        self,
        part: Part,
        n: int,
        *,
        with_uses: bool = True,
        partial: bool = False,
        draws: Draws | None = None,
        finder: OutputFinder | None = None,
        pattern: Follower | None = None,
    ) -> Run:
        told: dict[str, Any] = {"with_uses": with_uses, "partial": partial, "draws": draws, "pattern": pattern}
        told |= {"remember": self.remember if with_uses else None, "watcher": finder}
        apart, known = self.apart and n > 1, self.places.beforehand(n)
        trace = Trace(self.scope, n, fast=self.fast, apart=apart, beforehand=known, **told)
        params = trace.parameters(self.problem.leaves, enter=with_uses or finder is not None)
        run = Run(trace, params, part, {}, (part.start or 0) if isinstance(part, slice) else 0)
        before = [(x, version(x)) for x in self.problem.tensors()]
        try:
            with marking(trace), nullcontext() if pattern is None else pattern.labels, self.scope.evaluating():
                run.result, run.aux = self.problem.call(trace, params, part)
        except Reached:
            assert finder is not None
            run.outputs = {i: (r.value, r.axis) for i, r in finder.roots.items()}
        finally:
            self.places.hear(trace)
        if any(version(x) != then for x, then in before):
            raise ArgumentError(
                "f writes into one of its arguments in place; it may run several times, so copy it first."
            )
        return run

    def loss(self, or_model: bool = False, draws: Draws | None = None) -> Run:
        """The loss function in one run; `or_model` also takes a model function; `draws` are those to be repeated."""
        after = draws.rewind() if draws is not None else {}
        drawn = Draws(stop=False) if draws is None else draws
        run = self.places.settled(lambda: self._loss(or_model, drawn), drawn, loss=True)
        restore(after)
        return run

    def _loss(self, or_model: bool, draws: Draws) -> Run:
        problem = self.problem
        try:
            run = self.run(WHOLE, problem.n, draws=draws)
            if or_model and isinstance(run.result, torch.Tensor) and run.result.ndim > 1:
                return self._checked_model(run)
            check_loss(run.trace, run.result)
            if isinstance(run.trace.tag(run.result), Derived) and not run.result.ndim:
                zero = torch.zeros_like(run.result.detach())  # a sum over the samples of nothing
                run.trace.set(zero, Sampled(BATCH_SUM, around="f"))
                with run.trace:
                    run.result = run.result + zero
            run.check([run.result])
            self.check_places(run, draws)
            check_uses(self.scope, run.trace, [(run.result, Axis(0))])
        except SampleAxisError as error:
            run = self._run_alone(self._alone(error), WHOLE, problem.n)
            if or_model and isinstance(run.result, torch.Tensor) and run.result.ndim > 1:
                return self._take_outputs(run)
            check_loss(run.trace, run.result)
        run.outputs = {0: (run.result, Axis(None))}
        return run

    def check_places(self, run: Run, draws: Draws) -> None:
        """Check that the samples have places in a scalar loss, and remember these."""
        self.places.check(run, draws, lambda order: self.run(order, run.trace.n, with_uses=False, draws=draws))

    def _checked_model(self, run: Run) -> Run:
        self._take_outputs(run)
        if run.trace.with_uses:
            run.check()
            check_uses(self.scope, run.trace, [*run.outputs.values()])
        return run

    def _alone(self, error: SampleAxisError) -> Alone:
        """The function on each sample alone: the last resort where it cannot be followed (`error` says why)."""
        if not (error.unknown or self.plan.asked("samples")):
            raise error
        try:
            self.alone = Alone(self.problem, self.scope)
        except NotAlone as why:
            raise not_alone(error, str(why)) if error.unknown else error from None
        return self.alone

    def loss_alone(self, error: SampleAxisError) -> Run:
        """A loss for each sample, as they are in the whole batch."""
        run = self._run_alone(self._alone(error), WHOLE, self.problem.n, with_uses=False)
        check_loss(run.trace, run.result)
        return run

    def _run_alone(self, alone: Alone, part: Part, n: int, with_uses: bool = True) -> Run:
        return alone.with_uses(part, n) if with_uses and isinstance(part, slice) else alone.without_uses(part, n)

    def model(
        self,
        part: Part,
        n: int,
        with_uses: bool = True,
        draws: Draws | None = None,
        pattern: Follower | None = None,
    ) -> Run:
        """The model function on a part; `run.result` becomes the structure of its outputs; `draws` are repeated."""
        partial = n < self.problem.n
        if self.alone is not None:
            return self._model_alone(self.alone, part, n, with_uses)
        after = draws.rewind() if draws is not None else {}
        drawn = Draws(stop=partial) if partial or draws is None else draws
        options: dict[str, Any] = {"with_uses": with_uses, "partial": partial, "draws": drawn, "pattern": pattern}
        try:
            with runs_on_part(partial):
                run = self.places.settled(lambda: self._checked_model(self.run(part, n, **options)), drawn)
            restore(after)
        except Drew:
            raise cannot_draw() from None
        except SampleAxisError as error:
            return self._model_alone(self._alone(error), part, n, with_uses)
        return run

    def _model_alone(self, alone: Alone, part: Part, n: int, with_uses: bool) -> Run:
        return self._take_outputs(self._run_alone(alone, part, n, with_uses))

    def _take_outputs(self, run: Run) -> Run:
        named, structure = tree.outputs(run.result)
        if not named:
            raise no_outputs(run.result)
        run.outputs, run.result = {}, structure
        n, dim = self.problem.n, self.problem.out_dims
        for i, (path, z) in enumerate(named):
            if run.trace.n < n and -z.ndim <= dim < z.ndim and z.shape[dim] == n:
                raise not_in_parts("a constant has the length of the batch")  # it has broadcast a part of one sample
            z = self._with_axis(run, self._of_each_sample(run, z))
            run.outputs[i] = z, output_axis(run.trace, z, self.problem.out_dims, path)
        return run

    def _of_each_sample(self, run: Run, z: Any) -> Any:
        """The outputs; one that depends on the parameters alone is taken for that of every sample."""
        if not isinstance(z, torch.Tensor) or not isinstance(run.trace.tag(z), Derived) or not z.is_floating_point():
            return z
        zero = torch.zeros_like(z.detach())
        run.trace.set(zero, Sampled(Axis(self.problem.out_dims % max(z.ndim, 1))))
        with run.trace:
            return z + zero

    def _with_axis(self, run: Run, z: Any) -> Any:
        """The outputs; those of one sample may have lost its axis (`squeeze()`)."""
        dim = self.problem.out_dims
        squeezed = run.trace.n == 1 and isinstance(z, torch.Tensor) and z.is_floating_point() and 1 not in z.shape
        if not squeezed or not -z.ndim - 1 <= dim <= z.ndim:
            return z
        with run.trace:
            return z.unsqueeze(dim)

    def check_part(self, run: Run, before: Sequence[Run] = ()) -> None:
        """The outputs of a sample must not depend on how many are beside it; `before` are runs on earlier parts."""
        if run.trace.n == self.problem.n:
            return
        some = before[:: max(1, len(before) // thresholds.PARTS_CHECKED)]
        beside = [(run.part.start, [z[0] for z in exposed(run)]) for run in some]
        check_part(run.part, self.problem.n, exposed(run), lambda places: self._modelled(self, places), beside)
        self._check_parameters(run.trace.n, self._modelled)

    def _modelled(self, runner: Runner, at: list[int]) -> list[torch.Tensor]:
        return exposed(runner.model(self._at(at), len(at), with_uses=False))

    def _at(self, places: list[int]) -> torch.Tensor:
        return torch.tensor(places, device=self.problem.leaves[0].device)

    def _check_parameters(self, most: int, outputs: Callable[[Runner, list[int]], list[torch.Tensor]]) -> None:
        """Check that no parameters are read by the place of a sample, also where they are the same for all places."""
        if self.alone is None and self.problem.n > 1:
            others = (self.scope, self.options, self.budget, None, self.whole, self.apart)
            check_parameters(self.problem, most, lambda problem, places: outputs(Runner(problem, *others), places))

    def blocks(self, few: bool, draws: Draws) -> list[Run]:
        """The model function in one pass, or, if columns are not few, in blocks of samples that fit the cache."""
        n = self.problem.n
        divided = any(self.plan.asked(over) for over in ("outputs", "params"))
        if few or self.whole or divided or self.problem.has_aux or n < thresholds.BLOCK_BATCH or self._fits:
            return [self.model(WHOLE, n, draws=draws)]
        runs, first = list[Run](), min(n, thresholds.BLOCK_SAMPLES)
        with suppress(Exception), checked_at_the_end(own=True):  # f may not run on a part (a constant of size N)
            runs.append(self.model(slice(0, first), first))
            sizes = Sizes(sum(z.numel() for z, _ in runs[0].outputs.values()) // first, runs[0].trace.largest)
            size = sizes.block(self.budget)
            rest = [] if first < n <= size else even(n - first, size)
            runs += [self.model(slice(first + a, first + b), b - a) for a, b in rest if a < b]
            if sum(run.trace.n for run in runs) == n:
                self.check_part(runs[-1], runs[:-1])
                return runs
        whole = self.model(WHOLE, n, draws=draws)
        if runs:
            check_again(exposed(runs[0]), exposed(whole), lambda: self._modelled(self, [*range(first)]))
            see(self.problem, sizes)
        return [whole]

    @property
    def _fits(self) -> bool:
        """Whether all samples are known to fit in one block, and f does not run again, which would be looked at."""
        known = None if self.scope.wanted else seen(self.problem)
        return known is not None and thresholds.BLOCK_SAMPLES < self.problem.n <= known.block(self.budget)

    def parts(self, light: Run, roots: list[ModelOutput], columns: int, draws: Draws) -> Iterable[Run]:
        """The model part: in the chunks that were asked for, else in blocks, as large as the run `light` shows."""
        n, parts = self.problem.n, self.plan.ranges("samples", self.problem.n)
        if draws.drew and len(parts) > 1:
            raise cannot_draw()
        few = columns < thresholds.BLOCK_COLUMNS or n < thresholds.BLOCK_BATCH

        def outputs(runner: Runner, places: list[int]) -> list[torch.Tensor]:
            wanted = [r.ordinal for r in roots]
            return exposed(runner.run(self._at(places), len(places), finder=OutputFinder(wanted)))

        if any(self.plan.splits.values()) or draws.drew or few or self.whole:
            if len(parts) > 1:
                self._check_parameters(parts[0][1], outputs)
            return (self.up_to(roots, slice(a, b), b - a, draws) for a, b in self.places.alike(parts))
        blocks = even(n, Sizes(columns, light.trace.largest).block(self.budget))
        if len(blocks) == 1:
            return [self.up_to(roots, WHOLE, n, draws)]
        with suppress(Exception), checked_at_the_end(own=True):  # as above; else the fault comes again
            self._check_parameters(blocks[0][1], outputs)
            return [self.up_to(roots, slice(a, b), b - a, draws) for a, b in blocks]
        return [self.up_to(roots, WHOLE, n, draws)]

    def up_to(self, roots: list[ModelOutput], part: Part, n: int, draws: Draws, pattern: Follower | None = None) -> Run:
        """The function on a part of the batch until its outputs are there; they have to be those of the whole batch."""
        part = WHOLE if isinstance(part, slice) and n == self.problem.n else part
        after, wanted = draws.rewind(), [r.ordinal for r in roots]
        error = partial(other_again, "other outputs") if part is WHOLE else other_in_part
        try:
            with runs_on_part(part is not WHOLE):
                run = self.run(part, n, finder=OutputFinder(wanted), pattern=pattern)
        finally:
            restore(after)
        check_uses(self.scope, run.trace, [*run.outputs.values()])
        for root in roots:
            z, axis = run.outputs.get(root.ordinal, (None, root.axis))
            if z is None:
                raise error()
            check_in_part(z, axis, run.trace.n, root.value, root.axis, self.problem.n, part, error)
        return run

    def loss_parts(self, whole: torch.Tensor, draws: Draws) -> Iterable[Run]:
        """A loss for each sample: the function itself on parts of the batch."""
        if draws.drew:
            raise cannot_draw()
        parts = self.plan.ranges("samples", self.problem.n)
        if len(parts) > 1:
            self._check_parameters(
                parts[0][1], lambda near, places: [near.run(self._at(places), len(places), partial=True).result]
            )
        for start, stop in self.places.alike(parts):
            part, n = slice(start, stop), stop - start
            with runs_on_part(n < self.problem.n):
                run = self.run(part, n) if self.alone is None else self._run_alone(self.alone, part, n)
            check_loss(run.trace, run.result)
            check_uses(self.scope, run.trace, [(run.result, Axis(0))])
            check_same(run.result, whole[start:stop], other_losses_in_part)
            yield replace(run, outputs={0: (run.result, Axis(None))}, part=WHOLE)
            del run
