"""The places of factors in a parameter: the dims that each of them is over, read off from its entries."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

Axes = Sequence[int]
"""Some of the axes of a tensor that says for each combination of labels which entry of a parameter it is."""


class Unfactored(Exception):
    """Raised for a parameter that has no Kronecker factors; says why."""


PART = "it is read in a part that is not a product of its dimensions"


@dataclass
class Place:
    """The place of a factor in its parameter: the dims it is over, and its entries among theirs."""

    dims: tuple[int, ...]
    size: int
    at: torch.Tensor | None = None
    """Places among the entries of the dims; None for all in their order."""

    @property
    def covered(self) -> float:
        """The fraction of the entries that are read."""
        return 1.0 if self.at is None else len(self.at) / max(1, self.size)

    def spread(self, x: torch.Tensor, dim: int) -> torch.Tensor:
        """Entries of the factor along a dim as entries of the dims."""
        if self.at is None:
            return x
        shape = list(x.shape)
        shape[dim] = self.size
        return x.new_zeros(shape).index_add(dim, self.at, x)


@dataclass
class FactorGrid:
    """The places of the factors, and into how many parts of its own factors each dim is divided, if it is."""

    places: list[Place]
    blocks: tuple[int, ...] | None = None


def grid(entries: torch.Tensor, shape: torch.Size, factors: Sequence[Axes], shared: Axes) -> FactorGrid:
    """Each factor is over the dims that its axes count; the `shared` axes count blocks that all of them have.

    Raises Unfactored where the entries are not such a product.
    """
    if not entries.numel() or bool((entries < 0).any()):
        raise Unfactored(PART)
    divided = _Divided.of(entries, shape, shared)
    found = _flat([b * n for b, n in zip(divided.blocks, divided.part, strict=True)], shape, entries)
    places = []
    for axes, dims in zip(factors, divided.among(factors, entries), strict=True):
        local = [_along(c, axes) if d in dims else torch.zeros_like(found) for d, c in enumerate(divided.inside)]
        found = found + _flat(local, shape, entries)
        sizes = [divided.part[d] for d in dims]
        at = _flat([local[d] for d in dims], sizes, _along(entries, axes)).flatten()
        places.append(Place(tuple(dims), math.prod(sizes), None if _in_order(at, math.prod(sizes)) else at))
    number = _flat(divided.blocks, divided.counts, _along(entries, shared)).flatten()
    if not torch.equal(found, entries) or not _in_order(number, math.prod(divided.counts)):
        raise Unfactored(PART)
    return FactorGrid(places, tuple(divided.counts) if math.prod(divided.counts) > 1 else None)


@dataclass
class _Divided:
    """Entries of a parameter whose dims are divided into blocks: in which they are along each dim, and where in it."""

    blocks: list[torch.Tensor]
    inside: list[torch.Tensor]
    counts: list[int]
    """Number of blocks of each dim."""
    part: list[int]
    """Length of a block in each dim."""

    @classmethod
    def of(cls, entries: torch.Tensor, shape: torch.Size, shared: Axes) -> _Divided:
        coordinates = torch.unravel_index(entries, shape) if shape else ()
        counts = [len(_along(c, shared).unique()) for c in coordinates]
        part = [max(1, size // n) for size, n in zip(shape, counts, strict=True)]
        blocks = [_along(c, shared) // n for c, n in zip(coordinates, part, strict=True)]
        return cls(blocks, [c % n for c, n in zip(coordinates, part, strict=True)], counts, part)

    def among(self, factors: Sequence[Axes], entries: torch.Tensor) -> list[list[int]]:
        """The dims of each factor: those along which its axes lead."""
        dims = [[d for d, c in enumerate(self.inside) if len(_along(c, axes).unique()) > 1] for axes in factors]
        for d, size in enumerate(self.part):
            if not any(d in some for some in dims):
                dims[_owner(entries, factors, dims, size)].append(d)
        return [sorted(some) for some in dims]


def _owner(entries: torch.Tensor, factors: Sequence[Axes], dims: list[list[int]], size: int) -> int:
    """The factor that has a dim of which one coordinate is read: the one that is over nothing so far."""
    empty = [k for k, axes in enumerate(factors) if _along(entries, axes).numel() == 1 or (size == 1 and not dims[k])]
    if size > 1 and not empty:
        raise Unfactored(PART)
    return next((k for k in empty if not dims[k]), empty[0]) if empty else len(factors) - 1


def _in_order(numbers: torch.Tensor, count: int) -> bool:
    """Tells whether they are all numbers below the count, from the first to the last."""
    return torch.equal(numbers, torch.arange(count, device=numbers.device))


def _along(x: torch.Tensor, axes: Axes) -> torch.Tensor:
    """A tensor restricted to the first entry of all other axes."""
    return x[tuple(slice(None) if d in axes else slice(0, 1) for d in range(x.ndim))]


def _flat(coordinates: Sequence[torch.Tensor], shape: Sequence[int], like: torch.Tensor) -> torch.Tensor:
    """The numbers of entries with these coordinates."""
    found = torch.zeros_like(like)
    for c, size in zip(coordinates, shape, strict=True):
        found = found * size + c
    return found


@dataclass
class RowLayout:
    """The layout of entries in the rows of a parameter: the axes along a row, the place in it, and the row."""

    along: list[int]
    place: Place
    picked: torch.Tensor
    """The row at all combinations of the other axes; one behind the last where there is none."""


def rows(entries: torch.Tensor, count: int, width: int) -> RowLayout:
    """The layout of entries, given by their numbers in a parameter `[count, width]`, in its rows; -1 is no entry."""
    read = entries >= 0
    column, row = torch.where(read, entries % width, -1), torch.where(read, entries // width, -1)
    along = [d for d in range(entries.ndim) if bool((column.amax(d) > torch.where(read, column, width).amin(d)).any())]
    others = [d for d in range(entries.ndim) if d not in along]
    at = column.amax(others) if others else column
    picked = row.amax(along) if along else row
    order = torch.tensor([*others, *along]).argsort().tolist()
    whole = picked.reshape([*picked.shape, *[1] * len(along)])
    whole = torch.where(whole < 0, -1, whole * width + at).permute(order)
    at = at.flatten()
    if not torch.equal(whole, entries) or len(at.unique()) < len(at):
        raise Unfactored(PART)
    at = None if _in_order(at, width) else at
    return RowLayout(along, Place((), width, at), torch.where(picked < 0, count, picked))
