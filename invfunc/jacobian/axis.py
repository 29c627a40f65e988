"""Where the sample axis of a tensor lies."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Axis:
    """Dimension `dim` enumerates (outer, sample, inner); `dim=None` says that all belongs to the only sample.

    A batch `[N, D]` is `Axis(0)`, a time-first one `[T, N, D]` is `Axis(1)`, a flattened `[N*T, D]` is
    `Axis(0, inner=T)`, a flattened time-first one `Axis(0, outer=T)`.
    """

    dim: int | None
    outer: int = 1
    inner: int = 1

    def __str__(self) -> str:
        if self.dim is None:
            return "the whole tensor"
        return f"axis {self.dim}" + ("" if self.outer * self.inner == 1 else " (merged with others)")

    @property
    def whole(self) -> bool:
        return self.dim is None

    @property
    def width(self) -> int:
        """How many entries of the dimension one sample has."""
        return self.outer * self.inner

    def at(self, dim: int) -> Axis:
        """The same inside dimension, at another place."""
        return Axis(dim, self.outer, self.inner)

    def expose(self, x: torch.Tensor, n: int, lead: int = 0) -> torch.Tensor:
        """`[*lead, *shape] -> [*lead, n, *one]`: `one` is the shape of x with only one sample in it."""
        if self.dim is None:
            return x.unsqueeze(lead)
        if self.width == 1:
            return x.movedim(lead + self.dim, lead).unsqueeze(lead + 1 + self.dim)
        shape = list(x.shape)
        d = lead + self.dim
        x = x.reshape(*shape[:d], self.outer, n, self.inner, *shape[d + 1 :]).movedim(d + 1, lead)
        return x.flatten(d + 1, d + 2)

    def restore(self, x: torch.Tensor, n: int, lead: int = 0) -> torch.Tensor:
        """The inverse of `expose`."""
        if self.dim is None:
            return x.squeeze(lead)
        d = lead + 1 + self.dim
        shape = list(x.shape)
        x = x.reshape(*shape[:d], self.outer, self.inner, *shape[d + 1 :]).movedim(lead, d)
        return x.flatten(d - 1, d + 1)

    def reshaped(self, old: torch.Size, new: torch.Size, n: int) -> Axis | None:
        """Where the axis is after a reshape; None if one dimension does not hold it any more."""
        if self.dim is None:
            return self
        step = self.inner * math.prod(old[self.dim + 1 :])  # of the sample index, in row-major order
        below = math.prod(new)
        if below == 0:
            return None
        for dim, size in enumerate(new):
            above, below = below, below // size
            if size > 1 and above >= step * n and below <= step:
                if step % below or above % (step * n):
                    return None
                return Axis(dim, above // (step * n), step // below)
        return None


@dataclass(frozen=True)
class Everyone(Axis):
    """No sample axis: the samples have equal parts, as in a term of a scalar loss in the parameters alone."""

    def expose(self, x: torch.Tensor, n: int, lead: int = 0) -> torch.Tensor:
        return (x / n).unsqueeze(lead).expand(*x.shape[:lead], n, *x.shape[lead:])
