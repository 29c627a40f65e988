"""From a run to what a statistic keeps of it: pull columns back to the taps, and measure the shares there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from invfunc import thresholds
from invfunc._functorch import version
from invfunc.errors import ArgumentError
from invfunc.jacobian.loss.columns import Block, Columns, joined_block
from invfunc.jacobian.measures import Measure, State
from invfunc.jacobian.plan import Plan, even
from invfunc.jacobian.runs import Run
from invfunc.jacobian.scope import Scope
from invfunc.jacobian.shares import Shares
from invfunc.jacobian.shares.layers import roles
from invfunc.jacobian.shares.pulled import Columns as Pulled
from invfunc.jacobian.shares.pulled import Deltas, Samples
from invfunc.jacobian.trace.tags import Tap

States = dict[int, State]
"""For each parameter that is reached, what a measure keeps of it."""
Done = Callable[[int, int, State], None]
"""Is told of a measure (by its place), a parameter, and all that was kept of it, as soon as nothing more comes."""


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
    leaves: frozenset[int] | None = None
    """The parameters that are wanted, if not all."""
    one_by_one: bool = False
    """Whether all columns of a parameter come before the next parameter."""
    last: bool = False
    """Whether nobody needs the graph of the run any more."""
    name: Callable[[int], str] = str
    """What the parameter at a place is called."""
    roles: dict[int, str] = field(default_factory=dict)

    @property
    def total(self) -> int:
        return sum(c.count for c in self.made)

    @property
    def sides(self) -> int:
        """How many cotangents a column has: two, where it is a product of two."""
        return 1 if self.total == 0 or self.block(Pass({}, 0, 1)).right is None else 2

    def measured(self, measures: Sequence[Measure], done: Done) -> list[torch.Tensor | None]:
        """Tells what each measure keeps of each parameter; returns what each found of all of them jointly."""
        if any(m.paired for m in measures):
            self.roles = roles(self.run.params, self.run.trace.taps)
        passes = self.passes(measures)
        firsts = [m.before for m in measures if m.before is not None]
        if not firsts:
            if self.streams(passes):
                states: list[States] = [{} for _ in measures]
                for k in range(len(passes)):
                    self._stream(measures, states, passes[k], done, last=self.last and k + 1 == len(passes))
                return [None] * len(measures)
            self._sweep(measures, [None] * len(measures), ((p, self._pull(p)) for p in passes), done)
            return [None] * len(measures)
        kept = [(p, self._pull(p)) for p in passes] if len(passes) == 1 else None
        firsts_of: list[list[State]] = [[] for _ in firsts]
        pulled = kept or ((p, self._pull(p)) for p in passes)
        self._sweep(firsts, [None] * len(firsts), pulled, lambda k, leaf, state: firsts_of[k].append(state))
        zeros = self.run.params[0].detach().new_zeros(self.samples.count)
        joint = iter([m.joint(s, zeros) for m, s in zip((m for m in measures if m.before), firsts_of, strict=True)])
        joints = [next(joint) if m.before is not None else None for m in measures]
        self._sweep(measures, joints, kept or ((p, self._pull(p)) for p in passes), done)
        return joints

    def passes(self, measures: Sequence[Measure], total: int | None = None) -> list[Pass]:
        """The pullbacks that some measures ask for, of all columns, or of another number of them."""
        divisible = all("outputs" in m.axes for m in measures)  # the columns may come in several passes
        thin = all(m.thin for m in measures)  # these may be of one each
        run, total = self.run, self.total if total is None else total
        if total == 0:  # a cross entropy over one class
            return []
        passes = []
        for first, last in self.plan.ranges("params", len(run.params)):
            wanted = [i for i in range(first, last) if self.leaves is None or i in self.leaves]
            taps = {i: [t for t in run.trace.taps if i in t.derived.leaves] for i in wanted}
            taps = {i: found for i, found in taps.items() if found}
            sites = {t.site for found in taps.values() for t in found}
            if not sites:
                continue
            largest = max(run.trace.sizes[s] for s in sites) * run.trace.n
            ranges = even(total, 1 if thin and largest >= thresholds.APART else max(1, self.budget // largest))
            if self.plan.asked("outputs"):
                ranges = self.plan.ranges("outputs", total)
            elif not divisible:
                ranges = [(0, total)]
            alone = self.one_by_one and len(ranges) > 1
            passes += [Pass(some, a, b) for some in (_by_sites(taps) if alone else [taps]) for a, b in ranges]
        return passes

    def _sweep(
        self,
        measures: Sequence[Measure],
        joints: Sequence[torch.Tensor | None],
        pulled: Iterable[tuple[Pass, Pulled]],
        done: Done,
    ) -> None:
        """Pass by pass; a parameter is done with its last column."""
        states: list[States] = [{} for _ in measures]
        for each, columns in pulled:
            for i, taps in _backwards(each.taps):
                self._keep(states, measures, i, taps, columns, joints)
                if each.stop == self.total:
                    self._tell(states, i, done)
            del columns  # before the next pass makes its own

    @staticmethod
    def _tell(states: list[States], leaf: int, done: Done) -> None:
        for k, kept in enumerate(states):
            if leaf in kept:
                done(k, leaf, kept.pop(leaf))

    def _keep(
        self,
        states: list[States],
        measures: Sequence[Measure],
        leaf: int,
        taps: list[Tap],
        pulled: Pulled,
        joints: Sequence[torch.Tensor | None],
    ) -> None:
        reached = [t for t in taps if pulled.left[t.site] is not None]
        if not reached:
            return
        several = [a for t in reached for a in t.recipe.again] if len(reached) > 1 else []
        for operand in several[::-1]:  # from the last one on, as each is computed from the next
            operand.hold()
        for kept, measure, joint in zip(states, measures, joints, strict=True):
            again = leaf in kept
            shares = Shares(
                self.scope,
                self.run.params[leaf],
                reached,
                pulled,
                self.samples,
                self.budget,
                again,
                leaf,
                self.name,
                self.roles.get(leaf),
            )
            state = measure.partial(shares, joint)
            kept[leaf] = measure.over_columns(kept[leaf], state) if again else state
        for operand in several:
            operand.drop()

    # All cotangents at once

    def _pull(self, each: Pass) -> Pulled:
        block = self.block(each)
        left = self.deltas(block.left, each.sites)
        right = None if block.right is None else self.deltas(block.right, each.sites)
        return Pulled(left, right, block.weight)

    def block(self, each: Pass) -> Block:
        return joined_block(self.made, each.start, each.stop, self.run.part, self.run.trace.n)

    def _cotangents(self, columns: dict[int, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outputs, given = [], []
        for i, c in columns.items():
            z, axis = self.run.outputs[i]
            outputs.append(z)
            given.append(axis.restore(c, self.run.trace.n if not axis.whole else 1, 1).to(z.dtype))
        return outputs, given

    def deltas(self, columns: dict[int, torch.Tensor], sites: list[int]) -> Deltas:
        """Cotangents at the outputs, pulled back to some sites."""
        trace = self.run.trace
        outputs, given = self._cotangents(columns)
        batched = given[0].shape[0] > 1
        given = given if batched else [c[0] for c in given]
        large = max(trace.sizes[s] for s in sites) * trace.n >= thresholds.APART
        large = large and given[0].device.type in thresholds.APART_ON
        edges = [trace.edges[s] for s in sites]
        found = self.scope.grad(outputs, edges, given, batched=batched, one_by_one=large)
        deltas: Deltas = [None] * len(trace.edges)
        for s, d in zip(sites, found, strict=True):
            if d is not None:
                deltas[s] = self._exposed(s, d if batched else d[None])
        return deltas

    def _exposed(self, site: int, delta: torch.Tensor) -> torch.Tensor:
        return self.run.trace.axes[site].expose(self.scope.leave(delta), self.run.trace.n, 1)

    # One cotangent after the other, where nobody needs them again

    def streams(self, passes: list[Pass]) -> bool:
        """Whether the columns come one by one, and it is of use to measure them so."""
        if not passes or self.scope.create_graph or any(p.stop - p.start != 1 for p in passes):
            return False
        lean = any(tap.recipe.again for tap in self.run.trace.taps)
        return (lean or (len(passes) == 1 and self.last)) and self.block(passes[0]).right is None

    def _stream(self, measures: Sequence[Measure], states: list[States], only: Pass, done: Done, last: bool) -> None:
        """A parameter is measured when its cotangent comes by, so that neither it nor what it met is kept."""
        run, waiting, stop = self.run, dict(only.taps), only.stop
        block = self.block(only)
        pulled = Pulled([None] * len(run.trace.edges), weight=block.weight)
        sites = only.sites
        if last:
            only.taps = {}
            run.trace.taps.clear()

        def measured(leaf: int, taps: list[Tap]) -> None:
            self._keep(states, measures, leaf, taps, pulled, [None] * len(measures))
            if stop == self.total:
                self._tell(states, leaf, done)

        def arrived(site: int, delta: torch.Tensor) -> None:
            pulled.left[site] = self._exposed(site, delta[None])
            for i, taps in list(waiting.items()):
                if len(taps) == 1 and taps[0].site == site and taps[0].param is run.params[i]:
                    measured(i, waiting.pop(i))
            if not any(tap.site == site for taps in waiting.values() for tap in taps):
                pulled.left[site] = None

        outputs, given = self._cotangents(block.left)
        self.scope.stream(outputs, [c[0] for c in given], {s: run.trace.edges[s] for s in sites}, arrived, not last)
        for i, taps in _backwards(waiting):
            measured(i, taps)


def _backwards(taps: dict[int, list[Tap]]) -> list[tuple[int, list[Tap]]]:
    """The parameters in the order of a backward pass, where operands are computed again, each from the next."""
    if not any(tap.recipe.again for found in taps.values() for tap in found):
        return list(taps.items())
    return sorted(taps.items(), key=lambda item: -max(tap.site for tap in item[1]))


def _by_sites(taps: dict[int, list[Tap]]) -> list[dict[int, list[Tap]]]:
    """The parameters one by one, but for those whose cotangents are the same, as weight and bias of a layer."""
    groups: dict[frozenset[int], dict[int, list[Tap]]] = {}
    for i, found in taps.items():
        groups.setdefault(frozenset(t.site for t in found), {})[i] = found
    return list(groups.values())


def check_versions(taps: list[Tap]) -> None:
    """What an operation with parameters read has to be there still."""
    for tap in taps:
        for x, before in tap.versions:
            if version(x) != before:
                raise ArgumentError(
                    "a tensor that an operation with parameters read was modified in place afterwards, so its share "
                    "cannot be computed; modify a copy."
                )
