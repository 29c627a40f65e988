"""From a function to its statistics: run the model part in blocks, the loss part once, pull back, and fold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from invfunc import tree
from invfunc._functorch import version
from invfunc.errors import ArgumentError, SplitError
from invfunc.jacobian.axis import Axis
from invfunc.jacobian.checks import check_loss
from invfunc.jacobian.columns import Block, Columns, Gradient, joined_block
from invfunc.jacobian.graph import node_of, reaches
from invfunc.jacobian.hessian import gradient, hessian
from invfunc.jacobian.measures import Measure, State
from invfunc.jacobian.plan import Plan, even
from invfunc.jacobian.problem import Problem
from invfunc.jacobian.random import Draws
from invfunc.jacobian.runs import WHOLE, Run, Runner
from invfunc.jacobian.scope import Scope
from invfunc.jacobian.shares import Columns as Pulled
from invfunc.jacobian.shares import Deltas, Shares
from invfunc.jacobian.split import Root, Splitter, active
from invfunc.jacobian.tags import Sampled, Tap
from invfunc.jacobian.trace import Trace


@dataclass(frozen=True)
class Options:
    """How to compute: `fast=False` takes the generic path at every operation."""

    plan: Plan = field(default_factory=Plan)
    fast: bool = True


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
        self.budget = budget(problem.leaves[0].device)
        self.runner = Runner(problem, self.scope, self.plan, options.fast, self.budget)

    def first_order(self) -> tuple[Any, Any]:
        """The statistic of the shares of a loss function."""
        if self.plan.asked("outputs"):
            raise ArgumentError("it has no axis of outputs; chunk it over samples or params.")
        with self.scope:
            if self.plan.asked("samples"):
                aux = self._found_split(second_order=False)
            else:
                run = self.runner.loss()
                aux = run.aux
                self._consume(run, [self._ones(run)])
            return self._finish(aux)

    def second_order(self) -> tuple[Any, Any]:
        """The statistic of the columns `J^T S` of a model function with its loss, or of a loss function alone."""
        with self.scope:
            aux = self._found_split(second_order=True) if self.problem.loss is None else self._given_split()
            return self._finish(aux)

    def _finish(self, aux: Any) -> tuple[Any, Any]:
        problem, measure = self.problem, self.measure
        found = [
            measure.zero(leaf, problem.n) if state is None else measure.finish(state, problem.n).to(leaf.dtype)
            for leaf, state in zip(problem.leaves, self.states, strict=True)
        ]
        trees = tree.unflatten([self.scope.result(x) for x in found], problem.structure)
        result = tuple(trees) if problem.several else trees[0]
        return result, self.scope.result(aux)

    def _ones(self, run: Run) -> Gradient:
        return Gradient({0: torch.ones_like(self.scope.leave(run.result))[None]})

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
        check_loss(loss, result, "the loss")
        made = hessian(self.scope, result, list(splitter.roots.values()), splitter.pieces, problem.n)
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
        if not second_order and light.result.ndim and not wanted:
            for run in self.runner.loss_parts(light.result, draws):
                self._consume(run, [self._ones(run)])
            return light.aux
        _check_split(tag, splitter, wanted)
        roots = [splitter.roots[i] for i in wanted]
        _check_seen(light, roots, splitter)
        made: list[Columns] = []
        if second_order:
            made = hessian(self.scope, light.result, roots, splitter.pieces, n)
        else:
            made = [gradient(self.scope, light.result, roots, n)]
        for run in self.runner.parts(roots, sum(c.count for c in made), draws):
            self._consume(run, made)
        return light.aux

    # Pullbacks and folds

    def _consume(self, run: Run, made: list[Columns]) -> None:
        """Pull the columns of the run's samples back to its taps, and fold what the statistic keeps of them."""
        _check_versions(run.trace.taps)
        run.trace.check([z for z, _ in run.outputs.values()], run.params)
        groups = self.plan.ranges("params", len(run.params))
        total = sum(c.count for c in made)
        if total == 0:  # a cross entropy over one class
            return
        block: list[State | None] = [None] * len(run.params)
        for first, last in groups:
            taps = {i: [t for t in run.trace.taps if i in t.derived.leaves] for i in range(first, last)}
            sites = sorted({t.site for found in taps.values() for t in found})
            if not sites:
                continue
            for start, stop in self._column_ranges(run, total, sites):
                pulled = self._pull(run, joined_block(made, start, stop, run.part, run.trace.n), sites)
                for i, found in taps.items():
                    state = self._partial(run, i, found, pulled)
                    if state is not None:
                        before = block[i]
                        block[i] = state if before is None else self.measure.over_columns(before, state)
                del pulled  # before the next pass makes its own
        for i, state in enumerate(block):
            if state is not None:
                before = self.states[i]
                self.states[i] = state if before is None else self.measure.over_samples(before, state)

    def _column_ranges(self, run: Run, total: int, sites: list[int]) -> list[tuple[int, int]]:
        if self.plan.asked("outputs"):
            return self.plan.ranges("outputs", total)
        largest = max(run.trace.sizes[s] for s in sites) * run.trace.n
        return even(total, max(1, self.budget // largest))

    def _pull(self, run: Run, block: Block, sites: list[int]) -> Pulled:
        left = self._deltas(run, block.left, sites)
        right = None if block.right is None else self._deltas(run, block.right, sites)
        return Pulled(left, right, block.weight)

    def _deltas(self, run: Run, cotangents: dict[int, torch.Tensor], sites: list[int]) -> Deltas:
        trace, scope = run.trace, self.scope
        outputs, given = [], []
        for i, c in cotangents.items():
            z, axis = run.outputs[i]
            outputs.append(z)
            given.append(axis.restore(c, trace.n if not axis.whole else 1, 1).to(z.dtype))
        batched = given[0].shape[0] > 1
        given = given if batched else [c[0] for c in given]
        found = scope.grad(outputs, [trace.edges[s] for s in sites], given, batched=batched)
        deltas: Deltas = [None] * len(trace.edges)
        for s, d in zip(sites, found, strict=True):
            if d is not None:
                d = scope.leave(d)
                deltas[s] = trace.axes[s].expose(d if batched else d[None], trace.n, 1)
        return deltas

    def _partial(self, run: Run, leaf: int, taps: list[Tap], pulled: Pulled) -> State | None:
        reached = [t for t in taps if pulled.left[t.site] is not None]
        if not reached:
            return None
        shares = Shares(self.scope, run.params[leaf], reached, pulled, run.trace.n, self.budget)
        return self.measure.partial(shares)


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


def _check_versions(taps: list[Tap]) -> None:
    for tap in taps:
        for x, before in tap.versions:
            if version(x) != before:
                raise ArgumentError(
                    "a tensor that an operation with parameters read was modified in place afterwards, so its share "
                    "cannot be computed; modify a copy."
                )
