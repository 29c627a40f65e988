"""What each way costs: stages between some narrow layers, with the columns that share passes in them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from invfunc import thresholds
from invfunc.sparsity.bottleneck import Blocks
from invfunc.sparsity.colouring import Colours, empty
from invfunc.sparsity.groups import Grouped
from invfunc.sparsity.paths import Bottleneck
from invfunc.sparsity.pattern import ALL, LAST, Pattern, positions_apart
from invfunc.sparsity.sources import Source, members_of
from invfunc.sparsity.ways import Chosen, Facts, Stage


@dataclass
class Step:
    """A stage at the end of some others, and where its columns come in."""

    stage: Stage
    cost: float
    above: frozenset[int]
    """The sites of this stage and those before."""
    sources: list[Source]
    """The columns that go on below this stage."""


class Search:
    """All ways through one pattern."""

    def __init__(self, facts: Facts, pattern: Pattern) -> None:
        self.facts, self.pattern = facts, pattern
        self._steps: dict[tuple[int, ...], Step | None] = {}

    def chosen(self, bottlenecks: tuple[Bottleneck, ...]) -> Chosen | None:
        """The way with these narrow layers, unless what has to be factored is too large."""
        facts, steps = self.facts, list[Step]()
        for k in range(len(bottlenecks) + 1):
            step = self._step(bottlenecks[:k], bottlenecks[k] if k < len(bottlenecks) else None, steps)
            if step is None:
                return None
            steps.append(step)
        stages = [s.stage for s in steps]
        split = [frozenset(i for i, own in facts.sites.items() if own <= s.sites) for s in stages]
        alone = frozenset(i for i, own in facts.sites.items() if own == {self.closed})
        dense = frozenset(facts.sites) - frozenset().union(alone, *split)
        touched = frozenset[int]().union(*(facts.sites[i] for i in dense))
        cost = sum(s.cost for s in steps) + facts.total * facts.n * sum(facts.work[s] for s in touched)
        return Chosen(self.pattern, self.closed, stages, dense, cost, split)

    def _step(self, before: tuple[Bottleneck, ...], bottleneck: Bottleneck | None, steps: list[Step]) -> Step | None:
        key = (*(id(c) for c in before), id(bottleneck))
        if key not in self._steps:
            above = steps[-1].above if steps else frozenset[int]()
            sources = steps[-1].sources if steps else [self._at_outputs(s) for s in self.facts.sources]
            self._steps[key] = self._made(bottleneck, above, sources, first=not steps)
        return self._steps[key]

    def _made(
        self, bottleneck: Bottleneck | None, above: frozenset[int], sources: list[Source], first: bool
    ) -> Step | None:
        facts, pattern = self.facts, self.pattern
        sites = facts.everything - above - (bottleneck.below if bottleneck else frozenset())
        number = ALL if bottleneck is None else pattern.frame_above(bottleneck)
        stage = self._stage(sources, sites - {self.closed}, number)
        cost = self._cost(stage, sites)
        if bottleneck is None:
            return Step(stage, cost, above | sites, [])
        stage.bottleneck = bottleneck
        stage.blocks, stage.rows = self._blocks(sources, bottleneck)
        stage.shared = first and pattern.affine(bottleneck)
        count = 1 if stage.shared and all(s.alike for s in facts.sources) else facts.n
        width, size = stage.blocks.width, count * len(stage.blocks.places) * stage.rows * stage.blocks.width
        if size > thresholds.FACTORED:
            return None
        runs = 1 if stage.shared else facts.n
        cost += thresholds.FACTORED_COST * size * width + runs * width * sum(facts.work[s] for s in sites)
        ids = stage.blocks.ids(bottleneck.width)
        rank = min(stage.rows, width)
        below = Source(rank, rank, lambda frame: [(pattern.at_bottleneck(bottleneck, frame), ids)])
        return Step(stage, cost, above | sites, [below])

    def _at_outputs(self, grouped: Grouped) -> Source:
        def parts(frame: int) -> list[tuple[torch.Tensor | None, torch.Tensor]]:
            rows = self.pattern.at_outputs(frame)
            return [(rows[i], ids) for i, ids in grouped.groups.items()]

        return Source(grouped.rank, grouped.rows, parts)

    def _stage(self, sources: list[Source], sites: frozenset[int], frame: int) -> Stage:
        plain = sum(s.rank * s.count for s in sources)
        if not self.facts.local or not sites:
            return Stage(sites, None, plain if sites else 0, frame)
        boxes = [s.boxes(frame) for s in sources]
        if all(bool((b == b[:, :, :1]).all()) for b in boxes):  # no column can share a pass with another
            return Stage(sites, None, plain, frame)
        classes = [Colours(b) for b in boxes]
        passes = sum(s.rank * c.passes for s, c in zip(sources, classes, strict=True))
        if passes >= plain:
            return Stage(sites, None, plain, frame)
        return Stage(sites, classes, passes, frame)

    def _cost(self, stage: Stage, crossed: frozenset[int]) -> float:
        work = self.facts.n / 2 * sum(self.facts.work[s] for s in [*stage.sites, *crossed])
        cost = stage.passes * (work + thresholds.COLUMN) * (1.0 if stage.classes is None else thresholds.SHARED)
        if stage.classes is not None:
            cost += sum(c.count for c in stage.classes) * len(stage.sites) * thresholds.CLASS
        return cost

    def _blocks(self, sources: list[Source], bottleneck: Bottleneck) -> tuple[Blocks, int]:
        """How the entries at a bottleneck fall apart, and how many rows each block gets."""
        number = self.pattern.frame_at(bottleneck)
        rows = self.pattern.at_bottleneck(bottleneck, number)
        assert rows is not None
        if len(sources) == 1:
            (source,) = sources
            classes = Colours(source.boxes(number))
            if classes.count == 1 and len(classes.codes) > 1:
                places = members_of(classes.cells(rows.flatten(2), range(1))[0], len(classes.codes), bottleneck.width)
                members = members_of(classes.box, len(classes.codes), len(classes.box))
                return Blocks(places, members), members.shape[1] * source.rows
        groups = torch.arange(sum(s.count for s in sources), device=rows.device)
        places = torch.arange(bottleneck.width, device=rows.device)
        return Blocks(places[None], groups[None]), sum(s.rows * s.count for s in sources)

    @cached_property
    def closed(self) -> int | None:
        """The last site, if each column that reaches a row of its parameter does so at a single position, else None."""
        facts, pattern = self.facts, self.pattern
        top = len(facts.work) - 1
        own = [i for i, sites in facts.sites.items() if top in sites]
        uses = [t for t in facts.run.trace.uses if t.site == top]
        if not facts.local or any(facts.sites[i] != {top} for i in own) or len(own) < len(uses):
            return None
        if any(positions_apart(facts.run, pattern, [t]) is None for t in uses) or None in pattern.layouts[top]:
            return None
        shape = pattern.boxes[LAST, top].shape[2:]
        return top if all(self._apart(s, shape, top) for s in facts.sources) else None

    def _apart(self, grouped: Grouped, shape: torch.Size, top: int) -> bool:
        if grouped.diagonal(slice(0, 1)) is None:
            return False
        rows = self.pattern.at_outputs(LAST)
        group = torch.full((shape.numel(),), -1, device=self.facts.run.params[0].device)
        for i, ids in grouped.groups.items():
            found = rows[i]
            if found is None:
                continue
            lo, hi, ids = -found[0].flatten(1), found[1].flatten(1), ids.flatten()
            some = (ids >= 0) & ~empty(found).flatten()
            lo, hi, ids = lo[:, some], hi[:, some], ids[some]
            if not torch.equal(lo, hi):
                return False
            entry = torch.zeros_like(ids)
            for at, size in zip(lo, [s for s in shape if s > 1] or [1], strict=True):
                entry = entry * size + at.long()
            if len(entry.unique()) < len(entry) or bool((group[entry] >= 0).any()):
                return False
            group[entry] = ids
        for known in self.pattern.layouts[top]:
            assert known is not None
            met = group[known.entries]
            alone = torch.where(met < 0, -1 - torch.arange(met.shape[1], device=met.device), met).sort(1).values
            if bool((alone[:, 1:] == alone[:, :-1]).any()):
                return False
        return True
