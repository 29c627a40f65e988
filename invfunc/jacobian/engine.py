"""From a function to its statistics: run the model part in blocks, the loss part once, pull back, and fold."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, Literal

import torch

from invfunc import tree
from invfunc.errors import SplitError
from invfunc.jacobian.axis import Axis
from invfunc.jacobian.checks import check_loss
from invfunc.jacobian.graph import node_of, reaches
from invfunc.jacobian.loss.columns import Columns, Gradient, Units, rooted
from invfunc.jacobian.loss.hessian import gradient, hessian
from invfunc.jacobian.loss.split import Root, Splitter, active
from invfunc.jacobian.measures import Finished, Measure, State
from invfunc.jacobian.plan import Plan
from invfunc.jacobian.problem import Problem
from invfunc.jacobian.pullback import Pullback, check_versions
from invfunc.jacobian.runs import WHOLE, Run, Runner
from invfunc.jacobian.scope import Scope
from invfunc.jacobian.shares.pulled import Samples
from invfunc.jacobian.trace import Trace
from invfunc.jacobian.trace.random import Draws
from invfunc.jacobian.trace.tags import Sampled


@dataclass(frozen=True)
class Options:
    """How to compute: `fast=False` takes the generic path at every operation."""

    plan: Plan = field(default_factory=Plan)
    fast: bool = True


Of = Literal["gradient", "ggn", "jacobian", "gradient_or_jacobian"]
"""What a statistic is made of."""


def budget(device: torch.device) -> int:
    """How many numbers an intermediate tensor may have: what a CPU keeps in its cache, what keeps a GPU busy."""
    return 6 * 2**20 if device.type == "cpu" else 2**26


class Engine:
    """One evaluation of one statistic."""

    def __init__(self, problem: Problem, options: Options, measure: Measure) -> None:
        self.problem, self.options, self.measure = problem, options, measure
        self.plan = options.plan
        self.scope = Scope(problem.tensors())
        self.states: list[State | None] = [None] * len(problem.leaves)
        self.joint: list[torch.Tensor] = []
        self.columns = 1
        self.outputs: list[torch.Size] = [torch.Size()]
        self.structure: Any = tree.flatten(0)[1]
        self.budget = budget(problem.leaves[0].device)
        self.runner = Runner(problem, self.scope, self.plan, options.fast, self.budget)

    def result(self, of: Of) -> tuple[Any, Any]:
        """The statistic, and aux."""
        with self.scope:
            return self._finish(getattr(self, of)())

    # Of what: each consumes the runs of the function and returns aux

    def gradient(self) -> Any:
        """The shares of a loss function."""
        if self.plan.asked("samples"):
            return self._found_split(second_order=False)
        run = self.runner.loss()
        self._consume(run, [self._ones(run)])
        return run.aux

    def ggn(self) -> Any:
        """The columns `J^T S` of a model function with its loss, or of a loss function alone."""
        return self._found_split(second_order=True) if self.problem.loss is None else self._given_split()

    def jacobian(self) -> Any:
        """The rows of the Jacobian of a model function."""
        aux = None
        parts = self.plan.ranges("samples", self.problem.n)
        for a, b in parts:
            run = self.runner.model(slice(a, b) if len(parts) > 1 else WHOLE, b - a)
            if b == self.problem.n:
                self.runner.check_part(run)
                aux = run.aux
            run.part = WHOLE  # the columns are those of its outputs alone
            self._consume(run, [self._units(run)])
        if self.problem.has_aux and len(parts) > 1:
            aux = self.runner.model(WHOLE, self.problem.n, tapped=False).aux
        return aux

    def gradient_or_jacobian(self) -> Any:
        """Whichever the function has."""
        run = self.runner.loss(or_model=True)
        self._consume(run, [self._ones(run) if isinstance(run.result, torch.Tensor) else self._units(run)])
        return run.aux

    def _finish(self, aux: Any) -> tuple[Any, Any]:
        problem, measure = self.problem, self.measure
        n = problem.n if problem.samples is None else len(problem.samples)
        found = []
        for leaf, state in zip(problem.leaves, self.states, strict=True):
            value = measure.zero(leaf, n, self.columns) if state is None else measure.finish(state, n)
            found.append(tree.map_tensors(partial(self._delivered, leaf.dtype), value))
        joint = None
        if self.joint:
            dtypes = [leaf.dtype for leaf in problem.leaves]
            joint = self._delivered(reduce(torch.promote_types, dtypes), torch.cat(self.joint), each=(0,))

        def unflatten(leaves: list[Any]) -> Any:
            trees = tree.unflatten(leaves, problem.structure)
            return tuple(trees) if problem.several else trees[0]

        result = measure.assemble(Finished(found, unflatten, joint, self.outputs, self.structure))
        return self.scope.result(result), self.scope.result(aux)

    def _delivered(self, dtype: torch.dtype, x: torch.Tensor, each: tuple[int, ...] | None = None) -> torch.Tensor:
        """In the precision of the parameters, and with the samples in the order in which they were chosen."""
        chosen = self.problem.samples
        if chosen is not None and chosen != sorted(chosen):
            order = sorted(range(len(chosen)), key=chosen.__getitem__)
            back = torch.tensor(sorted(order, key=order.__getitem__), device=x.device)
            for axis in self.measure.each if each is None else each:
                x = x.index_select(axis, back)
        return x.to(dtype)

    def _ones(self, run: Run) -> Gradient:
        return Gradient({0: torch.ones_like(self.scope.leave(run.result))[None]})

    def _units(self, run: Run) -> Units:
        """And what the result has to know of the outputs."""
        values = {i: axis.expose(self.scope.leave(z), run.trace.n) for i, (z, axis) in run.outputs.items()}
        units = Units(values)
        self.columns, self.structure = units.count, run.result
        self.outputs = []
        for z, _ in run.outputs.values():
            shape = list(z.shape)
            del shape[self.problem.out_dims]
            self.outputs.append(torch.Size(shape))
        return units

    def _hessian(self, result: torch.Tensor, roots: list[Root], splitter: Splitter) -> list[Columns]:
        """The columns of the loss, and how many they are."""
        made = hessian(self.scope, result, roots, splitter.pieces, self.problem.n)
        self.columns = sum(c.count for c in made)
        return [rooted(c) for c in made] if self.measure.rooted else made

    # Splits

    def _given_split(self) -> Any:
        """diag_ggn(f, loss): blocks of the model function, then the loss of all outputs."""
        problem, plan = self.problem, self.plan
        if plan.asked("samples"):
            runs = [self.runner.model(slice(a, b), b - a, tapped=False) for a, b in plan.ranges("samples", problem.n)]
            self.runner.check_part(runs[-1])
            again: Iterator[Run] = (self.runner.model(run.part, run.trace.n) for run in runs)
        else:
            runs = self.runner.blocks()
            again = iter(runs)
        loss = Trace(self.scope, problem.n, tapped=False)
        splitter = Splitter(loss)
        joined = self._joined(runs, splitter)
        outputs = tree.unflatten(joined, runs[0].result)
        with loss, active(splitter):
            assert problem.loss is not None
            result = problem.loss(outputs, problem.target(loss))
        loss.watcher = loss.after = None  # no cycle that keeps the outputs alive
        check_loss(loss, result, "the loss")
        made = self._hessian(result, list(splitter.roots.values()), splitter)
        aux = runs[0].aux
        if problem.has_aux and len(runs) > 1:
            aux = self.runner.model(WHOLE, problem.n, tapped=False).aux
        for run in again:
            self._consume(run, made)
        return aux

    def _joined(self, runs: list[Run], splitter: Splitter) -> list[torch.Tensor]:
        """The outputs of all blocks, as the loss is to see them."""
        joined = []
        for i in runs[0].outputs:
            blocks = [axis.expose(self.scope.leave(z), run.trace.n) for run in runs for z, axis in (run.outputs[i],)]
            exposed = torch.cat(blocks) if len(blocks) > 1 else blocks[0]
            axis = Axis(None) if self.problem.n == 1 else Axis(self.problem.out_dims % (exposed.ndim - 1))
            z = axis.restore(exposed, self.problem.n)
            splitter.trace.set(z, Sampled(axis))
            joined.append(splitter.add(z, "f", marked=True))
        return joined

    def _found_split(self, second_order: bool) -> Any:
        """A loss function: run once for its outputs and their cotangents, then its model part again, part by part."""
        n, draws = self.problem.n, Draws(stop=False)
        splitters: list[Splitter] = []

        def look(trace: Trace) -> Splitter:
            splitters.append(Splitter(trace))
            return splitters[-1]

        light = self.runner.run(WHOLE, n, tapped=False, draws=draws, splitter=look)
        tag, splitter = check_loss(light.trace, light.result), splitters[0]
        wanted = splitter.selected()
        roots = [splitter.roots[i] for i in wanted]
        try:
            _check_split(tag, splitter, wanted)
            _check_seen(light, roots, splitter)
        except SplitError:
            if second_order or not light.result.ndim:
                raise
            for run in self.runner.loss_parts(light.result, draws):  # a loss for each sample needs no split
                self._consume(run, [self._ones(run)])
            return light.aux
        made: list[Columns] = []
        if second_order:
            made = self._hessian(light.result, roots, splitter)
        else:
            made = [gradient(self.scope, light.result, roots, n)]
        for run in self.runner.parts(roots, sum(c.count for c in made), draws):
            self._consume(run, made)
        return light.aux

    def _consume(self, run: Run, made: list[Columns]) -> None:
        """Pull the columns of the run's samples back to its taps, and fold what the statistic keeps of them."""
        check_versions(run.trace.taps)
        run.trace.check([z for z, _ in run.outputs.values()], run.params)
        samples = self._samples(run)
        if not samples.count:
            return
        pullback = Pullback(self.scope, run, made, self.plan, samples, self.budget)
        device = self.problem.leaves[0].device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            states, joint = pullback.measured(self.measure)
        if joint is not None:
            self.joint.append(joint)
        for i, state in states.items():
            before = self.states[i]
            self.states[i] = state if before is None else self.measure.over_samples(before, state)

    def _samples(self, run: Run) -> Samples:
        """Those that the caller chose among those of the run, in their order there."""
        n, chosen = run.trace.n, self.problem.samples
        if chosen is None:
            return Samples(n)
        chosen = sorted(i - run.start for i in chosen if run.start <= i < run.start + n)
        return Samples(n, torch.tensor(chosen, device=self.problem.leaves[0].device, dtype=torch.long))


def _check_split(tag: Sampled, splitter: Splitter, wanted: list[int]) -> None:
    """Every path from the parameters to the result has to cross the outputs."""
    ways_out = (
        "Mark the outputs with `outputs(z)`, use one of torch's convex losses, or give the model and the loss apart."
    )
    if not wanted:
        raise SplitError(
            f"no outputs are found in f: no known convex loss of the model's outputs is called. {ways_out}"
        )
    if tag.around is not None:
        raise SplitError(
            f"a path from the parameters to the result goes around the outputs (it comes in at `{tag.around}`), as an "
            f"L2 term or a loss that is not known does. Take it out of f, or: {ways_out[0].lower()}{ways_out[1:]}"
        )
    astray = [splitter.roots[i].called for i in tag.crossed if i not in wanted]
    if astray:
        raise SplitError(
            f"a path from the parameters to the result goes around the outputs, through `{astray[0]}`. {ways_out}"
        )


def _check_seen(light: Run, roots: list[Root], splitter: Splitter) -> None:
    """Autograd knows of paths around the outputs that no call told of."""
    astray = [root.value for root in splitter.roots.values() if root not in roots]
    targets = {node_of(x) for x in (*light.params, *astray)} - {None}
    if reaches(light.result, targets, {node_of(r.value) for r in roots}):
        raise SplitError(
            "a path from the parameters to the result goes around the outputs, through an operation that cannot be "
            "seen (a custom autograd.Function, or torch.func inside f)."
        )
