"""Runs of a problem's function: whole, in parts of the batch, up to its outputs, or sample by sample."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext, suppress
from typing import Any, Literal

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
    Kind,
    kind_of,
    neither,
    not_in_parts,
    other_in_part,
    runs_on_part,
)
from invfunc.passes.by_rows import Places
from invfunc.passes.certified import check_uses
from invfunc.passes.evidence import Evidence
from invfunc.passes.run import WHOLE, Run, exposed
from invfunc.passes.sizes import Sizes, see, seen
from invfunc.plan import Options, even
from invfunc.recording import Trace
from invfunc.recording.checks import cannot_draw, check_in_part, check_loss, no_outputs, output_axis
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
        told["scaled"] = self.problem.factor is not None
        apart, known = self.apart and n > 1, self.places.beforehand(n)
        trace = Trace(self.scope, n, fast=self.fast, apart=apart, beforehand=known, **told)
        params = trace.parameters(self.problem.leaves, enter=with_uses or finder is not None)
        run = Run(trace, params, part, {}, self.problem.first + (part.start or 0 if isinstance(part, slice) else 0))
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
        drawn = Draws(stop=partial) if draws is None else draws
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

    def of_parts(self, size: int, what: Literal["loss", "outputs"] | tuple[int, ...], draws: bool = True) -> Kind:
        """How the loss, the outputs or what was found to be these, of parts of at most so many samples, make up those
        of the batch; an error where they do not, or where f draws random numbers and that is not allowed."""

        def some(problem: Problem, places: list[int]) -> tuple[list[torch.Tensor], bool]:
            n, drawn = len(places), Draws(stop=not draws)
            few = problem.chunk(torch.tensor(places, device=problem.leaves[0].device), n)
            few.leaves = [*map(self.scope.leave, few.leaves)]
            runner = Runner(few, self.scope, self.options, self.budget, None, self.whole, self.apart)
            try:
                with runs_on_part(True):
                    if what == "loss":
                        run = runner.loss(draws=drawn)
                        if run.trace.counted and n > 1:
                            raise other_in_part("losses") if run.result.ndim else neither()
                        return [run.result.detach()], drawn.drew
                    if what == "outputs":
                        run = runner.model(WHOLE, n, with_uses=False, draws=drawn)
                    else:
                        run = runner.run(WHOLE, n, finder=OutputFinder([*what]), draws=drawn)
                    return [z.detach() for z in exposed(run)], drawn.drew
            except Drew:
                raise cannot_draw() from None
            finally:
                drawn.rewind()

        return kind_of(self.problem, size, some, what)

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
                if len(runs) > 1:
                    self.of_parts(size, "outputs", draws=False)
                return runs
        if runs:
            see(self.problem, sizes)
        return [self.model(WHOLE, n, draws=draws)]

    @property
    def _fits(self) -> bool:
        """Whether all samples are known to fit in one block, and f does not run again, which would be looked at."""
        known = None if self.scope.wanted else seen(self.problem)
        return known is not None and thresholds.BLOCK_SAMPLES < self.problem.n <= known.block(self.budget)

    def parts(self, light: Run, roots: list[ModelOutput], columns: int, draws: Draws) -> Iterable[Run]:
        """The model part: in the chunks that were asked for, else in blocks, as large as the run `light` shows."""
        n, wanted = self.problem.n, tuple(r.ordinal for r in roots)
        few = columns < thresholds.BLOCK_COLUMNS or n < thresholds.BLOCK_BATCH
        if any(self.plan.splits.values()) or draws.drew or few or self.whole:
            parts = self.plan.ranges("samples", n)
            if len(parts) > 1:
                self.of_parts(parts[0][1], wanted)
            return (self.up_to(roots, slice(a, b), b - a, draws) for a, b in self.places.alike(parts))
        blocks = even(n, Sizes(columns, light.trace.largest).block(self.budget))
        if len(blocks) > 1:
            with suppress(Exception), checked_at_the_end(own=True):  # as above; else the fault comes again
                self.of_parts(blocks[0][1], wanted)
                return [self.up_to(roots, slice(a, b), b - a, draws) for a, b in blocks]
        return [self.up_to(roots, WHOLE, n, draws)]

    def up_to(self, roots: list[ModelOutput], part: Part, n: int, draws: Draws, pattern: Follower | None = None) -> Run:
        """The function on a part of the batch until its outputs are there; they have to be those of the whole batch."""
        part = WHOLE if isinstance(part, slice) and n == self.problem.n else part
        after, wanted = draws.rewind(), [r.ordinal for r in roots]
        try:
            with runs_on_part(part is not WHOLE):
                run = self.run(part, n, finder=OutputFinder(wanted), pattern=pattern)
        finally:
            restore(after)
        check_uses(self.scope, run.trace, [*run.outputs.values()])
        for root in roots if part is not WHOLE else ():
            z, axis = run.outputs.get(root.ordinal, (None, root.axis))
            if z is None:
                raise other_in_part()
            check_in_part(z, axis, run.trace.n, root.value, root.axis, self.problem.n, part, other_in_part)
        return run
