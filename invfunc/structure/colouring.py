"""Boxes of coordinates: which groups of columns can share a pass, and to which of them a position belongs.

A box is two rows for each axis, `-lo` and `hi` (`[2, k, ...]`, so that a hull is a maximum), `-inf` where it is empty.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch

from invfunc import thresholds


def hulls(rows: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """The hull `[2, k, Q]` of the boxes of the entries of each group, of `[2, k, *one]` and `[*one]`."""
    count, flat = int(groups.max()) + 1, groups.flatten()
    found = rows.new_full((*rows.shape[:2], max(1, count)), -torch.inf)
    some = flat >= 0
    index = flat[some].expand(*rows.shape[:2], -1)
    return found.scatter_reduce(2, index, rows.flatten(2)[:, :, some], "amax")


def empty(rows: torch.Tensor) -> torch.Tensor:
    """Whether a box depends on nothing, `[...]`."""
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
        """How many groups have the same box, at most."""
        return int(self.copy.max()) + 1 if len(self.copy) else 0

    @property
    def passes(self) -> int:
        """How many columns hold one column of every group."""
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
        """Where the boxes `[2, k, P]` lie among those of the groups."""
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
    """Which of them depend on anything, `[P]`."""
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
