"""From a run to what a statistic keeps of it: pull columns back to the taps, and measure the shares there."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from invfunc._functorch import version
from invfunc.errors import ArgumentError
from invfunc.jacobian.loss.columns import Block, Columns, joined_block
from invfunc.jacobian.measures import Measure, State
from invfunc.jacobian.plan import Plan, even
from invfunc.jacobian.runs import Run
from invfunc.jacobian.scope import Scope
from invfunc.jacobian.shares import Shares
from invfunc.jacobian.shares.pulled import Columns as Pulled
from invfunc.jacobian.shares.pulled import Deltas, Samples
from invfunc.jacobian.trace.tags import Tap

States = dict[int, State]
"""For each parameter that is reached, what a measure keeps of it."""


@dataclass
class Pass:
    """One pullback: the columns of a range, to the taps of some parameters."""

    taps: dict[int, list[Tap]]
    start: int
    stop: int

    @property
    def sites(self) -> list[int]:
        return sorted({tap.site for taps in self.taps.values() for tap in taps})


@dataclass
class Pullback:
    """Everything that is pulled back through one run."""

    scope: Scope
    run: Run
    made: list[Columns]
    plan: Plan
    samples: Samples
    budget: int

    def measured(self, measure: Measure) -> tuple[States, torch.Tensor | None]:
        """What the measure keeps of each parameter, and of all jointly."""
        passes = self._passes(measure)
        if measure.before is None:
            if len(passes) == 1 and passes[0].stop == 1 and not self.scope.create_graph:
                block = self._block(passes[0])
                if block.right is None:
                    return self._stream(measure, passes.pop(), block), None
            return self._sweep(measure, ((p, self._pull(p)) for p in passes)), None
        kept = [(p, self._pull(p)) for p in passes] if len(passes) == 1 else None
        first = self._sweep(measure.before, kept or ((p, self._pull(p)) for p in passes))
        zeros = self.run.params[0].detach().new_zeros(self.samples.count)
        joint = measure.joint(list(first.values()), zeros)
        return self._sweep(measure, kept or ((p, self._pull(p)) for p in passes), joint), joint

    def _passes(self, measure: Measure) -> list[Pass]:
        run, total = self.run, sum(c.count for c in self.made)
        if total == 0:  # a cross entropy over one class
            return []
        passes = []
        for first, last in self.plan.ranges("params", len(run.params)):
            taps = {i: [t for t in run.trace.taps if i in t.derived.leaves] for i in range(first, last)}
            sites = {t.site for found in taps.values() for t in found}
            if sites and self.plan.asked("outputs"):
                passes += [Pass(taps, a, b) for a, b in self.plan.ranges("outputs", total)]
            elif sites and "outputs" not in measure.axes:  # it needs all columns together
                passes.append(Pass(taps, 0, total))
            elif sites:
                largest = max(run.trace.sizes[s] for s in sites) * run.trace.n
                passes += [Pass(taps, a, b) for a, b in even(total, max(1, self.budget // largest))]
        return passes

    def _sweep(
        self, measure: Measure, pulled: Iterable[tuple[Pass, Pulled]], joint: torch.Tensor | None = None
    ) -> States:
        states: States = {}
        for each, columns in pulled:
            for i, taps in each.taps.items():
                self._keep(states, measure, i, taps, columns, joint)
            del columns  # before the next pass makes its own
        return states

    def _keep(
        self,
        states: States,
        measure: Measure,
        leaf: int,
        taps: list[Tap],
        pulled: Pulled,
        joint: torch.Tensor | None = None,
    ) -> None:
        reached = [t for t in taps if pulled.left[t.site] is not None]
        if reached:
            shares = Shares(self.scope, self.run.params[leaf], reached, pulled, self.samples, self.budget)
            state = measure.partial(shares, joint)
            states[leaf] = measure.over_columns(states[leaf], state) if leaf in states else state

    # All cotangents at once

    def _pull(self, each: Pass) -> Pulled:
        block = self._block(each)
        left = self._deltas(block.left, each.sites)
        right = None if block.right is None else self._deltas(block.right, each.sites)
        return Pulled(left, right, block.weight)

    def _block(self, each: Pass) -> Block:
        return joined_block(self.made, each.start, each.stop, self.run.part, self.run.trace.n)

    def _cotangents(self, columns: dict[int, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outputs, given = [], []
        for i, c in columns.items():
            z, axis = self.run.outputs[i]
            outputs.append(z)
            given.append(axis.restore(c, self.run.trace.n if not axis.whole else 1, 1).to(z.dtype))
        return outputs, given

    def _deltas(self, columns: dict[int, torch.Tensor], sites: list[int]) -> Deltas:
        trace = self.run.trace
        outputs, given = self._cotangents(columns)
        batched = given[0].shape[0] > 1
        given = given if batched else [c[0] for c in given]
        found = self.scope.grad(outputs, [trace.edges[s] for s in sites], given, batched=batched)
        deltas: Deltas = [None] * len(trace.edges)
        for s, d in zip(sites, found, strict=True):
            if d is not None:
                deltas[s] = self._exposed(s, d if batched else d[None])
        return deltas

    def _exposed(self, site: int, delta: torch.Tensor) -> torch.Tensor:
        return self.run.trace.axes[site].expose(self.scope.leave(delta), self.run.trace.n, 1)

    # One cotangent after the other, where nobody needs them again

    def _stream(self, measure: Measure, only: Pass, block: Block) -> States:
        """A parameter is measured when its cotangent comes by, so that neither it nor what it met is kept."""
        run, states, waiting = self.run, {}, dict(only.taps)
        pulled = Pulled([None] * len(run.trace.edges), weight=block.weight)
        sites = only.sites
        del only
        run.trace.taps.clear()

        def arrived(site: int, delta: torch.Tensor) -> None:
            pulled.left[site] = self._exposed(site, delta[None])
            for i, taps in list(waiting.items()):
                if len(taps) == 1 and taps[0].site == site and taps[0].param is run.params[i]:
                    self._keep(states, measure, i, waiting.pop(i), pulled)
            if not any(tap.site == site for taps in waiting.values() for tap in taps):
                pulled.left[site] = None

        outputs, given = self._cotangents(block.left)
        self.scope.stream(outputs, [c[0] for c in given], {s: run.trace.edges[s] for s in sites}, arrived)
        for i, taps in waiting.items():
            self._keep(states, measure, i, taps, pulled)
        return states


def check_versions(taps: list[Tap]) -> None:
    """What an operation with parameters read has to be there still."""
    for tap in taps:
        for x, before in tap.versions:
            if version(x) != before:
                raise ArgumentError(
                    "a tensor that an operation with parameters read was modified in place afterwards, so its share "
                    "cannot be computed; modify a copy."
                )
