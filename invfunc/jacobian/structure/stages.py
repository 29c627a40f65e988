"""Columns pulled back stage by stage, several groups in one cotangent, and measured cell by cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from invfunc import thresholds
from invfunc.jacobian.loss.columns import Columns, Cotangents
from invfunc.jacobian.measures import Measure, State
from invfunc.jacobian.plan import even
from invfunc.jacobian.pullback import Done, Pullback
from invfunc.jacobian.runs import Run
from invfunc.jacobian.shares import Shares
from invfunc.jacobian.shares.pulled import Columns as Pulled
from invfunc.jacobian.shares.pulled import Deltas
from invfunc.jacobian.structure.boxes import Classes, positions_of
from invfunc.jacobian.structure.cells import Layout, Memory, celled
from invfunc.jacobian.structure.groups import Grouped
from invfunc.jacobian.structure.narrow import Narrowed, Stretch, narrowed
from invfunc.jacobian.structure.pattern import positions_apart
from invfunc.jacobian.structure.ways import Chosen, Stage
from invfunc.jacobian.trace.tags import Tap


def columns_at_once(size: int, n: int, budget: int) -> int:
    """How many columns are pulled back together through a site of some size."""
    return max(1, min(thresholds.TOGETHER, budget) // (size * n))


@dataclass
class Stages:
    """The columns of one run on the way that was chosen."""

    pullback: Pullback
    """The way of all columns, with what is known of the run."""
    chosen: Chosen
    sources: Sequence[Grouped]
    kept: dict[int, list[State]] = field(default_factory=dict)

    @property
    def run(self) -> Run:
        return self.pullback.run

    def measured(self, measures: Sequence[Measure], done: Done) -> list[torch.Tensor | None]:
        """As `Pullback.measured`."""
        run, found = self.run, list[tuple[Run, Sequence[Grouped]]]()
        sources, at = self.sources, run
        for stage in self.chosen.stages:
            found.append((at, sources))
            if stage.cut is None:
                break
            narrow = self._narrowed(at, sources, stage)
            if narrow is None:
                return self.pullback.measured(measures, done)
            sources, at = [narrow], replace(run, outputs={0: stage.cut.of(run)})
        for (at, sources), stage, leaves in zip(found, self.chosen.stages, self.chosen.leaves, strict=True):
            self._stage(at, sources, stage, leaves, measures, done)
        if self.chosen.closed is not None:
            self._closed(measures)
        if self.chosen.dense:
            replace(self.pullback, leaves=self.chosen.dense).measured(measures, done)
        for leaf, states in self.kept.items():
            for k, state in enumerate(states):
                done(k, leaf, state)
        return [None] * len(measures)

    def sent(self, measures: Sequence[Measure]) -> tuple[int, int]:
        """How many columns are pulled back to the sites, and in how many pullbacks."""
        count, times, ranks, sides = 0, 0, [s.rank for s in self.sources], self.pullback.sides
        for stage, leaves in zip(self.chosen.stages, self.chosen.leaves, strict=True):
            if leaves and stage.classes is None:
                count += sides * stage.passes
                times += sides * len(replace(self.pullback, leaves=leaves).passes(measures, stage.passes))
            elif leaves and stage.classes is not None:
                sites = sorted({t.site for t in self.run.trace.taps if t.derived.leaves & leaves})
                pairs = [(r, c) for r, c in zip(ranks, stage.classes, strict=True) if r and c.count]
                count += stage.passes
                times += sum(len(self._passes(rank, classes, sites)) for rank, classes in pairs)
            if stage.blocks is not None:
                ranks, sides = [min(stage.rows, stage.blocks.width)], 1
        if self.chosen.dense:
            count += self.pullback.sides * self.pullback.total
            times += self.pullback.sides * len(replace(self.pullback, leaves=self.chosen.dense).passes(measures))
        return count, times

    # Narrow layers

    def _narrowed(self, at: Run, sources: Sequence[Grouped], stage: Stage) -> Narrowed | None:
        """The columns at a narrow layer; None where they cannot be had."""
        assert stage.cut is not None and stage.blocks is not None
        stretch = alone = Stretch(at.outputs, *stage.cut.of(self.run), self.run.trace.n)
        if stage.shared:
            below = self.chosen.pattern.run
            assert below is not None
            alone = Stretch(below.outputs, *stage.cut.of(below), 1)
        return narrowed(sources, stretch, alone, 0, stage.blocks, self._part, self.pullback.budget)

    @property
    def _part(self) -> slice:
        return self.run.part if isinstance(self.run.part, slice) else slice(None)

    # Stages

    def _stage(
        self,
        at: Run,
        sources: Sequence[Grouped],
        stage: Stage,
        leaves: frozenset[int],
        measures: Sequence[Measure],
        done: Done,
    ) -> None:
        if not leaves:
            return
        if stage.classes is None:
            made: list[Columns] = [s for s in sources if isinstance(s, Narrowed)] or self.pullback.made
            replace(self.pullback, run=at, made=made, leaves=leaves, last=False).measured(measures, done)
            return
        taps = {i: [t for t in self.run.trace.taps if i in t.derived.leaves] for i in sorted(leaves)}
        sites = sorted({t.site for found in taps.values() for t in found})
        ways = {i: positions_apart(self.run, self.chosen.pattern, found) for i, found in taps.items()}
        for source, classes in zip(sources, stage.classes, strict=True):
            if not classes.count or not source.rank:
                continue
            sweep = _Sweep(self, at, source, classes, stage.frame)
            passes = self._passes(source.rank, classes, sites)
            sweep.again = len(passes) > 1 and passes[0][:2] == passes[1][:2]
            for first, last, start, stop in passes:
                deltas = sweep.pulled(first, last, start, stop, sites)
                for i, found in taps.items():
                    sweep.measure(i, found, ways[i], range(first, last), deltas, measures)

    def _passes(self, rank: int, classes: Classes, sites: list[int]) -> list[tuple[int, int, int, int]]:
        """Ranges of classes, and of the columns of their groups."""
        trace = self.run.trace
        columns = columns_at_once(max(trace.sizes[s] for s in sites), trace.n, self.pullback.budget)
        width = classes.copies * rank
        if width <= columns:
            return [(a, b, 0, rank) for a, b in even(classes.count, columns // width)]
        ranges = even(rank, max(1, columns // classes.copies))
        return [(k, k + 1, a, b) for k in range(classes.count) for a, b in ranges]

    def keep(self, leaf: int, shares: Shares, measures: Sequence[Measure]) -> None:
        states = [m.partial(shares, None) for m in measures]
        before = self.kept.get(leaf)
        self.kept[leaf] = (
            states
            if before is None
            else [m.over_columns(a, b) for m, a, b in zip(measures, before, states, strict=True)]
        )

    def shares(self, leaf: int, taps: list[Tap], deltas: Deltas) -> Shares:
        p = self.pullback
        return Shares(
            p.scope, self.run.params[leaf], taps, Pulled(deltas), p.samples, p.budget, leaf in self.kept, leaf, p.name
        )

    def deltas(self, at: Run, columns: Cotangents, sites: list[int]) -> Deltas:
        return replace(self.pullback, run=at).deltas(columns, sites)

    # The last operation

    def _closed(self, measures: Sequence[Measure]) -> None:
        """Each position has columns of its own, and the sum of their squares is the diagonal of the Hessian."""
        site = self.chosen.closed
        assert site is not None
        for source in self.sources:
            diagonal = source.diagonal(self._part)
            assert diagonal is not None
            deltas = self.deltas(self.run, {i: d[None] for i, d in diagonal.items()}, [site])
            if deltas[site] is None:
                continue
            for tap in self.run.trace.taps:
                if tap.site == site:
                    known = positions_apart(self.run, self.chosen.pattern, [tap])
                    assert known is not None
                    count = known.entries.shape[1]
                    index = torch.arange(count, device=tap.param.device).reshape(1, count, 1)
                    recipe = celled(known, index) if known.inner else known.recipe
                    (leaf,) = tap.derived.leaves
                    self.keep(leaf, self.shares(leaf, [replace(tap, recipe=recipe)], deltas), measures)


class _Sweep:
    """The classes of one kind of columns in one stage."""

    def __init__(self, stages: Stages, at: Run, source: Grouped, classes: Classes, frame: int) -> None:
        self.stages, self.at, self.source, self.classes, self.frame = stages, at, source, classes, frame
        self.pattern = stages.chosen.pattern
        self.again = False
        """Whether the columns of a class come in several passes."""
        self._memory: dict[int, Memory] = {}
        self._index: dict[tuple[int, range], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def pulled(self, first: int, last: int, start: int, stop: int, sites: list[int]) -> Deltas:
        """Cotangents `[classes * copies * columns, n, *one]` at the sites."""
        layers = self.source.layer(start, stop, self.stages._part)
        copies = self.copies(range(first, last))
        columns: Cotangents = {}
        for i, ids in self.source.groups.items():
            layer, flat = layers[i], ids.flatten()
            klass = torch.where(flat < 0, -1, self.classes.klass[flat])
            copy = torch.where(flat < 0, -1, self.classes.copy[flat])
            masks = [(klass == k) & (copy == c) for k in range(first, last) for c in range(copies)]
            mask = torch.stack(masks).to(layer.dtype).reshape(len(masks), 1, 1, *ids.shape)
            columns[i] = (layer * mask).flatten(0, 1)
        return self.stages.deltas(self.at, columns, sites)

    def copies(self, some: range) -> int:
        k = self.classes.klass
        return int(self.classes.copy[(k >= some.start) & (k < some.stop)].max()) + 1

    def cells(self, site: int, some: range) -> torch.Tensor:
        """The box in which each entry of a site lies, for each class."""
        return self.classes.cells(self.pattern.boxes[self.frame, site].flatten(2), some)

    def measure(
        self, leaf: int, taps: list[Tap], way: Layout | None, some: range, deltas: Deltas, measures: Sequence[Measure]
    ) -> None:
        taps = [t for t in taps if deltas[t.site] is not None]
        if not taps:
            return
        keep, shares = self.stages.keep, self.stages.shares
        if way is None:
            self._apart(leaf, taps, some, deltas, measures)
        elif not way.inner:
            keep(leaf, shares(leaf, [replace(taps[0], recipe=way.recipe)], deltas), measures)
        else:
            (tap,) = taps
            index = self._positions(tap.site, way, some)
            recipe = celled(way, index, self._memory.setdefault(leaf, Memory(self.again)))
            keep(leaf, shares(leaf, [replace(tap, recipe=recipe)], deltas), measures)

    def _positions(self, site: int, way: Layout, some: range) -> torch.Tensor:
        """The positions in each cell; what is sent back at one position has one box, as the pattern has made it."""
        known = self._index.setdefault((site, some), [])
        for positions, index in known:
            if torch.equal(positions, way.entries[0]):
                return index
        rows = self.pattern.boxes[self.frame, site].flatten(2)[:, :, way.entries[0]]
        known.append((way.entries[0], positions_of(self.classes.cells(rows, some))))
        return known[-1][1]

    def _apart(self, leaf: int, taps: list[Tap], some: range, deltas: Deltas, measures: Sequence[Measure]) -> None:
        """Each group gets its own columns again: what lies in its box, and zeros elsewhere."""
        cells = {t.site: self.cells(t.site, some) for t in taps}
        largest = 0
        for site in cells:
            delta = deltas[site]
            assert delta is not None
            largest = max(largest, delta[0].numel())
        for k in range(len(some)):
            boxes = torch.cat([c[k] for c in cells.values()]).unique()
            boxes = boxes[boxes >= 0]
            for a, b in even(len(boxes), max(1, self.stages.pullback.budget // largest)):
                own: Deltas = [None] * len(deltas)
                for site, of in cells.items():
                    delta = deltas[site]
                    assert delta is not None
                    delta = delta.unflatten(0, (len(some), -1))[k]
                    mask = (of[k] == boxes[a:b, None]).to(delta.dtype).reshape(b - a, 1, 1, *delta.shape[2:])
                    own[site] = (delta * mask).flatten(0, 1)
                self.stages.keep(leaf, self.stages.shares(leaf, taps, own), measures)
