"""Which shortcuts to take for the exact columns of a GGN, by an estimate of what they cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import torch

from invfunc import thresholds
from invfunc.operations.receptive_fields.propagation import Labels
from invfunc.passes.run import Run
from invfunc.reductions.reduction import Shortcuts
from invfunc.sparsity.bottleneck import Bottleneck, paths
from invfunc.sparsity.cells import layout_at
from invfunc.sparsity.closed import closed_site
from invfunc.sparsity.colouring import Colouring, hulls, members_of
from invfunc.sparsity.groups import Grouped
from invfunc.sparsity.narrowed import Blocks
from invfunc.sparsity.pattern import Frame, Pattern, positions_apart


@dataclass
class Source:
    """Groups of columns where they come in: at the outputs, or at a bottleneck."""

    rank: int
    rows: int
    """How many rows the products with directions have for each group."""
    at: list[tuple[torch.Tensor, torch.Tensor]]
    """The tensors of the run of one sample, and the group of each of their entries."""

    @property
    def count(self) -> int:
        return max(int(ids.max()) for _, ids in self.at) + 1

    def boxes(self, labels: Labels) -> torch.Tensor:
        """The boxes of the groups, `[2, k, groups]`."""
        found = None
        for x, ids in self.at:
            if (rows := labels.of(x)) is not None:
                hull = hulls(rows, ids)
                hull = torch.nn.functional.pad(hull, (0, self.count - hull.shape[2]), value=-torch.inf)
                found = hull if found is None else torch.maximum(found, hull)
        return torch.full((2, 1, self.count), -torch.inf) if found is None else found


@dataclass
class Reach:
    """Parameters that the same passes reach."""

    leaves: frozenset[int]
    frame: Frame | None
    colourings: list[Colouring] | None
    """Those of each kind of columns that comes in; None if each column has a pass of its own."""
    passes: int


@dataclass
class Stage:
    """What lies between where columns come in and a bottleneck, or the end, with what is read nowhere else."""

    sites: frozenset[int]
    reaches: list[Reach]
    cost: float
    end: Blocks | None = None
    """What is left of the columns at the bottleneck."""


@dataclass
class Way:
    """What is done: the last operation with parameters by itself, stages, and parameters that take every column."""

    pattern: Pattern
    alone: Run
    """The run of one sample under the pattern."""
    closed: frozenset[int]
    """The parameters whose shares need no columns but the diagonal of the Hessian."""
    stages: list[Stage]
    dense: frozenset[int]
    cost: float
    """Its estimated time, as a fraction of that for pulling back every column."""
    cells: bool
    """Whether the shares of groups that share passes have to be told apart, and not only their positions."""


class Planner:
    """Looks at a run and at the columns that are sent back through it."""

    pattern: Pattern
    alone: Run
    above: list[list[int]]
    """The sites through which a path from the outputs to each site may lead."""

    def __init__(
        self,
        run: Run,
        columns: Sequence[Grouped],
        look: Callable[[Pattern, Run], Run | None],
        allowed: set[Shortcuts],
        added: bool = True,
    ) -> None:
        """`look` runs the function on one sample under a pattern; `allowed` are the shortcuts that reductions allow;
        `added` says that the squares of all columns are added up, and none subtracted, so that others may stand for
        them at a narrow layer."""
        self.run, self.columns, self.look, self.added = run, columns, look, added
        self.shortcuts: Shortcuts = next(iter(allowed)) if len(allowed) == 1 else "narrow"
        self.n, self.sites = run.trace.n, _sites(run)
        self.everything = frozenset(range(len(run.trace.edges)))
        self.total = sum(g.rank * max(1, g.count) for g in columns)
        """How many columns a sample has."""
        self.why = ""
        """Why every column is to be pulled back, if so."""

    def way(self) -> Way | None:
        """The cheapest way, or None if that is to take every column."""
        if not self.everything or any(t.recomputed for t in self.run.trace.uses):
            self.why = "what the operations read is computed again" if self.everything else "no parameter is read"
            return None
        sizes = self.run.trace.sizes
        look = len(sizes) * thresholds.LOOK + sum(sizes) * thresholds.LOOK_ENTRY
        look *= thresholds.LOOK_ON.get(next(iter(self.run.outputs.values()))[0].device.type, 1)
        if not self._pays(thresholds.LOOKS * look):
            self.why = "there are few columns" if self.total < thresholds.FEW else "all columns take little time"
            return None
        self.above, found = paths(self.run)
        bottlenecks = self._candidates(found) if self.added else []
        self.pattern = self._pattern(bottlenecks)
        run = self.look(self.pattern, self.run)
        if run is None or self.pattern.labels.lost is not None:
            self.why = self.pattern.hidden
            return None
        self.alone = run
        if not self.pattern.complete(run):
            self.why = "an output has no pattern"
            return None
        self.why = f"the structure would save nothing{self.pattern.blurred}"
        outputs = [
            Source(g.rank, g.rows, [(run.outputs[i][0], ids) for i, ids in g.groups.items()]) for g in self.columns
        ]
        ways = [self._way(stages) for stages in self._ways(frozenset(), outputs, bottlenecks)]
        cost, _, best = min(((cost, len(way.stages), way) for cost, way in ways), key=lambda found: found[:2])
        if not self._pays(cost):
            return None
        self.why = f"by the structure of the function{self.pattern.blurred}"
        return best

    def _pays(self, cost: float) -> bool:
        """Whether a way of some cost is to be preferred to that of all columns."""
        return self.total >= thresholds.FEW and cost < thresholds.PAYS * self.all_cost

    def _candidates(self, bottlenecks: list[Bottleneck]) -> list[Bottleneck]:
        """The narrowest of those that are narrower than what comes before them."""
        found, width = [], self.total
        for bottleneck in bottlenecks:
            if bottleneck.width < thresholds.NARROWER * width and bottleneck.below:
                found.append(bottleneck)
                width = bottleneck.width
        return sorted(sorted(found, key=lambda c: c.width)[: thresholds.NARROWEST], key=lambda c: -c.width)

    def _pattern(self, bottlenecks: list[Bottleneck]) -> Pattern:
        """A pattern with labels at each bottleneck, and with frames where positions may be told apart."""

        def frame(sites: frozenset[int], base: Labels) -> Frame:
            over = {other for s in sites for other in self.above[s]}  # those that have a site of the frame below them
            return Frame(sites, sites - over, base, one=self.shortcuts == "positions")

        inputs, at = Labels(axes=1), {b: Labels(self._axes(b)) for b in bottlenecks}
        if self.shortcuts == "narrow":
            return Pattern(inputs, None, None, at, {}, {})
        everything, top = frame(self.everything, inputs), frozenset({max(self.everything)})
        inputs.axes = 3 if len(everything.first) > 1 else 1
        frames = {b: frame(self.everything - b.below, at[b]) for b in bottlenecks if self.everything - b.below}
        last = Frame(top, top, inputs, hulls=False)
        lower = self.everything - everything.first - top
        most = sum(self.work) / thresholds.NEAR
        near = {s: frame(frozenset({s}), inputs) for s in lower if sum(self.work[t] for t in self.above[s]) < most}
        return Pattern(inputs, everything, last, at, frames, near)

    def _axes(self, bottleneck: Bottleneck) -> int:
        """Along how many axes the entries of a sample lie there."""
        x, axis = bottleneck.of(self.run)
        return max(1, sum(size > 1 for size in axis.expose(x, self.n).shape[1:]))

    # All ways through the pattern

    def _ways(
        self, above: frozenset[int], sources: list[Source], bottlenecks: list[Bottleneck]
    ) -> Iterator[list[Stage]]:
        """The stages below some sites, to the end or through some of the bottlenecks."""
        sites = self.everything - above
        yield [self._stage(sources, sites, self.pattern.everything)]
        for k, bottleneck in enumerate(bottlenecks):
            stage = self._stage(sources, sites - bottleneck.below, self.pattern.above.get(bottleneck))
            blocks = stage.end = self._blocks(sources, bottleneck, first=not above)
            size = (1 if blocks.shared and all(g.alike for g in self.columns) else self.n) * blocks.numbers
            if size > thresholds.FACTORED:
                continue
            runs, crossed = 1 if blocks.shared else self.n, sum(self.work[s] for s in sites - bottleneck.below)
            stage.cost += thresholds.FACTORED_COST * size * blocks.width + runs * blocks.width * crossed
            below = Source(blocks.rank, blocks.rank, [(bottleneck.of(self.alone)[0], blocks.ids)])
            for rest in self._ways(self.everything - bottleneck.below, [below], bottlenecks[k + 1 :]):
                yield [stage, *rest]

    def _way(self, stages: list[Stage]) -> tuple[float, Way]:
        """The way through some stages, and its cost."""
        closed = frozenset(i for i, own in self.sites.items() if own == {self.closed})
        dense = frozenset(self.sites) - closed.union(*(r.leaves for stage in stages for r in stage.reaches))
        touched = frozenset[int]().union(*(self.sites[i] for i in dense))
        cost = sum(s.cost for s in stages) + self.total * self.n * sum(self.work[s] for s in touched)
        share, cells = cost / self.all_cost, self.shortcuts == "all"
        return cost, Way(self.pattern, self.alone, closed, stages, dense, share, cells)

    def _stage(self, sources: list[Source], crossed: frozenset[int], frame: Frame | None) -> Stage:
        sites = crossed - {self.closed}
        leaves = frozenset(i for i, own in self.sites.items() if own <= sites)
        passes, colourings = sum(s.rank * s.count for s in sources) if sites else 0, None
        if frame is not None and sites:
            found = _colourings([s.boxes(frame.labels) for s in sources])
            shared = sum(s.rank * c.passes for s, c in zip(sources, found, strict=False))
            passes, colourings = (shared, found) if found and shared < passes else (passes, None)
        all_, near, cost = Reach(leaves, frame, colourings, passes), [], 0.0
        for site in sorted(sites & self.pattern.near.keys()):
            if (own := self._near(site, sources, all_)) is not None:
                near.append(own[0])
                cost, sites = cost + own[1], sites - {site}
                all_ = replace(all_, leaves=all_.leaves - own[0].leaves)
        if all_.leaves or not near:
            work = self.n / 2 * sum(self.work[s] for s in [*sites, *crossed])
            cost += passes * (work + thresholds.COLUMN) * (1.0 if colourings is None else thresholds.SHARED)
            cost += sum(c.count for c in colourings or []) * len(sites) * thresholds.CLASS
        return Stage(crossed - {self.closed}, [all_, *near], cost)

    def _near(self, site: int, sources: list[Source], others: Reach) -> tuple[Reach, float] | None:
        """The parameters of a site near the outputs with passes of their own, and what these cost, if so few hold all
        columns there that this is less than among the others."""
        leaves = frozenset(i for i in others.leaves if self.sites[i] == {site})
        known = positions_apart(self.run, self.pattern, [t for t in self.run.trace.uses if t.site == site][:1])
        frame, shared = self.pattern.near[site], others.colourings
        colourings = _colourings([s.boxes(frame.labels) for s in sources]) if leaves and known is not None else []
        passes = sum(s.rank * c.passes for s, c in zip(sources, colourings, strict=False))
        work = self.n / 2 * sum(self.work[s] for s in [site, *self.above[site]]) + thresholds.COLUMN
        cost = passes * work * thresholds.SHARED + sum(c.count for c in colourings) * thresholds.CLASS
        each = self.work[site] / 2 if shared is None else self.run.trace.sizes[site] * thresholds.TAKEN
        saved = (others.passes - passes) * self.n * each + sum(c.count for c in shared or []) * thresholds.CLASS
        return (Reach(leaves, frame, colourings, passes), cost) if colourings and cost < saved else None

    def _blocks(self, sources: list[Source], bottleneck: Bottleneck, first: bool) -> Blocks:
        """How the entries at a bottleneck fall apart, and how many rows each block gets."""
        labels, shared = self.pattern.at[bottleneck], first and self.pattern.affine(bottleneck, self.alone)
        rows = labels.of(bottleneck.of(self.alone)[0])
        assert rows is not None
        if len(sources) == 1:
            (source,) = sources
            found = Colouring(source.boxes(labels))
            if found.count == 1 and len(found.codes) > 1:
                places = members_of(
                    found.placed(rows.flatten(2)).cells(range(1))[0], len(found.codes), bottleneck.width
                )
                members = members_of(found.box, len(found.codes), -1)
                return Blocks(bottleneck, places, members, members.shape[1] * source.rows, shared)
        groups = torch.arange(sum(s.count for s in sources), device=rows.device)
        places = torch.arange(bottleneck.width, device=rows.device)
        return Blocks(bottleneck, places[None], groups[None], sum(s.rows * s.count for s in sources), shared)

    @cached_property
    def work(self) -> list[float]:
        """The multiplications for a column of a sample at each site."""
        return _work(self.run)

    @cached_property
    def all_cost(self) -> float:
        """The estimated cost of pulling back every column."""
        return self.total * (self.n * sum(self.work) + thresholds.COLUMN)

    @cached_property
    def closed(self) -> int | None:
        """The last site, if it needs no columns."""
        return closed_site(self.run, self.alone, self.pattern, self.columns, self.sites, self.shortcuts)


def _colourings(boxes: list[torch.Tensor]) -> list[Colouring]:
    """Those of the boxes of several kinds of groups; none if no column can share a pass with another."""
    return [] if all(bool((b == b[:, :, :1]).all()) for b in boxes) else [Colouring(b) for b in boxes]


def _sites(run: Run) -> dict[int, frozenset[int]]:
    """The sites of each parameter."""
    found: dict[int, set[int]] = {}
    for use in run.trace.uses:
        for i in use.derived.leaves:
            found.setdefault(i, set()).add(use.site)
    return {i: frozenset(s) for i, s in found.items()}


def _work(run: Run) -> list[float]:
    """The multiplications for a column of a sample at each site: once through the operation, once for its share."""
    work = [0.0] * len(run.trace.edges)
    for use in run.trace.uses:
        if use.recipe.own is not None:  # it has an entry for each sample
            work[use.site] += 2.0 * use.param.numel()
            continue
        sent = run.trace.sizes[use.site]
        known = layout_at(run, use, "meta")
        outs = use.param.shape[0] if use.param.ndim > 1 else min(sent, use.param.numel())
        outs = known.outs if known is not None else outs  # which meet the parameter at each position
        work[use.site] += 2.0 * max(sent, sent // max(1, outs) * use.param.numel())
    return work
