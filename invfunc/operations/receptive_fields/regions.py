"""The memory of tensors with labels: for each element of a storage, the box of root coordinates it can depend on."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from invfunc._functorch import memory_of

NONE = -math.inf
"""The label of what depends on no root."""
Frames = tuple[int, ...]


class Region:
    """One storage and its labels, `[rows, elements]`, those of a frame next to each other; a larger label is wider."""

    __slots__ = ("memory", "itemsize", "count", "frames", "rows", "heights", "affine", "owned", "blurred")

    def __init__(self, x: torch.Tensor, frames: Frames, rows: torch.Tensor, heights: dict[int, int]) -> None:
        self.memory = memory_of(x)  # kept: the memory of a tensor that died would be another's
        self.itemsize = x.element_size()
        self.count = self.memory.nbytes() // self.itemsize
        self.frames, self.rows, self.heights = frames, rows, heights
        self.affine: frozenset[int] = frozenset()
        self.owned = False  # whether no other region has the same rows
        self.blurred = False  # whether all elements share one label

    @classmethod
    def blank(cls, x: torch.Tensor, frames: Frames, heights: dict[int, int]) -> Region:
        """A region for the memory of x in which nothing has a label yet."""
        count = memory_of(x).nbytes() // x.element_size()
        region = cls(x, frames, blank(x, (sum(heights[f] for f in frames), count)), heights)
        region.owned = True
        return region

    @classmethod
    def holding(cls, x: torch.Tensor, rows: torch.Tensor, frames: Frames, heights: dict[int, int]) -> Region:
        """A region for a new tensor x, with labels that broadcast to `[rows, *x.shape]`."""
        wanted = (rows.shape[0], *x.shape)
        if x.is_contiguous() and x.numel() * x.element_size() == memory_of(x).nbytes():
            return cls(x, frames, rows.expand(wanted).reshape(rows.shape[0], -1).contiguous(), heights)
        region = cls.blank(x, frames, heights)
        _view(region.rows, x).copy_(rows.expand(wanted))
        return region

    def of(self, x: torch.Tensor, frames: Frames) -> torch.Tensor:
        """The labels `[rows, *x.shape]` of a tensor in this memory."""
        self._fit(x)
        rows = self.rows if frames == self.frames else self._aligned(frames)
        if self.blurred:
            return rows.view(-1, *[1] * x.ndim).expand(-1, *x.shape)
        return _view(rows, x)

    def write(self, x: torch.Tensor, rows: torch.Tensor | None, frames: Frames) -> None:
        """Put labels in the place of those that a tensor in this memory had; None: it depends on nothing."""
        self._fit(x)
        self._widen(frames)
        if not self.owned:
            self.rows, self.owned = self.rows.clone(), True
        if rows is None:
            rows = blank(self.rows, (1, *[1] * x.ndim)).expand(self._height(frames), *[1] * x.ndim)
        rows = rows.expand(rows.shape[0], *x.shape)
        if self.blurred:
            if rows.numel():
                rows = rows.flatten(1).amax(1, keepdim=True)
                for mine, theirs in self._pairs(self.rows, rows, frames):
                    torch.maximum(mine, theirs, out=mine)
            return
        x, rows = _unexpanded(x, rows)
        for mine, theirs in self._pairs(_view(self.rows, x), rows, frames):
            mine.copy_(theirs)

    def _pairs(self, mine: torch.Tensor, theirs: torch.Tensor, frames: Frames):
        if frames == self.frames:
            yield mine, theirs
            return
        at = 0
        for frame in frames:
            start, size = self._start(frame), self.heights[frame]
            yield mine[start : start + size], theirs[at : at + size]
            at += size

    def _height(self, frames: Frames) -> int:
        return sum(self.heights[f] for f in frames)

    def _start(self, frame: int) -> int:
        return self._height(self.frames[: self.frames.index(frame)])

    def _aligned(self, frames: Frames) -> torch.Tensor:
        """The rows of labels of these frames, in the given order."""
        blocks = []
        for frame in frames:
            if frame in self.frames:
                blocks.append(self.rows.narrow(0, self._start(frame), self.heights[frame]))
            else:
                blocks.append(blank(self.rows, (self.heights[frame], self.rows.shape[1])))
        return blocks[0] if len(blocks) == 1 else torch.cat(blocks)

    def _widen(self, frames: Frames) -> None:
        """Make room for these frames."""
        more = tuple(f for f in frames if f not in self.frames)
        if more:
            self.rows = torch.cat([self.rows, blank(self.rows, (self._height(more), self.rows.shape[1]))])
            self.frames, self.owned = (*self.frames, *more), True
            self.affine |= set(more)

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
