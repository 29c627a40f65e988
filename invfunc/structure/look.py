"""A look at a function on one sample, and squares of columns that are told apart by what it tells: what the outputs
depend on at each use of a parameter.

A site is a place where parameters meet samples: the uses with one edge of the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F

from invfunc import thresholds
from invfunc._torch.functorch import undispatched, unwatched
from invfunc.core.columns import Finder, lost, marked_for, split
from invfunc.core.marks import DERIVED, Known, Node
from invfunc.core.run import Run
from invfunc.core.shares import Shares
from invfunc.core.uses import WHOLE, Block, Expanded, ProductUse, TableRows, Use
from invfunc.linear_algebra.contract import joined, summed
from invfunc.problem import BoundProblem
from invfunc.structure.labels import NONE, LabelRows, Labels, coordinates, core


def sites_of(uses: Sequence[Use]) -> list[int]:
    """The site of each use."""
    numbers: dict[int, int] = {}
    return [numbers.setdefault(id(u.edge), len(numbers)) for u in uses]


def sent(use: Use, run: Run, block: Block = WHOLE, read: bool = True) -> torch.Tensor | None:
    """The cotangent of a use position by position, `[V, n, g, p, o]`; None if it has no positions.

    With `read`, that of a scale is multiplied with what it scales.
    """
    if isinstance(use, ProductUse):
        return use.sends(run, block)
    if isinstance(use, TableRows):
        d = use.sent(run, block)
        return d.reshape(*d.shape[:2], 1, -1, use.shape[1:].numel())
    if not isinstance(use, Expanded):
        return None
    view, at = use.view or use.shape, use.axis[0]
    if run.n > 1 and -at <= len(view) and view[at] != 1:
        return None  # it has an entry for each sample
    s = use.sent(run, block)
    s = s * use.factor(run, block) if read and use.factor is not None else s
    wide = [i - len(view) for i, size in enumerate(view) if size != 1]
    if any(-i > s.ndim - 2 or s.shape[i] != view[i] for i in wide):
        return None
    s = s.movedim(wide, (*range(-len(wide), 0),)) if wide else s.unsqueeze(-1)
    return s.reshape(*s.shape[:2], 1, -1, use.shape.numel())


@dataclass(eq=False)
class Frame:
    """Labels that start at the first of some sites, of what lies between these and the outputs, and boxes there."""

    root: LabelRows
    sites: frozenset[int]
    first: frozenset[int]
    base: LabelRows
    """The root whose boxes say where several first sites are in relation to each other."""
    hulls: bool = True
    """Tells whether all that meets the parameters at one position gets one box."""
    one: bool = False
    """Tells whether so it does where there is only one position."""
    boxes: dict[int, torch.Tensor] = field(default_factory=dict, init=False)
    """The boxes `[2, k, *one]` by site."""

    def used(
        self, labels: Labels, site: int, out: torch.Tensor, layouts: Sequence[torch.Tensor | None]
    ) -> torch.Tensor:
        """Keep the boxes of what came out where parameters have met samples; returns its new labels."""
        rows = labels.of(out, self.root)
        if rows is None or not bool((core(rows) > NONE).any()):
            rows = self._start(labels, out)
        one = core(rows)  # what depends on nothing labelled may have any label
        rows = torch.where(one == NONE, 0, one).expand(2, self.root.axes, *out.shape)
        for entries in layouts if self.hulls else ():
            if entries is not None and (entries.shape[1] > 1 or self.one):
                rows = _over_outs(rows, entries)
        self.boxes[site] = rows.flatten(2)
        return rows

    def _start(self, labels: Labels, out: torch.Tensor) -> torch.Tensor:
        """Coordinates of the entries, or the centres of what they depend on."""
        base = labels.of(out, self.base) if len(self.first) > 1 else None
        if base is None or self.base.axes != self.root.axes:
            return coordinates(out, self.root.axes)
        hull = base.flatten(2).amax(2).reshape(2, -1, *[1] * out.ndim)
        base = torch.where(base == NONE, torch.where(hull == NONE, 0, hull), base)
        centre = ((base[1] - base[0]) / 2).floor()  # boxes are told apart as whole numbers
        return torch.stack([-centre, centre])


def _over_outs(rows: torch.Tensor, entries: torch.Tensor) -> torch.Tensor:
    """The labels with those of all entries at a position, `[outs, positions]`, replaced by their hull."""
    one = core(rows)
    numbers = torch.arange(one[0, 0].numel(), dtype=torch.int32, device=rows.device).reshape(one.shape[2:])
    numbers = numbers.expand(rows.shape[2:]).flatten()[entries]
    if bool((numbers == numbers[:1]).all()):  # there is one label at each position
        return rows
    flat = rows.reshape(*rows.shape[:2], -1).clone()
    flat[:, :, entries] = flat[:, :, entries].amax(2, keepdim=True).expand(-1, -1, *entries.shape)
    return flat.view(rows.shape)


class StructureLook(Run):
    """A run of one sample, in which labels are followed."""

    output: torch.Tensor
    """The output of the model."""

    def __init__(self, uses: Sequence[Use]) -> None:
        """`uses` are those of all samples."""
        super().__init__(1, deep=False)
        self.labels = Labels()
        self.inputs = self.labels.root(3)
        self.frames: list[Frame] = []
        self.starts: dict[int, LabelRows] = {}
        """The roots that start at what an operation reads, by the number of its first use."""
        self.layouts: dict[int, torch.Tensor | None] = {}
        """The entries of the result of its operation at each position of a use, `[outs, positions]`."""
        self.read, self.edges = dict[int, torch.Tensor](), dict[int, int]()
        self.grown = {i: use for i, use in enumerate(uses) if use.grown}

    def frame(self, sites: frozenset[int], first: frozenset[int], base: LabelRows, **options: bool) -> Frame:
        """Add a frame."""
        axes = 3 if options.get("hulls", True) else 1
        self.frames.append(found := Frame(self.labels.root(axes), sites, first, base, **options))
        return found

    def at(self, use: int) -> LabelRows:
        """Add a root at what an operation reads."""
        return self.starts.setdefault(use, self.labels.root(3))

    def of(self, problem: BoundProblem) -> None:
        """Run the function on the first sample."""
        own = problem.chunk(slice(0, 1), 1)
        self.criterion = None if own.loss is not None else Finder()
        self.alone = False
        leaves = [self.leaf(i, p) for i, p in enumerate(own.leaves)]
        device = own.leaves[0].device.type
        auto = torch.is_autocast_enabled(device)
        kind = torch.get_autocast_dtype(device) if auto else None
        with torch.enable_grad(), marked_for(self.criterion), self.labels:
            with torch.autocast(device, kind, cache_enabled=False) if auto else nullcontext():
                out, _ = own.call(self, leaves)
                out = out if own.loss is None else lost(own, self, out)
        (root,) = split(self, out).roots
        self.output = root.source

    def labels_of(self, x: torch.Tensor, root: LabelRows) -> torch.Tensor:
        """The labels of the entries of a tensor of the run, `[2, k, entries]`."""
        rows = self.labels.of(x, root)
        return x.new_full((2, root.axes, x.numel()), NONE, dtype=torch.float32) if rows is None else rows.flatten(2)

    # In the run

    def samples(self, x: torch.Tensor, axis: Any) -> torch.Tensor:
        with undispatched():
            x = super().samples(x.clone(), axis)
            self.labels.set(x, self.inputs, coordinates(x, self.inputs.axes))
        return x

    def meet(self, func: Any, rule: Any, args: tuple, kwargs: dict, data: list[Known], params: list[Known]) -> Any:
        first = len(self.uses)
        if (root := self.starts.get(first)) is not None:
            self.read[first] = x = data[0][0]
            with undispatched():
                self.labels.set(x, root, coordinates(x, root.axes))
        out = super().meet(func, rule, args, kwargs, data, params)
        met: dict[int, list[int]] = {}
        for i, use in enumerate(self.uses[first:], first):
            met.setdefault(self.edges.setdefault(id(use.edge), len(self.edges)), []).append(i)
        for site, uses in met.items() if isinstance(out, torch.Tensor) else ():
            self._label(site, out, uses)
        return out

    def grown_at(self, node: Node, shape: Any, before: Any) -> int | None:
        use = self.grown.get(len(self.uses))
        return None if use is None or use.node.leaf != node.leaf or -use.axis[0] > len(shape) else use.axis[0]

    def use(self, use: Use, edge: Any, end: bool = True) -> None:
        super().use(use, edge, end)
        site = self.edges.setdefault(id(edge), len(self.edges))
        if use.grown:
            self._label(site, edge, [len(self.uses) - 1])

    def _label(self, site: int, out: torch.Tensor, uses: list[int]) -> None:
        """Keep the boxes of what came out where parameters have met samples, in all frames."""
        with undispatched(), unwatched(), torch.no_grad():
            self.layouts |= {i: self._layout(self.uses[i], out) for i in uses}
            layouts = [self.layouts[i] for i in uses]
            found = {f.root: f.used(self.labels, site, out, layouts) for f in self.frames if site in f.sites}
            if found:
                self.labels.write(out, found)

    def _layout(self, use: Use, out: torch.Tensor) -> torch.Tensor | None:
        """The entries of a result `[outs, positions]` that meet what is read at a position."""
        use.d = torch.arange(out.numel(), device=out.device).reshape(1, *out.shape)
        found = sent(use, self, read=False)
        use.d = None
        return None if found is None or found.numel() != out.numel() else found[0, 0].transpose(1, 2).flatten(0, 1)


class Told(Shares):
    """The squares of one use, whose columns are told apart: `square_sum` is all that there is of it."""

    def __init__(self, shares: Shares, index: torch.Tensor | None, columns: int) -> None:
        """`index [K, C, r]` are the positions in each cell of K classes; the number of all positions is none, and fills
        a cell up. Each class has so many columns. Without an index each position is a cell."""
        self.__dict__.update(shares.__dict__)
        self.index, self.each, self.use = index, columns, shares.uses[0]

    def square_sum(self, each: bool = False) -> torch.Tensor:
        use = self.use
        if isinstance(use, TableRows):
            return self._of_rows(use, each)
        if self.index is None:
            found = (self._of(d, a, each) for d, a in self._positions(use))
            return joined([*found]) if each else summed(found)
        if not each:
            return summed(self._of(d, a, each) for some in self._cells(use) for d, a in some)
        return torch.cat([summed(self._of(d, a, each) for d, a in some) for some in self._cells(use)])

    def _of(self, d: torch.Tensor, a: torch.Tensor | None, each: bool) -> torch.Tensor:
        """The squares of `d [n, S, r, V, g, o]` with `a [n, S, r, g, k]`, of each sample or of all."""
        use, (n, s, r, v, g, o) = self.use, d.shape
        derived = use.node.kind is DERIVED
        if r == 1 and not derived:
            d = d.squeeze(2).square().sum(2)  # [n, S, g, o]
            if a is None:
                return self._pulled(d.sum(1 if each else (0, 1)), each)
            a = a.squeeze(2).square()  # [n, S, g, k]
            if g > 1:
                return self._pulled(torch.einsum(f"nsgo,nsgk->{'n' * each}gok", d, a), each)
            d, a = d[:, :, 0], a[:, :, 0]
            return self._pulled((d.mT @ a)[:, None] if each else (d.flatten(0, 1).T @ a.flatten(0, 1))[None], each)
        d = d.permute(0, 1, 4, 2, 3, 5).reshape(n * s, g, r, v * o)
        rows = d.sum(2) if a is None else d.mT @ a.transpose(2, 3).reshape(n * s, g, r, -1)
        rows = rows.view(n, s, g, v, o, *([] if a is None else [-1]))
        if not derived:
            return self._pulled(rows.square_().sum((1, 3) if each else (0, 1, 3)), each)
        rows = self.pulled(use, self._shaped(rows.movedim(3, 2), 3), 3)
        return rows.square().sum((1, 2) if each else (0, 1, 2))

    def _shaped(self, rows: torch.Tensor, lead: int) -> torch.Tensor:
        """`[..., g, o, k]`, or `[..., 1, o]` of a shift, as what was read."""
        use = self.use
        return use.shaped(rows) if isinstance(use, ProductUse) else rows.reshape(*rows.shape[:lead], *use.shape)

    def _pulled(self, squares: torch.Tensor, each: bool) -> torch.Tensor:
        return self.pulled(self.use, self._shaped(squares, int(each)), int(each))

    def _positions(self, use: Use) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Cotangents and what is read, position by position."""
        run = self.run
        for block in run.blocks([use], use.size(run)):
            d = sent(use, run, block)
            assert d is not None
            a = use.read(run, block) if isinstance(use, ProductUse) else None
            yield d.permute(1, 3, 0, 2, 4).unsqueeze(2), None if a is None else a.transpose(1, 2).unsqueeze(2)

    def _cells(self, use: Use) -> Iterator[Iterator[tuple[torch.Tensor, torch.Tensor | None]]]:
        """Cotangents and what is read in each cell, `[1, S, r, V, g, o]` and `[1, S, r, g, k]`, of each sample."""
        d, index, v = sent(use, self.run), self.index, self.each
        assert d is not None and index is not None
        classes, cells, r = index.shape
        _, n, g, p, o = d.shape
        turned = d.new_zeros(n, p + 1, classes, v, g, o)
        turned[:, :-1].copy_(d.unflatten(0, (classes, v)).permute(2, 4, 0, 1, 3, 5))
        read, k = None, 1
        if isinstance(use, ProductUse):
            found = use.read(self.run)
            k = found.shape[3]
            read = found.new_zeros(n, p + 1, g * k)
            read[:, :-1].copy_(found.transpose(1, 2).flatten(2))
        at = (index * classes + torch.arange(classes, device=d.device)[:, None, None]).flatten(0, 1)
        size = g * (v * o * k + r * (v * o + k))
        step = max(1, thresholds.CACHE.get(d.device.type, thresholds.ELSEWHERE) // thresholds.SHARES // size)

        def of(i: int) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
            for s in range(0, classes * cells, step):
                own = turned[i].flatten(0, 1).index_select(0, at[s : s + step].flatten())
                some = index.flatten(0, 1)[s : s + step].flatten()
                a = None if read is None else read[i].index_select(0, some).view(1, -1, r, g, k)
                yield own.view(1, -1, r, v, g, o), a

        return (of(i) for i in range(n))

    def _of_rows(self, use: TableRows, each: bool) -> torch.Tensor:
        """The squares of a table: each cell picks some of its rows."""
        i, d = use.parts(self.run)  # [n, p], [K V, n, p, dim]
        n, p = i.shape
        cells = torch.arange(p, device=i.device).view(1, p, 1) if self.index is None else self.index
        classes, count, _ = cells.shape
        i = F.pad(i, (0, 1))[:, cells]  # [n, K, C, r]
        d = F.pad(d, (0, 0, 0, 1)).unflatten(0, (classes, self.each))
        d = torch.stack([x[:, :, at] for x, at in zip(d, cells, strict=True)]).permute(2, 0, 3, 4, 1, 5)
        number = torch.arange(n * classes * count, device=i.device).view(n, classes, count, 1)
        key, place = (number * use.shape[0] + i).flatten().unique(return_inverse=True)
        sums = d.new_zeros(len(key), *d.shape[4:]).index_add(0, place, d.flatten(0, 3)).square().sum(1)
        row = key % use.shape[0]
        if each:
            row = row + key // (use.shape[0] * classes * count) * use.shape[0]
        total = sums.new_zeros((n if each else 1) * use.shape[0], sums.shape[-1]).index_add(0, row, sums)
        total = total.view(*([n] if each else []), *use.shape)
        return self.pulled(use, total, int(each))
