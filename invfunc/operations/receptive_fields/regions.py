"""The memory of tensors with labels: for each element of a storage, the box of root coordinates it can depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from invfunc._functorch import memory_of

NONE = -math.inf
"""The label of what depends on no root."""


class Region:
    """One storage and its labels, `[rows, elements]`; a larger label is wider."""

    __slots__ = ("memory", "itemsize", "count", "rows", "affine", "owned", "blurred")

    def __init__(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        self.memory = memory_of(x)  # kept: the memory of a tensor that died would be another's
        self.itemsize = x.element_size()
        self.count = self.memory.nbytes() // self.itemsize
        self.rows = rows
        self.affine = False  # whether all elements are affine in the roots
        self.owned = False  # whether no other region has the same rows
        self.blurred = False  # whether all elements share one label

    @classmethod
    def blank(cls, x: torch.Tensor, height: int) -> Region:
        """A region for the memory of x in which nothing has a label yet."""
        region = cls(x, blank(x, (height, memory_of(x).nbytes() // x.element_size())))
        region.owned = True
        return region

    @classmethod
    def holding(cls, x: torch.Tensor, rows: torch.Tensor) -> Region:
        """A region for a new tensor x, with labels that broadcast to `[rows, *x.shape]`."""
        wanted = (rows.shape[0], *x.shape)
        if x.is_contiguous() and x.numel() * x.element_size() == memory_of(x).nbytes():
            return cls(x, rows.expand(wanted).reshape(rows.shape[0], -1).contiguous())
        region = cls.blank(x, rows.shape[0])
        _view(region.rows, x).copy_(rows.expand(wanted))
        return region

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The labels `[rows, *x.shape]` of a tensor in this memory."""
        self._fit(x)
        if self.blurred:
            return self.rows.view(-1, *[1] * x.ndim).expand(-1, *x.shape)
        return _view(self.rows, x)

    def write(self, x: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Put labels in the place of those that a tensor in this memory had; None: it depends on nothing."""
        self._fit(x)
        if not self.owned:
            self.rows, self.owned = self.rows.clone(), True
        if rows is None:
            rows = blank(self.rows, (1, *[1] * x.ndim)).expand(len(self.rows), *[1] * x.ndim)
        rows = rows.expand(rows.shape[0], *x.shape)
        if self.blurred:
            if rows.numel():
                torch.maximum(self.rows, rows.flatten(1).amax(1, keepdim=True), out=self.rows)
            return
        x, rows = _unexpanded(x, rows)
        _view(self.rows, x).copy_(rows)

    def _fit(self, x: torch.Tensor) -> None:
        """Adapt to a storage that has grown, or is read as elements of another size."""
        if x.element_size() != self.itemsize:
            self._blur()
        count = self.memory.nbytes() // self.itemsize
        if count > self.count and not self.blurred:
            self.rows = torch.cat([self.rows, blank(self.rows, (self.rows.shape[0], count - self.count))], 1)
            self.count, self.owned = count, True

    def _blur(self) -> None:
        if not self.blurred:
            self.rows = self.rows.amax(1, keepdim=True) if self.count else blank(self.rows, (self.rows.shape[0], 1))
            self.owned = self.blurred = True


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
