"""The memory of tensors with labels: for each element of a storage, the box of root coordinates it can depend on."""

from __future__ import annotations

import math
import weakref
from collections.abc import Sequence
from typing import Any

import torch

from invfunc._torch.functorch import memory_of, storage_of

NONE = -math.inf
"""The label of what depends on no root."""


class Region:
    """One storage and its labels, `[rows, *shape]` of a contiguous tensor that fills it; a larger label is wider.

    Along a dimension in which all labels are the same they are there once.
    """

    __slots__ = ("memory", "itemsize", "count", "shape", "rows", "affine", "owned", "blurred")

    def __init__(self, x: torch.Tensor, rows: torch.Tensor, shape: Sequence[int]) -> None:
        self.memory: Any = None
        self.itemsize = x.element_size()
        self.count = memory_of(x).nbytes() // self.itemsize
        self.shape, self.rows = torch.Size(shape), core(rows)
        self.affine = False  # whether all elements are affine in the roots
        self.owned = False  # whether no other region has the same rows
        self.blurred = False  # whether all elements share one label

    @classmethod
    def blank(cls, x: torch.Tensor, height: int) -> Region:
        """A region for the memory of x in which nothing has a label yet."""
        region = cls(x, blank(x, (height, 1)), [memory_of(x).nbytes() // x.element_size()])
        region.owned = True
        return region

    @classmethod
    def holding(cls, x: torch.Tensor, rows: torch.Tensor) -> Region:
        """A region for a new tensor x, with labels that broadcast to `[rows, *x.shape]`."""
        if _fills(x, memory_of(x).nbytes()):
            return cls(x, core(rows).contiguous(), x.shape)
        region = cls.blank(x, rows.shape[0])
        region.write(x, rows)
        return region

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The labels `[rows, *x.shape]` of a tensor in this memory."""
        self._fit(x)
        if self.blurred:
            return self.rows.view(-1, *[1] * x.ndim).expand(-1, *x.shape)
        if x.shape == self.shape and x.is_contiguous() and not x.storage_offset():
            return self.rows.expand(-1, *x.shape)
        return _view(self._flat(), x)

    def write(self, x: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Put labels in the place of those that a tensor in this memory had; None: it depends on nothing."""
        self._fit(x)
        if rows is None:
            rows = blank(self.rows, (1, *[1] * x.ndim)).expand(len(self.rows), *[1] * x.ndim)
        if _fills(x, self.count * self.itemsize) and not self.blurred:
            self.rows, self.shape, self.owned = core(rows).clone(), x.shape, True
            return
        rows = rows.expand(rows.shape[0], *x.shape)
        if self.blurred:
            self.rows, self.owned = self.rows if self.owned else self.rows.clone(), True
            if rows.numel():
                torch.maximum(self.rows, rows.flatten(1).amax(1, keepdim=True), out=self.rows)
            return
        flat = self._flat()
        alone = self.owned and flat.data_ptr() == self.rows.data_ptr() and flat.shape == self.rows.shape
        self.rows, self.shape, self.owned = flat if alone else flat.clone(), torch.Size([self.count]), True
        x, rows = _unexpanded(x, rows)
        _view(self.rows, x).copy_(rows)

    def _flat(self) -> torch.Tensor:
        """`[rows, elements]`"""
        return self.rows.expand(-1, *self.shape).contiguous().view(len(self.rows), -1)

    def _fit(self, x: torch.Tensor) -> None:
        """Adapt to a storage that has grown, or is read as elements of another size."""
        if x.element_size() != self.itemsize:
            self._blur()
        count = memory_of(x).nbytes() // self.itemsize
        if count > self.count and not self.blurred:
            self.rows = torch.cat([self._flat(), blank(self.rows, (self.rows.shape[0], count - self.count))], 1)
            self.count, self.shape, self.owned = count, torch.Size([count]), True

    def _blur(self) -> None:
        if not self.blurred:
            rows = self.rows.flatten(1)
            self.rows = rows.amax(1, keepdim=True) if self.count else blank(rows, (rows.shape[0], 1))
            self.shape, self.owned, self.blurred = torch.Size([self.count]), True, True


class Regions(dict[int, Region]):
    """The regions of a run, by memory: one goes with its memory, which may be another's then."""

    def add(self, x: torch.Tensor, region: Region) -> None:
        """Have a region for the memory of a tensor."""
        key, memory = storage_of(x), memory_of(x)

        def freed(reference: Any) -> None:
            if key in self and self[key].memory is reference:
                del self[key]

        # what is no plain memory has no such end, and is kept
        region.memory = weakref.ref(memory, freed) if isinstance(memory, torch.UntypedStorage) else memory
        self[key] = region


def core(rows: torch.Tensor) -> torch.Tensor:
    """Labels with one entry along the dimensions in which they are expanded."""
    for dim, (size, stride) in enumerate(zip(rows.shape, rows.stride(), strict=True)):
        if dim and size > 1 and stride == 0:
            rows = rows.narrow(dim, 0, 1)
    return rows


def _fills(x: torch.Tensor, size: int) -> bool:
    """Whether a tensor has all of so many bytes of memory in their order."""
    return x.is_contiguous() and x.numel() * x.element_size() == size


def blank(like: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """The labels of entries that depend on nothing, on the device of a tensor."""
    return torch.full(tuple(shape), NONE, dtype=torch.float32, device=like.device)


def _view(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The labels of a tensor's elements, as a view of those of its memory with the tensor's own strides."""
    shape, strides = (rows.shape[0], *x.shape), (rows.stride(0), *x.stride())
    return rows.as_strided(shape, strides, rows.storage_offset() + x.storage_offset())


def _unexpanded(x: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An expanded tensor with each element only once, and the hull of the labels of each element."""
    for dim, (size, stride) in enumerate(zip(x.shape, x.stride(), strict=True)):
        if size > 1 and stride == 0:
            x, rows = x.narrow(dim, 0, 1), rows.amax(dim + 1, keepdim=True)
    return x, rows
