"""Columns pulled back stage by stage, several groups in one cotangent, and reduced cell by cell."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch

from invfunc import thresholds
from invfunc.loss.square_root import Columns, OutputCotangents
from invfunc.passes.pullback import Done, Pullback
from invfunc.passes.run import Run
from invfunc.per_sample import Shares
from invfunc.per_sample.cotangents import Columns as PulledBack
from invfunc.per_sample.cotangents import Cotangents
from invfunc.plan import even
from invfunc.recording.tags import ParameterUse
from invfunc.reductions import Reduction, State
from invfunc.sparsity.bottleneck import Narrowed, Stretch, narrowed
from invfunc.sparsity.cells import Layout, Memory, celled
from invfunc.sparsity.colouring import Colours, positions_of
from invfunc.sparsity.groups import Grouped
from invfunc.sparsity.pattern import positions_apart
from invfunc.sparsity.ways import Chosen, Stage


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

    def folded(self, reductions: Sequence[Reduction], done: Done) -> None:
        """Reduce the shares of all columns, stage by stage; takes the same as `Pullback.folded`."""
        run, found = self.run, list[tuple[Run, Sequence[Grouped]]]()
        sources, at = self.sources, run
        for stage in self.chosen.stages:
            found.append((at, sources))
            if stage.bottleneck is None:
                break
            narrow = self._narrowed(at, sources, stage)
            if narrow is None:
                self.pullback.folded(reductions, done)
                return
            sources, at = [narrow], replace(run, outputs={0: stage.bottleneck.of(run)})
        for (at, sources), stage, leaves in zip(found, self.chosen.stages, self.chosen.leaves, strict=True):
            self._stage(at, sources, stage, leaves, reductions, done)
        if self.chosen.closed is not None:
            self._closed(reductions)
        if self.chosen.dense:
            replace(self.pullback, leaves=self.chosen.dense).folded(reductions, done)
        for leaf, states in self.kept.items():
            for k, state in enumerate(states):
                done(k, leaf, state)

    def sent(self, reductions: Sequence[Reduction]) -> tuple[int, int]:
        """How many columns are pulled back to the sites, and in how many pullbacks."""
        count, times, ranks, sides = 0, 0, [s.rank for s in self.sources], self.pullback.sides
        for stage, leaves in zip(self.chosen.stages, self.chosen.leaves, strict=True):
            if leaves and stage.classes is None:
                count += sides * stage.passes
                times += sides * len(replace(self.pullback, leaves=leaves).passes(reductions, stage.passes))
            elif leaves and stage.classes is not None:
                sites = sorted({t.site for t in self.run.trace.uses if t.derived.leaves & leaves})
                pairs = [(r, c) for r, c in zip(ranks, stage.classes, strict=True) if r and c.count]
                count += stage.passes
                times += sum(len(self._passes(rank, classes, sites)) for rank, classes in pairs)
            if stage.blocks is not None:
                ranks, sides = [min(stage.rows, stage.blocks.width)], 1
        if self.chosen.dense:
            count += self.pullback.sides * self.pullback.total
            times += self.pullback.sides * len(replace(self.pullback, leaves=self.chosen.dense).passes(reductions))
        return count, times

    # Narrow layers

    def _narrowed(self, at: Run, sources: Sequence[Grouped], stage: Stage) -> Narrowed | None:
        """The columns at a narrow layer; None where they cannot be had."""
        assert stage.bottleneck is not None and stage.blocks is not None
        stretch = alone = Stretch(at.outputs, *stage.bottleneck.of(self.run), self.run.trace.n)
        if stage.shared:
            below = self.chosen.pattern.run
            assert below is not None
            alone = Stretch(below.outputs, *stage.bottleneck.of(below), 1)
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
        reductions: Sequence[Reduction],
        done: Done,
    ) -> None:
        if not leaves:
            return
        if stage.classes is None:
            made: list[Columns] = [s for s in sources if isinstance(s, Narrowed)] or self.pullback.made
            replace(self.pullback, run=at, made=made, leaves=leaves, last=False).folded(reductions, done)
            return
        uses = {i: [t for t in self.run.trace.uses if i in t.derived.leaves] for i in sorted(leaves)}
        sites = sorted({t.site for found in uses.values() for t in found})
        ways = {i: positions_apart(self.run, self.chosen.pattern, found) for i, found in uses.items()}
        for source, classes in zip(sources, stage.classes, strict=True):
            if not classes.count or not source.rank:
                continue
            sweep = _Sweep(self, at, source, classes, stage.frame)
            passes = self._passes(source.rank, classes, sites)
            sweep.recurs = len(passes) > 1 and passes[0][:2] == passes[1][:2]
            for first, last, start, stop in passes:
                cotangents = sweep.pulled(first, last, start, stop, sites)
                for i, found in uses.items():
                    sweep.reduction(i, found, ways[i], range(first, last), cotangents, reductions)

    def _passes(self, rank: int, classes: Colours, sites: list[int]) -> list[tuple[int, int, int, int]]:
        """Ranges of classes, and of the columns of their groups."""
        trace = self.run.trace
        columns = columns_at_once(max(trace.sizes[s] for s in sites), trace.n, self.pullback.budget)
        width = classes.copies * rank
        if width <= columns:
            return [(a, b, 0, rank) for a, b in even(classes.count, columns // width)]
        ranges = even(rank, max(1, columns // classes.copies))
        return [(k, k + 1, a, b) for k in range(classes.count) for a, b in ranges]

    def keep(self, leaf: int, shares: Shares, reductions: Sequence[Reduction]) -> None:
        states = [m.step(shares) for m in reductions]
        before = self.kept.get(leaf)
        self.kept[leaf] = (
            states
            if before is None
            else [m.merge(a, b, "columns") for m, a, b in zip(reductions, before, states, strict=True)]
        )

    def shares(self, leaf: int, uses: list[ParameterUse], cotangents: Cotangents) -> Shares:
        return self.pullback.shares(leaf, uses, PulledBack(cotangents), leaf in self.kept)

    def cotangents(self, at: Run, columns: OutputCotangents, sites: list[int]) -> Cotangents:
        return replace(self.pullback, run=at).cotangents(columns, sites)

    # The last operation

    def _closed(self, reductions: Sequence[Reduction]) -> None:
        """Each position has columns of its own, and the sum of their squares is the diagonal of the Hessian."""
        site = self.chosen.closed
        assert site is not None
        for source in self.sources:
            diagonal = source.diagonal(self._part)
            assert diagonal is not None
            cotangents = self.cotangents(self.run, {i: d[None] for i, d in diagonal.items()}, [site])
            if cotangents[site] is None:
                continue
            for use in self.run.trace.uses:
                if use.site == site:
                    known = positions_apart(self.run, self.chosen.pattern, [use])
                    assert known is not None
                    count = known.entries.shape[1]
                    index = torch.arange(count, device=use.param.device).reshape(1, count, 1)
                    recipe = celled(known, index) if known.inner else known.recipe
                    (leaf,) = use.derived.leaves
                    self.keep(leaf, self.shares(leaf, [replace(use, recipe=recipe)], cotangents), reductions)


class _Sweep:
    """The classes of one kind of columns in one stage."""

    def __init__(self, stages: Stages, at: Run, source: Grouped, classes: Colours, frame: int) -> None:
        self.stages, self.at, self.source, self.classes, self.frame = stages, at, source, classes, frame
        self.pattern = stages.chosen.pattern
        self.recurs = False
        """Whether the columns of a class come in several passes."""
        self._memory: dict[int, Memory] = {}
        self._index: dict[tuple[int, range], list[tuple[torch.Tensor, torch.Tensor]]] = {}

    def pulled(self, first: int, last: int, start: int, stop: int, sites: list[int]) -> Cotangents:
        """Cotangents `[classes * copies * columns, n, *one]` at the sites."""
        layers = self.source.layer(start, stop, self.stages._part)
        copies = self.copies(range(first, last))
        columns: OutputCotangents = {}
        for i, ids in self.source.groups.items():
            layer, flat = layers[i], ids.flatten()
            klass = torch.where(flat < 0, -1, self.classes.klass[flat])
            copy = torch.where(flat < 0, -1, self.classes.copy[flat])
            masks = [(klass == k) & (copy == c) for k in range(first, last) for c in range(copies)]
            mask = torch.stack(masks).to(layer.dtype).reshape(len(masks), 1, 1, *ids.shape)
            columns[i] = (layer * mask).flatten(0, 1)
        return self.stages.cotangents(self.at, columns, sites)

    def copies(self, some: range) -> int:
        k = self.classes.klass
        return int(self.classes.copy[(k >= some.start) & (k < some.stop)].max()) + 1

    def cells(self, site: int, some: range) -> torch.Tensor:
        """The box in which each entry of a site lies, for each class."""
        return self.classes.cells(self.pattern.boxes[self.frame, site].flatten(2), some)

    def reduction(
        self,
        leaf: int,
        uses: list[ParameterUse],
        way: Layout | None,
        some: range,
        cotangents: Cotangents,
        reductions: Sequence[Reduction],
    ) -> None:
        uses = [t for t in uses if cotangents[t.site] is not None]
        if not uses:
            return
        keep, shares = self.stages.keep, self.stages.shares
        if way is None:
            self._apart(leaf, uses, some, cotangents, reductions)
        elif not way.inner:
            keep(leaf, shares(leaf, [replace(uses[0], recipe=way.recipe)], cotangents), reductions)
        else:
            (use,) = uses
            index = self._positions(use.site, way, some)
            recipe = celled(way, index, self._memory.setdefault(leaf, Memory(self.recurs)))
            keep(leaf, shares(leaf, [replace(use, recipe=recipe)], cotangents), reductions)

    def _positions(self, site: int, way: Layout, some: range) -> torch.Tensor:
        """The positions in each cell; all that is sent back at one position has the same box in the pattern."""
        known = self._index.setdefault((site, some), [])
        for positions, index in known:
            if torch.equal(positions, way.entries[0]):
                return index
        rows = self.pattern.boxes[self.frame, site].flatten(2)[:, :, way.entries[0]]
        known.append((way.entries[0], positions_of(self.classes.cells(rows, some))))
        return known[-1][1]

    def _apart(
        self, leaf: int, uses: list[ParameterUse], some: range, cotangents: Cotangents, reductions: Sequence[Reduction]
    ) -> None:
        """Reduce with the columns of each group separate again: what lies in its box, and zeros elsewhere."""
        cells = {t.site: self.cells(t.site, some) for t in uses}
        largest = 0
        for site in cells:
            cotangent = cotangents[site]
            assert cotangent is not None
            largest = max(largest, cotangent[0].numel())
        for k in range(len(some)):
            boxes = torch.cat([c[k] for c in cells.values()]).unique()
            boxes = boxes[boxes >= 0]
            for a, b in even(len(boxes), max(1, self.stages.pullback.budget // largest)):
                own: Cotangents = [None] * len(cotangents)
                for site, of in cells.items():
                    cotangent = cotangents[site]
                    assert cotangent is not None
                    cotangent = cotangent.unflatten(0, (len(some), -1))[k]
                    mask = (of[k] == boxes[a:b, None]).to(cotangent.dtype).reshape(b - a, 1, 1, *cotangent.shape[2:])
                    own[site] = (cotangent * mask).flatten(0, 1)
                self.stages.keep(leaf, self.stages.shares(leaf, uses, own), reductions)
