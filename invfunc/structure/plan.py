"""Shortcuts for the exact columns of a GGN: which to take, by an estimate of what they cost, and taking them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from invfunc import thresholds
from invfunc._torch.generators import set_states, state_of, torchs_own, uniform
from invfunc.core.marks import DERIVED, LEAF, SWAP
from invfunc.core.run import Run
from invfunc.core.shares import Shares
from invfunc.core.uses import Expanded, ProductUse, Use
from invfunc.core.ways import is_fault
from invfunc.loss.square_root import Columns
from invfunc.plan import even
from invfunc.problem import BoundProblem
from invfunc.reductions.reduction import Shortcuts
from invfunc.structure.columns import (
    Bottleneck,
    Colouring,
    Groups,
    Narrowed,
    grouped,
    hulls,
    members_of,
    operations,
    paths,
    positions_of,
)
from invfunc.structure.labels import NONE
from invfunc.structure.look import Frame, StructureLook, Told, sites_of


@dataclass
class Reach:
    """Parameters that the same passes reach."""

    leaves: frozenset[int]
    frame: Frame | None
    colouring: Colouring | None
    """None if each column has a pass of its own."""
    passes: int


@dataclass
class Stage:
    """The part between where columns come in and a bottleneck, or the end, with what is read nowhere else."""

    groups: Groups
    x: torch.Tensor
    """The tensor that the columns come in at."""
    reaches: list[Reach]
    cost: float
    end: Narrowed | None = None
    """The columns at the bottleneck, where fewer are left."""


@dataclass
class Shortcut:
    """A way: the last operation with parameters by itself, stages, and parameters that take every column."""

    closed: frozenset[int]
    """The parameters whose squares need no columns but the diagonal of the Hessian."""
    stages: list[Stage]
    dense: frozenset[int]
    cost: float
    """Its estimated time, as a fraction of that for pulling back every column."""


Reduce = Callable[[int, Shares], None]
"""Takes the shares of a parameter."""


class Structure:
    """Looks at a run and at the columns that are sent back through it."""

    look: StructureLook
    above: list[list[int]]
    """The sites through which a path from the outputs to each site may lead."""
    at: dict[Bottleneck, Any]
    frames: dict[Bottleneck, Frame]

    def __init__(
        self, problem: BoundProblem, run: Run, columns: Columns, of: list[list[Use]], shortcuts: Shortcuts
    ) -> None:
        """`of` are the uses of each parameter."""
        assert run.split is not None
        self.problem, self.run, self.x, self.of, self.shortcuts = problem, run, run.split.roots[0].source, of, shortcuts
        self.columns, self.n = columns, run.n
        self.numbers = sites_of(run.uses)
        self.site = {id(u): s for u, s in zip(run.uses, self.numbers, strict=True)}
        self.sites = {i: frozenset(self.site[id(u)] for u in uses) for i, uses in enumerate(of) if uses}
        self.everything = frozenset(self.numbers)
        self.total, self.seen = columns.count, set[int]()

    @property
    def worth(self) -> bool:
        """True if to look costs little beside what may be saved."""
        look = len(self.sizes) * thresholds.LOOK + sum(self.sizes) * thresholds.LOOK_ENTRY
        look *= thresholds.LOOK_ON.get(self.x.device.type, 1)
        pays = thresholds.LOOKS * look < thresholds.PAYS * self.all_cost
        return bool(self.everything) and self.total >= thresholds.FEW and pays

    def way(self) -> Shortcut | None:
        """The cheapest way, or None if that is to take every column."""
        if not self.worth:
            return None
        groups = grouped(self.columns, self.x.shape)
        if groups is None:
            return None
        self.groups = groups
        self.above, found = paths(self.x, self.run, self.numbers)
        bottlenecks = self._candidates(found)
        self._prepare(bottlenecks)
        if not self._looked():
            return None
        ways = [*map(self._way, self._ways(frozenset(), groups, self.x, self.look.output, bottlenecks))]
        best = min(ways, key=lambda way: (way.cost, len(way.stages)))
        return best if best.cost < thresholds.PAYS else None

    def _candidates(self, bottlenecks: list[Bottleneck]) -> list[Bottleneck]:
        """The narrowest of those that are narrower than what comes before them."""
        found, width = [], self.total
        for bottleneck in bottlenecks:
            if bottleneck.width < thresholds.NARROWER * width and bottleneck.below:
                found.append(bottleneck)
                width = bottleneck.width
        return sorted(sorted(found, key=lambda c: c.width)[: thresholds.NARROWEST], key=lambda c: -c.width)

    def _prepare(self, bottlenecks: list[Bottleneck]) -> None:
        """Set what is looked for: labels at each bottleneck, and frames where positions may be told apart."""
        self.look = look = StructureLook(self.run.uses)
        self.at = {b: look.at(b.use) for b in bottlenecks}
        self.whole = self.last = None
        self.frames = {}
        if self.shortcuts == "narrow":
            return

        def frame(sites: frozenset[int], base: Any) -> Frame:
            over = {other for s in sites for other in self.above[s]}  # those that have a site of the frame below them
            return look.frame(sites, sites - over, base, one=self.shortcuts == "positions")

        top = frozenset({max(self.everything)})
        self.last = look.frame(top, top, look.inputs, hulls=False)
        if all(p == 1 for use, p in zip(self.run.uses, self.positions, strict=True) if isinstance(use, ProductUse)):
            return  # then all that is read is read together
        self.whole = frame(self.everything, look.inputs)
        self.frames = {b: frame(own, self.at[b]) for b in bottlenecks if (own := self.everything - b.below)}

    def _looked(self) -> bool:
        """Looks; true if the function does the same on one sample alone, as far as can be seen."""
        after = [(g, state_of(g)) for g in torchs_own()]
        try:
            set_states(self.run.states)
            self.look.of(self.problem)
        except Exception as error:  # whatever one sample alone leads f to
            if is_fault(error):
                raise
            return False
        finally:
            set_states(after)
        one, z = self.look, self.look.output
        if z.numel() * self.n != self.x.numel() or len(one.uses) != len(self.run.uses):
            return False
        pairs = zip(self.run.uses, one.uses, strict=True)
        if any(type(a) is not type(b) or a.node.leaf != b.node.leaf or a.shape != b.shape for a, b in pairs):
            return False
        if sites_of(one.uses) != self.numbers or any(f.sites - f.boxes.keys() for f in self.look.frames):
            return False
        if operations(z) != operations(self.x):
            return False
        tolerance = 1000 * torch.finfo(z.dtype).eps
        first = self.x.reshape(self.n, -1)[0].detach()
        return bool(((z.detach().flatten() - first).abs() <= tolerance * first.abs().max().clamp(min=1e-30)).all())

    # All ways

    def _ways(
        self,
        above: frozenset[int],
        groups: Groups,
        x: torch.Tensor,
        one: torch.Tensor,
        bottlenecks: list[Bottleneck],
    ) -> Iterator[list[Stage]]:
        """The stages below some sites, to the end or through some of the bottlenecks.

        The columns come in at x, in the run of one sample at `one`.
        """
        sites = self.everything - above
        yield [self._stage(groups, x, one, sites, self.whole)]
        for k, bottleneck in enumerate(bottlenecks):
            stage = self._stage(groups, x, one, sites - bottleneck.below, self.frames.get(bottleneck))
            read = self.look.read[bottleneck.use]
            places, members = self._blocks(groups, one, read, bottleneck)
            shared = not above and self.shared[bottleneck]
            end = stage.end = Narrowed(groups, x, self.n, (one, read), bottleneck, places, members, shared)
            size = (1 if shared and self.groups.alike else self.n) * end.count * end.most * end.width
            if size > thresholds.FACTORED:
                continue
            crossed = sum(self.work[s] for s in sites - bottleneck.below)
            stage.cost += thresholds.FACTORED_COST * size * end.width + end.runs * end.width * crossed
            for rest in self._ways(self.everything - bottleneck.below, end, bottleneck.x, read, bottlenecks[k + 1 :]):
                yield [stage, *rest]

    def _way(self, stages: list[Stage]) -> Shortcut:
        closed = self.closed if self.closed is not None else frozenset[int]()
        dense = frozenset(self.sites) - closed.union(*(r.leaves for stage in stages for r in stage.reaches))
        cost = sum(s.cost for s in stages) + self.total * self.n * sum(self.work[s] for s in self._touched(dense))
        return Shortcut(closed, stages, dense, cost / self.all_cost)

    def _stage(
        self, groups: Groups, x: torch.Tensor, one: torch.Tensor, crossed: frozenset[int], frame: Frame | None
    ) -> Stage:
        leaves = frozenset(i for i, own in self.sites.items() if own <= crossed) - (self.closed or frozenset())
        every, own = groups.rank * groups.count, [*crossed]
        told = frozenset(i for i in leaves if self._layout(i) is not None)
        colouring = None
        if frame is not None and told:
            boxes = hulls(self.look.labels_of(one, frame.root), groups.ids)
            boxes = torch.nn.functional.pad(boxes, (0, groups.count - boxes.shape[2]), value=NONE)
            colouring = None if bool((boxes == boxes[:, :, :1]).all()) else Colouring(boxes)
        passes = every if colouring is None else groups.rank * colouring.passes
        if colouring is None or passes >= every:
            reaches = [Reach(leaves, None, None, every)] if leaves else []
            return Stage(groups, x, reaches, self._cost(leaves, own, every))
        assert frame is not None
        reaches = [Reach(told, frame, colouring, passes)]
        cost = self._cost(told, own, passes) * thresholds.SHARED
        cost += colouring.count * len(self._touched(told)) * thresholds.CLASS
        if others := leaves - told:
            reaches.append(Reach(others, None, None, every))
            cost += self._cost(others, own, every)
        return Stage(groups, x, reaches, cost)

    def _touched(self, leaves: frozenset[int]) -> frozenset[int]:
        return frozenset[int]().union(*(self.sites[i] for i in leaves))

    def _cost(self, leaves: frozenset[int], crossed: Sequence[int], passes: int) -> float:
        if not leaves:
            return 0.0
        work = self.n / 2 * sum(self.work[s] for s in [*self._touched(leaves), *crossed])
        return passes * (work + thresholds.COLUMN)

    def _blocks(
        self, groups: Groups, one: torch.Tensor, read: torch.Tensor, bottleneck: Bottleneck
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The entries of each block at a bottleneck, and the groups of columns that reach it."""
        root = self.at[bottleneck]
        found = Colouring(hulls(self.look.labels_of(one, root), groups.ids))
        if found.count == 1 and len(found.codes) > 1:
            cells = found.placed(self.look.labels_of(read, root))(range(1))[0]
            return members_of(cells, len(found.codes), bottleneck.width), members_of(found.box, len(found.codes), -1)
        device = self.x.device
        return torch.arange(bottleneck.width, device=device)[None], torch.arange(groups.count, device=device)[None]

    @cached_property
    def shared(self) -> dict[Bottleneck, bool]:
        """True for a bottleneck on which the outputs of all samples depend in the same way, as one vector tells."""
        w = uniform(self.x.numel() // self.n, 0).to(self.x).expand(self.n, -1).reshape(self.x.shape)
        slopes = torch.autograd.grad(self.x, [b.x for b in self.at], w, retain_graph=True)
        rows = [(b, b.exposed(g)) for b, g in zip(self.at, slopes, strict=True)]
        apart = {b: ((g - g[:1]).abs().amax(), 16 * torch.finfo(g.dtype).eps * g.abs().amax()) for b, g in rows}
        return {b: bool(most <= rounding) for b, (most, rounding) in apart.items()}

    # Sites

    def _layout(self, leaf: int) -> torch.Tensor | None:
        """The entries at each position of the only use of a parameter, `[outs, positions]`; None if it has none."""
        use = self.of[leaf][0]
        if len(self.of[leaf]) > 1 or (self.shortcuts == "positions" and use.node.leaf is None):
            return None
        found = self.look.layouts.get(next(i for i, u in enumerate(self.run.uses) if u is use))
        alone = found is not None and found.shape[1] == 1
        return None if alone and use.node.kind is DERIVED else found  # entries may be of one entry of the parameter

    @cached_property
    def sizes(self) -> list[int]:
        """The number of entries that come out at each site for a sample."""
        found = [0] * (max(self.numbers, default=-1) + 1)
        for use, s in zip(self.run.uses, self.numbers, strict=True):
            numbers = use.count or (use.edge.numel() if isinstance(use.edge, torch.Tensor) else use.shape.numel())
            found[s] = max(1, numbers // self.n)
        return found

    @cached_property
    def work(self) -> list[float]:
        """The multiplications for a column of a sample at each site: once through it, once for its share."""
        work = [0.0] * len(self.sizes)
        for use, s, p in zip(self.run.uses, self.numbers, self.positions, strict=True):
            work[s] += 2.0 * max(self.sizes[s], p * use.shape.numel())
        return work

    @cached_property
    def positions(self) -> list[int]:
        """At how many positions each use meets what comes out for a sample."""
        found = []
        for use, s in zip(self.run.uses, self.numbers, strict=True):
            size, outs = self.sizes[s], 1
            if isinstance(use, ProductUse):
                outs = math.prod(use.shape[i] for dims in use.of_w[:2] for i in dims)
            elif isinstance(use, Expanded):
                outs = min(size, use.shape.numel())
            found.append(size // max(1, outs))
        return found

    @cached_property
    def all_cost(self) -> float:
        """The estimated cost of pulling back every column."""
        return self.total * (self.n * sum(self.work) + thresholds.COLUMN)

    @cached_property
    def closed(self) -> frozenset[int] | None:
        """The parameters of the last site, if what is wanted of them follows from the Hessian.

        So it is if each entry there reaches one output, and those in a row of the parameter have different groups;
        for factors, if those that are coupled at a position are of one group.
        """
        top = max(self.everything)
        own = [i for i, found in self.sites.items() if top in found]
        layouts = [self._layout(i) for i in own]
        if self.shortcuts == "positions" and not all(map(self._factored, own)):
            return None
        if self.last is None or self.groups.diagonal() is None or any(self.sites[i] != {top} for i in own):
            return None
        rows = self.look.labels_of(self.look.output, self.last.root)
        ids, some = self.groups.ids, rows[1, 0] > NONE
        entry, group = rows[1, 0][some].long(), torch.full_like(self.last.boxes[top][0, 0], -1, dtype=torch.long)
        if not torch.equal(-rows[0], rows[1]) or len(entry.unique()) < len(entry):
            return None
        group[entry] = ids[some]
        for entries in layouts:
            if entries is None:
                return None
            met = group[entries]  # [outs, positions]
            if self.shortcuts == "positions":
                if self.groups.coupling() is not None and bool(((met >= 0) & (met != met.amax(0))).any()):
                    return None
                continue
            alone = torch.where(met < 0, -1 - torch.arange(met.shape[1], device=met.device), met).sort(1).values
            if bool((alone[:, 1:] == alone[:, :-1]).any()):
                return None
        return frozenset(own)

    def _factored(self, leaf: int) -> bool:
        """True for a parameter that is read as it is, or transposed, as a matrix or a vector."""
        use = self.of[leaf][0]
        vector = isinstance(use, Expanded) and sum(size != 1 for size in use.view or use.shape) < 2
        return use.node.kind in (LEAF, SWAP) and (vector or isinstance(use, ProductUse))

    # Taking a way

    def taken(self, way: Shortcut, reduce: Reduce) -> bool:
        """Reduce all parameters; False, before anything is reduced, if columns at a bottleneck cannot be had."""
        if any(stage.end is not None and stage.end.triangles is None for stage in way.stages):
            return False
        if way.closed:
            diagonal = self.groups.diagonal()
            assert diagonal is not None
            squares, beside = self.shortcuts == "all", self.groups.coupling()
            columns = diagonal[None] if squares or beside is None else torch.stack([diagonal, beside])
            self.run.of_hessian = not squares
            for leaf, shares in self._pulled(self.x, columns, way.closed):
                reduce(leaf, Told(shares, None, 1) if squares else shares)
            self.run.of_hessian = False
        for stage in way.stages:
            for reach in stage.reaches:
                if reach.colouring is None:
                    self._every(stage.groups, stage.x, reach.leaves, reduce)
                else:
                    self._shared(stage.groups, stage.x, reach, reduce)
        if way.dense:
            self._every(self.groups, self.x, way.dense, reduce)
        return True

    def _pulled(self, x: torch.Tensor, columns: torch.Tensor, leaves: frozenset[int]) -> Iterator[tuple[int, Shares]]:
        """The shares of some parameters, of columns `[V, n, entries]` at a tensor."""
        own = {id(u): u for i in leaves for u in self.of[i]}
        for use in self.run.uses:
            use.d = None
        whole, self.run.uses = self.run.uses, [*own.values()]
        try:
            with torch.enable_grad():
                self.run.pull_columns(x, self._at(x, columns).to(x.dtype))
        finally:
            self.run.uses = whole
        for leaf in sorted(leaves):
            if uses := [u for u in self.of[leaf] if u.d is not None]:
                yield leaf, Shares(self.run, leaf, uses, self.problem.name, leaf in self.seen)
                self.seen.add(leaf)

    def _at(self, x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        """Columns `[V, n, entries]` in the shape of a tensor."""
        if x is self.x:
            return columns.reshape(len(columns), *x.shape)
        bottleneck = next(b for b in self.at if b.x is x)
        return bottleneck.restored(columns)

    def _every(self, groups: Groups, x: torch.Tensor, leaves: frozenset[int], reduce: Reduce) -> None:
        """Pull all columns back one by one."""
        count, most = groups.rank * groups.count, max(1, thresholds.GROUPED // max(1, self.run.numbers))
        for a, b in even(count, most):
            for leaf, shares in self._pulled(x, groups.block(a, b), leaves):
                reduce(leaf, shares)

    def _shared(self, groups: Groups, x: torch.Tensor, reach: Reach, reduce: Reduce) -> None:
        """Pull columns of several groups back together, and tell them apart at each parameter."""
        colouring, frame = reach.colouring, reach.frame
        assert colouring is not None and frame is not None
        if not colouring.count or not groups.rank:
            return
        ids = groups.ids
        klass, copy = (torch.where(ids < 0, -1, of[ids]) for of in (colouring.klass, colouring.copy))
        largest = max(self.sizes[s] for s in self._touched(reach.leaves)) * self.n
        most, width = max(1, thresholds.TOGETHER // largest), colouring.copies * groups.rank
        cells: dict[int, Callable[[range], torch.Tensor]] = {}
        if width <= most:
            ranges = [(range(a, b), 0, groups.rank) for a, b in even(colouring.count, most // width)]
        else:
            each = even(groups.rank, max(1, most // colouring.copies))
            ranges = [(range(k, k + 1), a, b) for a, b in each for k in range(colouring.count)]
        for some, a, b in ranges:
            layer, copies = groups.layer(a, b), colouring.copies_in(some)
            masks = torch.stack([(klass == k) & (copy == c) for k in some for c in range(copies)])
            columns = (layer * masks[:, None, None].to(layer.dtype)).flatten(0, 1)
            for leaf, shares in self._pulled(x, columns, reach.leaves):
                layout = self._layout(leaf)
                assert layout is not None
                if self.shortcuts == "positions" or layout.shape[1] == 1:
                    reduce(leaf, shares)
                    continue
                if leaf not in cells:
                    (site,) = self.sites[leaf]
                    cells[leaf] = colouring.placed(frame.boxes[site][:, :, layout[0]])
                index = positions_of(cells[leaf](some))
                each_alone = index.shape == (1, layout.shape[1], 1)  # all positions, in any order
                reduce(leaf, Told(shares, None if each_alone else index, copies * (b - a)))
