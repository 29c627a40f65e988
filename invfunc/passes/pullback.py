"""From a run to what a statistic keeps of it: pull columns back to the parameter uses, and reduce the shares there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from invfunc import thresholds
from invfunc._alike import added, alike
from invfunc._extras import Ticks
from invfunc.errors import InvFuncError
from invfunc.loss.square_root import Block, Columns, joined_block
from invfunc.passes.loss import lots
from invfunc.passes.part import Kept, Pass, Reached, backwards, by_sites
from invfunc.passes.run import Run
from invfunc.per_sample import Shares
from invfunc.per_sample.biases import Role, roles
from invfunc.per_sample.cotangents import Columns as PulledBack
from invfunc.per_sample.cotangents import Cotangents, Samples
from invfunc.plan import Plan, even
from invfunc.recording.scope import Scope
from invfunc.recording.tags import ParameterUse
from invfunc.reductions import Reduction, State, States

Done = Callable[[int, int, State], None]
"""Called once for each reduction (by its number) and parameter, with all that was kept of it, as soon as that is
complete."""


Soon = Callable[[int, int], bool]  # whether what a reduction keeps of a parameter is wanted after every pass
Tell = Callable[[list[States], int, bool], None]
"""Tells what is kept of a parameter so far, and whether that is complete."""
Roles = dict[int, Role]
"""What parameters are to the operations that read them, by their numbers."""


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
    """The name of the parameter with a number."""
    everywhere: bool = False
    """Whether all outputs have a part in every pullback, so that each reaches the same parameter uses."""
    ticks: Ticks = field(default_factory=Ticks)

    @property
    def total(self) -> int:
        return sum(c.count for c in self.made)

    @property
    def sides(self) -> int:
        """How many cotangents a column has: two, where it is a product of two."""
        return 1 if self.total == 0 or self.block(Pass({}, 0, 1)).right is None else 2

    def folded(
        self, reductions: Sequence[Reduction], done: Done, kept: Kept | None = None, soon: Soon | None = None
    ) -> None:
        """Reduce the shares: `done` gets what each reduction keeps of each parameter, `soon` of which after every
        pass, before that is complete. `kept` is pulled back already."""
        self.everywhere = any(m.counts for m in reductions)
        passes = self.passes(reductions)
        paired, tell = any(m.paired for m in reductions), partial(self._tell, done, soon)
        known = roles(self.run.params, self.run.trace.uses) if paired else {}  # while the uses are there
        self.ticks.expect(len(passes))
        if kept is None and self.streams(passes):
            states: list[States] = [{} for _ in reductions]
            for each in self._alike(passes):
                self._stream(reductions, states, each, known, tell, last=self.last and each is passes[-1])
                self.ticks.done()
        else:
            self._sweep(reductions, kept or self._pulled(passes), known, tell)

    def kept(self, reductions: Sequence[Reduction]) -> Kept | None:
        """What a single pass brings, for several folds; several passes are to be pulled back again."""
        passes = self.passes(reductions)
        return list(self._pulled(passes)) if len(passes) == 1 else None

    def passes(self, reductions: Sequence[Reduction]) -> list[Pass]:
        """The pullbacks that some reductions ask for."""
        if self.total == 0:  # a cross entropy over one class
            return []
        passes = []
        for first, last in self.plan.ranges("params", len(self.run.params)):
            if uses := self._uses(first, last):
                ranges = self._ranges(reductions, uses)
                groups = by_sites(uses) if self.one_by_one and len(ranges) > 1 else [uses]
                passes += [Pass(some, a, b, b == self.total) for some in groups for a, b in ranges]
        return passes

    def _uses(self, first: int, last: int) -> dict[int, list[ParameterUse]]:
        """What reads the parameters of a range, of those that are wanted and read at all."""
        wanted = [i for i in range(first, last) if self.leaves is None or i in self.leaves]
        uses = {i: [t for t in self.run.trace.uses if i in t.derived.leaves] for i in wanted}
        return {i: found for i, found in uses.items() if found}

    def _ranges(self, reductions: Sequence[Reduction], uses: dict[int, list[ParameterUse]]) -> list[tuple[int, int]]:
        """Which columns are pulled back together: those that the caller asked for, or as many as there is memory."""
        if self.plan.asked("outputs"):
            return self.plan.ranges("outputs", self.total)
        if any("outputs" not in m.axes for m in reductions):
            return [(0, self.total)]
        trace = self.run.trace
        largest = max(trace.sizes[t.site] for found in uses.values() for t in found) * trace.n
        one_by_one = largest >= thresholds.APART and all(m.thin for m in reductions)
        return even(self.total, 1 if one_by_one else max(1, self.budget // largest))

    def _sweep(
        self,
        reductions: Sequence[Reduction],
        pulled: Iterable[tuple[Pass, PulledBack]],
        known: Roles,
        tell: Tell,
    ) -> None:
        """Reduce what was pulled back, pass by pass; a parameter is done with its last column."""
        states: list[States] = [{} for _ in reductions]
        for each, columns in pulled:
            for i, uses in backwards(each.uses):
                for reached, own in self.told_apart(each, i, uses, columns):
                    self._keep(states, reductions, i, reached, own, known.get(i))
                tell(states, i, each.completes)
            del columns  # before the next pass makes its own
            self.ticks.done()

    def told_apart(self, each: Pass, leaf: int, uses: list[ParameterUse], pulled: PulledBack) -> Iterable[Reached]:
        """What reads a parameter with the columns that reached it, where a pass has one group of columns: all."""
        return [(uses, pulled)]

    @staticmethod
    def _tell(done: Done, soon: Soon | None, states: list[States], leaf: int, complete: bool) -> None:
        for k, kept in enumerate(states):
            if leaf in kept and (complete or (soon is not None and soon(k, leaf))):
                done(k, leaf, kept.pop(leaf))

    def _keep(
        self,
        states: list[States],
        reductions: Sequence[Reduction],
        leaf: int,
        uses: list[ParameterUse],
        pulled: PulledBack,
        role: Role | None,
    ) -> None:
        reached = [t for t in uses if pulled.left[t.site] is not None]
        if not reached:
            return
        several = [a for t in reached for a in t.recomputed] if len(reached) > 1 else []
        for operand in several[::-1]:  # from the last one on, as each is computed from the next
            operand.hold()
        for kept, reduction in zip(states, reductions, strict=True):
            shares = self.shares(leaf, reached, pulled, leaf in kept, role)
            added("outputs", partial(reduction.add, kept, leaf, "columns"), reduction.step(shares))
        for operand in several:
            operand.drop()

    def shares(
        self, leaf: int, uses: list[ParameterUse], pulled: PulledBack, seen_before: bool, role: Role | None = None
    ) -> Shares:
        """The shares of a parameter, of the columns that were pulled back to what reads it; `role` is whether
        it is a weight or a bias (`per_sample.biases`)."""
        return Shares(
            self.run.params[leaf],
            uses,
            pulled,
            self.samples,
            scope=self.scope,
            budget=self.budget,
            seen_before=seen_before,
            place=leaf,
            name=self.name,
            role=role,
        )

    # All cotangents at once

    def _pulled(self, passes: list[Pass]) -> Iterator[tuple[Pass, PulledBack]]:
        return ((p, self._pull(p)) for p in self._alike(passes))

    def _alike(self, passes: list[Pass]) -> Iterator[Pass]:
        """The passes, of which those of equally many columns of one kind do the same."""
        several = len(self.made) > 1 or len(self.run.outputs) > 1
        return alike("outputs", passes, lambda p: p.start if several else (id(p.uses), p.stop - p.start, p.completes))

    def _pull(self, each: Pass) -> PulledBack:
        block = self.block(each)
        left = self.cotangents(block.left, each.sites)
        right = None if block.right is None else self.cotangents(block.right, each.sites)
        return PulledBack(left, right, block.weight, lots(self.made, self.run.part))

    def block(self, each: Pass) -> Block:
        return joined_block(self.made, each.start, each.stop, self.run.part, self.run.trace.n, self.everywhere)

    def _at_outputs(self, columns: dict[int, torch.Tensor]) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        outputs, given = [], []
        for i, c in columns.items():
            z, axis = self.run.outputs[i]
            outputs.append(z)
            given.append(axis.restore(c, self.run.trace.n if not axis.whole else 1, 1).to(z.dtype))
        return outputs, given

    def cotangents(self, columns: dict[int, torch.Tensor], sites: list[int]) -> Cotangents:
        """Cotangents at the outputs, pulled back to some sites."""
        trace = self.run.trace
        outputs, given = self._at_outputs(columns)
        batched = given[0].shape[0] > 1
        given = given if batched else [c[0] for c in given]
        large = max(trace.sizes[s] for s in sites) * trace.n >= thresholds.APART
        large = large and given[0].device.type in thresholds.APART_ON
        edges = [trace.edges[s] for s in sites]
        found = self.scope.grad(outputs, edges, given, batched=batched, one_by_one=large)
        cotangents: Cotangents = [None] * len(trace.edges)
        for s, d in zip(sites, found, strict=True):
            if d is not None:
                cotangents[s] = self._exposed(s, d if batched else d[None])
        return cotangents

    def _exposed(self, site: int, cotangent: torch.Tensor) -> torch.Tensor:
        return self.run.trace.axes[site].expose(self.scope.leave(cotangent), self.run.trace.n, 1)

    # One cotangent after the other, where nobody needs them again

    def streams(self, passes: list[Pass]) -> bool:
        """Whether it pays to reduce each parameter as its cotangents arrive: they take much memory, or nobody needs
        what the operations read, which is let go of or was never kept."""
        if not passes or self.scope.create_graph:
            return False
        lean = any(use.recomputed for use in self.run.trace.uses)
        most = max(p.stop - p.start for p in passes)
        pays = self._numbers(passes[0]) >= thresholds.STREAMED if most > 1 else len(passes) == 1 and self.last
        return (lean or pays) and self.block(passes[0]).right is None

    def _numbers(self, each: Pass) -> int:
        """How many numbers the cotangents of a pass have at all sites."""
        trace = self.run.trace
        return (each.stop - each.start) * trace.n * sum(trace.sizes[s] for s in each.sites)

    def _stream(
        self, reductions: Sequence[Reduction], states: list[States], only: Pass, known: Roles, tell: Tell, last: bool
    ) -> None:
        """Reduce each parameter as soon as its cotangents arrive, so that neither these nor what they met is kept."""
        run, waiting, several = self.run, dict(only.uses), only.stop - only.start > 1
        block = self.block(only)
        pulled = PulledBack([None] * len(run.trace.edges), None, block.weight, lots(self.made, run.part))
        sites, last = only.sites, last and not several
        if last:
            only.uses = {}
            run.trace.uses.clear()

        broken = False

        def folded(leaf: int, uses: list[ParameterUse]) -> None:
            nonlocal broken
            broken = True  # until it is done
            self._keep(states, reductions, leaf, uses, pulled, known.get(leaf))
            tell(states, leaf, only.completes)
            broken = False

        def arrived(site: int, cotangents: torch.Tensor) -> None:
            pulled.left[site] = self._exposed(site, cotangents if several else cotangents[None])
            for i, uses in list(waiting.items()):
                if len(uses) == 1 and uses[0].site == site and uses[0].param is run.params[i]:
                    folded(i, waiting.pop(i))
            if not any(use.site == site for uses in waiting.values() for use in uses):
                pulled.left[site] = None

        outputs, given = self._at_outputs(block.left)
        given = given if several else [c[0] for c in given]
        edges = {s: run.trace.edges[s] for s in sites}
        try:
            self.scope.stream(outputs, given, edges, arrived, retain=not last, batched=several)
        except RuntimeError as error:
            if broken or isinstance(error, InvFuncError) or not several:
                raise
            pulled = self._pull(replace(only, uses=waiting)) if waiting else pulled  # a derivative has no batching rule
        for i, uses in backwards(waiting):
            folded(i, uses)
