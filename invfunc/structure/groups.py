"""Columns in groups, which boxes of coordinates tell apart.

Entries of the outputs that the loss couples, such as the classes of a pixel, belong to one group. Columns of different
groups are zero where the other is not, so one cotangent can hold one column of every group. The entries of a sample are
flat: `[n, M]`. A box is two rows for each axis, `-lo` and `hi` (`[2, k, ...]`, so that a hull is a maximum), `-inf`
where it is empty: boxes say which groups can share a pass, and to which of them a position belongs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Protocol

import torch

from invfunc import thresholds
from invfunc.loss.square_root import Columns, Elementwise, Softmax, Weighted, safe_root

Some = torch.Tensor | slice
"""The numbers of some groups, or of all."""


class Groups(Protocol):
    """A square root S of the Hessian of each sample, group by group."""

    rank: int
    """The number of columns of a group."""
    rows: int
    """The number of rows that `products` gives for a group."""
    count: int
    alike: bool
    """True if the columns of all samples are equal."""
    ids: torch.Tensor
    """The group of each entry, `[M]`; -1 for an entry that no column reaches."""

    def layer(self, start: int, stop: int) -> torch.Tensor:
        """Columns `start` to `stop` of every group at once: `[V, n, M]`."""
        ...

    def block(self, start: int, stop: int) -> torch.Tensor:
        """Columns among all, group by group, which are zero outside of their group: `[V, n, M]`."""
        ...

    def diagonal(self) -> torch.Tensor | None:
        """The root of the diagonal of the Hessian, `[n, M]`, where it is known without the columns."""
        ...

    def coupling(self) -> torch.Tensor | None:
        """The u, `[n, M]`, with which the part of a group is `-u u^T` beside that diagonal; None where it is zero."""
        ...

    def entries(self, some: Some) -> Some:
        """The entries that belong to some groups, group by group."""
        ...

    def products(self, moved: torch.Tensor, some: Some, part: slice) -> torch.Tensor:
        """`S^T u` of directions `[d, n, entries]`, those of some groups, for some samples: `[n, groups, rows, d]`.

        The rows of a group are those of any square root of its part of the Hessian.
        """
        ...


class OfEntries(Groups):
    """A diagonal Hessian: each entry is a group with one column."""

    rank = rows = 1

    def __init__(self, inner: Elementwise) -> None:
        self.inner, self.count = inner, inner.count
        h = inner.diagonal.flatten(1)
        self.root, self.alike = safe_root(h), bool((h == h[:1]).all())
        self.ids = torch.arange(self.count, device=h.device)

    def layer(self, start: int, stop: int) -> torch.Tensor:
        return self.root[None]

    def block(self, start: int, stop: int) -> torch.Tensor:
        return torch.where(self.ids[start:stop, None, None] == self.ids, self.root, 0)

    def diagonal(self) -> torch.Tensor:
        return self.root

    def coupling(self) -> None:
        return None

    def entries(self, some: Some) -> Some:
        return some

    def products(self, moved: torch.Tensor, some: Some, part: slice) -> torch.Tensor:
        return (moved * self.root[part, some]).permute(1, 2, 0).unsqueeze(2)


class OfPositions(Groups):
    """A softmax at each position: the classes there are a group."""

    alike = False

    def __init__(self, inner: Softmax, shape: torch.Size) -> None:
        """`shape` is that of the outputs, of all samples."""
        self.inner, logits = inner, inner.logits
        n, self.rows, self.count = logits.shape
        self.rank = self.rows - 1
        self.roots = (logits.log_softmax(1) / 2).exp()
        self.scale = safe_root(inner.weight)[:, None]
        # the entries lie as [more, C, rest], where `more` and `rest` are the positions
        self.rest = shape[2:].numel()
        at = torch.arange(self.count, device=logits.device).view(-1, 1, self.rest)
        self.ids = at.expand(-1, self.rows, -1).flatten()

    def laid(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., C, positions]` as `[..., M]`."""
        return x.unflatten(-1, (-1, self.rest)).transpose(-3, -2).flatten(-3)

    def layer(self, start: int, stop: int) -> torch.Tensor:
        q = self.roots
        units = torch.eye(self.rows, dtype=q.dtype, device=q.device)[start:stop, :, None]
        found = [Softmax.columns(q, unit, q[:, v : v + 1]) * self.scale for v, unit in enumerate(units, start)]
        return self.laid(torch.stack(found))

    def block(self, start: int, stop: int) -> torch.Tensor:
        found = Weighted(self.inner).block(start, stop, slice(None)).left[0]
        return found.reshape(stop - start, len(self.roots), -1)

    def diagonal(self) -> torch.Tensor:
        q = self.roots
        p = q.square()
        largest = torch.zeros_like(p).scatter(1, p.argmax(1, keepdim=True), 1)
        others = torch.where(largest > 0, (p * (1 - largest)).sum(1, keepdim=True), 1 - p)  # 1 - p near 1 cancels
        return self.laid(q * safe_root(others) * self.scale)

    def coupling(self) -> torch.Tensor:
        return self.laid(self.roots.square() * self.scale)

    def entries(self, some: Some) -> Some:
        numbers = torch.arange(len(self.ids), device=self.ids.device).view(-1, self.rows, self.rest)
        return numbers.transpose(1, 2).flatten(0, 1)[some].flatten()

    def products(self, moved: torch.Tensor, some: Some, part: slice) -> torch.Tensor:
        q, scale = (x[part][:, :, some].mT.unsqueeze(3) for x in (self.roots, self.scale))  # [n, groups, C, 1]
        u = moved.unflatten(2, q.shape[1:3]).permute(1, 2, 3, 0)
        centred = u - (q.square().mT.to(u.dtype) @ u)
        return centred.mul_((q * scale).to(u.dtype))  # in its own memory, as there may be many classes


def grouped(columns: Columns, shape: torch.Size) -> Groups | None:
    """The columns of a criterion in groups; `shape` is that of the outputs."""
    inner: Any = columns.inner if isinstance(columns, Weighted) else columns
    if isinstance(inner, Elementwise):
        return OfEntries(replace(inner, diagonal=inner.diagonal.flatten(1)))
    return OfPositions(inner, shape) if isinstance(inner, Softmax) else None


def hulls(rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The hull `[2, k, Q]` of the boxes of the entries of each group, of `[2, k, *one]` and `[*one]`."""
    count, flat = int(groups.max()) + 1, groups.flatten()
    found = rows.new_full((*rows.shape[:2], max(1, count)), -torch.inf)
    some = flat >= 0
    index = flat[some].expand(*rows.shape[:2], -1)
    return found.scatter_reduce(2, index, rows.flatten(2)[:, :, some], "amax")


def empty(rows: torch.Tensor) -> torch.Tensor:
    """True for a box that depends on nothing, `[...]`."""
    return (rows == -torch.inf).any(0).any(0)


_FAR = 2**24
"""Above every coordinate, so that two of them are one number."""


def _numbered(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The different entries in their order, and which of them each is."""
    ordered, order = x.sort()
    unique, of = ordered.unique_consecutive(return_inverse=True)
    return unique, torch.empty_like(order).scatter(0, order, of.to(order.dtype))


@dataclass
class Intervals:
    """The intervals of one axis, of which those of one colour are disjoint."""

    lo: torch.Tensor
    hi: torch.Tensor
    of: torch.Tensor
    """The interval of each box."""
    colour: torch.Tensor
    """The colour of each interval."""

    @property
    def count(self) -> int:
        return int(self.colour.max()) + 1 if len(self.colour) else 0

    @classmethod
    def along(cls, lo: torch.Tensor, hi: torch.Tensor) -> Intervals:
        """Colour intervals greedily from left to right, which takes as few colours as possible."""
        code, of = _numbered(lo.long() * _FAR + hi.long())
        first = torch.empty_like(code, dtype=torch.long).scatter(0, of, torch.arange(len(lo), device=lo.device))
        lo, hi = lo[first], hi[first]
        last: list[float] = []
        colour = []
        for start, stop in zip(lo.tolist(), hi.tolist(), strict=True):
            free = next((c for c, end in enumerate(last) if end < start), len(last))
            last[free : free + 1] = [stop]
            colour.append(free)
        return cls(lo, hi, of, torch.tensor(colour, device=lo.device, dtype=torch.long))

    def holding(self, colour: int, lo: torch.Tensor, hi: torch.Tensor) -> torch.Tensor:
        """The interval of a colour in which others lie; -1 for none."""
        own = (self.colour == colour).nonzero().flatten()
        at = torch.searchsorted(self.lo[own], lo, right=True) - 1
        place = own[at.clamp(min=0)]
        return torch.where((at >= 0) & (self.hi[place] >= hi), place, -1)


class Colouring:
    """Groups in classes: in a class, boxes are disjoint or equal; equal ones are told apart by their `copy`."""

    def __init__(self, boxes: torch.Tensor) -> None:
        """Colour the boxes `[2, k, Q]` of groups."""
        some = ~empty(boxes)
        lo, hi = -boxes[0][:, some], boxes[1][:, some]
        self.axes = [Intervals.along(a, b) for a, b in zip(lo, hi, strict=True)]
        code = colour = torch.zeros_like(lo[0], dtype=torch.long)
        for axis in self.axes:
            code = code * len(axis.lo) + axis.of
            colour = colour * axis.count + axis.colour[axis.of]
        self.codes, box = _numbered(code)
        """The codes of the different boxes."""
        self.colours, klass = _numbered(colour)
        """The colours of the classes."""
        sizes = torch.bincount(box, minlength=len(self.codes))
        order = box.argsort(stable=True)
        copy = torch.empty_like(box)
        copy[order] = torch.arange(len(box), device=box.device) - (sizes.cumsum(0) - sizes)[box[order]]
        self.klass, self.copy, self.box = (box.new_full((boxes.shape[2],), -1) for _ in range(3))
        """The class, the copy and the box of each group; -1 for a group without influence."""
        self.klass[some], self.copy[some], self.box[some] = klass, copy, box

    @property
    def count(self) -> int:
        return len(self.colours)

    @property
    def copies(self) -> int:
        """The most groups that have the same box."""
        return int(self.copy.max()) + 1 if len(self.copy) else 0

    @property
    def passes(self) -> int:
        """The number of columns that hold one column of every group."""
        most = torch.zeros(self.count, dtype=torch.long, device=self.klass.device)
        some = self.klass >= 0
        return int(most.scatter_reduce(0, self.klass[some], self.copy[some] + 1, "amax").sum())

    def copies_in(self, classes: range) -> int:
        """The same in some classes."""
        return int(self.copy[(self.klass >= classes.start) & (self.klass < classes.stop)].max()) + 1

    @cached_property
    def members(self) -> torch.Tensor:
        """The group of each box and copy, `[boxes, copies]`; 0 where there is none."""
        found, some = self.box.new_zeros(len(self.codes), self.copies), self.box >= 0
        found[self.box[some], self.copy[some]] = some.nonzero().flatten()
        return found

    def placed(self, rows: torch.Tensor) -> Placed:
        """The places of boxes `[2, k, P]` among those of the groups."""
        inside, along = rows[1, 0] > -torch.inf, []
        for axis, a, b in zip(self.axes, -rows[0], rows[1], strict=True):
            code, of = _numbered(torch.where(inside, a.long() * _FAR + b.long(), 0))
            first = torch.empty_like(code, dtype=torch.long).scatter(0, of, torch.arange(len(of), device=of.device))
            a, b = a[first], b[first]
            along.append((torch.stack([axis.holding(c, a, b) for c in range(axis.count)]), of))
        return Placed(self, inside, along)


@dataclass
class Placed:
    """Boxes among those of a colouring."""

    colouring: Colouring
    inside: torch.Tensor
    """True for those that depend on anything, `[P]`."""
    along: list[tuple[torch.Tensor, torch.Tensor]]
    """Along each axis, the interval of each colour in which the different ones lie, -1 for none, and which of these
    each is."""

    def cells(self, wanted: range) -> torch.Tensor:
        """The box of the groups of some classes that each lies in: `[classes, P]`; -1 for none."""
        if self.colouring.count * len(self.inside) <= thresholds.KEPT_READ:
            return self._all[wanted.start : wanted.stop]
        return self._cells(wanted)

    @cached_property
    def _all(self) -> torch.Tensor:
        return self._cells(range(self.colouring.count))

    def _cells(self, wanted: range) -> torch.Tensor:
        codes, colours = self.colouring.codes, self.colouring.colours[wanted.start : wanted.stop]
        own: list[torch.Tensor] = []
        for axis in reversed(self.colouring.axes):
            own.insert(0, colours % axis.count)
            colours = colours // axis.count
        code, within = torch.zeros((), dtype=torch.long, device=codes.device), self.inside
        for axis, c, (holding, of) in zip(self.colouring.axes, own, self.along, strict=True):
            intervals = holding[c][:, of]
            code = code * len(axis.lo) + intervals.clamp(min=0)
            within = within & (intervals >= 0)
        at = torch.searchsorted(codes, code).clamp(max=len(codes) - 1)
        return torch.where(within & (codes[at] == code), at, -1)


def positions_of(cells: torch.Tensor) -> torch.Tensor:
    """The positions in each cell, `[classes, C, r]`, from the cell of each position `[classes, P]`; P is padding."""
    count, p = cells.shape
    width = int(cells.max()) + 1
    flat = torch.where(cells >= 0, torch.arange(count, device=cells.device)[:, None] * width + cells, count * width)
    code, order = flat.flatten().sort(stable=True)
    used = code < count * width
    code, order = code[used], order[used]
    unique, of, sizes = code.unique_consecutive(return_inverse=True, return_counts=True)
    within = torch.arange(len(code), device=code.device) - (sizes.cumsum(0) - sizes)[of]
    klass = unique // width
    per_class = torch.bincount(klass, minlength=count)
    number = torch.arange(len(unique), device=code.device) - (per_class.cumsum(0) - per_class)[klass]
    index = cells.new_full((count, max(1, int(per_class.max())), max(1, int(sizes.max()) if len(sizes) else 1)), p)
    index[klass[of], number[of], within] = order % p
    return index


def members_of(of: torch.Tensor, count: int, filling: int) -> torch.Tensor:
    """The members of each of several sets, `[count, most]`, given the set of each; -1 is in none."""
    order = of.argsort(stable=True)
    order = order[of[order] >= 0]
    sizes = torch.bincount(of[order], minlength=count)
    within = torch.arange(len(order), device=of.device) - (sizes.cumsum(0) - sizes)[of[order]]
    found = of.new_full((count, max(1, int(sizes.max()))), filling)
    found[of[order], within] = order
    return found
