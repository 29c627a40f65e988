"""Where the sample axis of a tensor lies."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass, replace
from functools import lru_cache

import torch


@dataclass(frozen=True)
class Axis:
    """Dimension `dim` enumerates (outer, sample, inner); `dim=None` says that all belongs to the only sample.

    A batch `[N, D]` is `Axis(0)`, a time-first one `[T, N, D]` is `Axis(1)`, a flattened `[N*T, D]` is
    `Axis(0, inner=T)`, a flattened time-first one `Axis(0, outer=T)`. Where entries were selected, as by a mask, or
    moved, `rows` tells the sample of each; `Axis(None, rows=(i,))` is a tensor of sample i alone.
    """

    dim: int | None
    outer: int = 1
    inner: int = 1
    rows: tuple[int, ...] | None = None

    def __str__(self) -> str:
        if self.dim is None:
            return "the whole tensor" if self.rows is None else f"the whole tensor (of sample {self.rows[0]})"
        if self.rows is not None:
            return f"axis {self.dim} (of which entries were selected or moved)"
        return f"axis {self.dim}" + ("" if self.outer * self.inner == 1 else " (merged with others)")

    @property
    def whole(self) -> bool:
        """Whether there is but one sample."""
        return self.dim is None and self.rows is None

    @property
    def kind(self) -> Axis:
        """The axis itself; where a tensor is of a single sample, one key for whichever sample it is."""
        return self if self.whole or self.dim is not None else Axis(None, rows=())

    @property
    def regular(self) -> bool:
        """Whether each sample has one entry of the dimension, and they are in order."""
        return self.rows is None and self.outer * self.inner == 1

    def width(self, n: int) -> int:
        """How many entries of the dimension one of n samples has, at most."""
        return self.outer * self.inner if self.rows is None else _most(self.rows)

    def owned(self, n: int) -> list[float]:
        """The fraction of the entries in each exposed sample that are its own, rather than put in for missing ones."""
        if self.rows is None:
            return [1.0] * n
        return [self.rows.count(i) / max(1, self.width(n)) for i in range(n)]

    def at(self, dim: int | None) -> Axis:
        """An axis that is laid out in the same way, in dimension `dim`."""
        return self if dim == self.dim else replace(self, dim=dim)

    def fits(self, x: torch.Tensor, n: int) -> bool:
        """Whether a tensor has room for n samples there."""
        if self.dim is None:
            return self.rows is not None
        size = self.outer * n * self.inner if self.rows is None else len(self.rows)
        return self.dim < x.ndim and x.shape[self.dim] == size

    def like(self, other: Axis) -> bool:
        """Whether the inside of the dimension is that of another."""
        return self == other.at(self.dim)

    def of_entries(self, size: int, n: int) -> torch.Tensor:
        """The sample of each of the `size` entries of the dimension."""
        return (
            torch.tensor(self.rows, dtype=torch.int64)
            if self.rows is not None
            else torch.arange(size) // self.inner % n
        )

    def expose(self, x: torch.Tensor, n: int, lead: int = 0, fill: float | None = 0) -> torch.Tensor:
        """`[*lead, *shape] -> [*lead, n, *one]`: `one` is the shape of x with only one sample in it.

        A sample with fewer rows than another has `fill` in their place, or (None) its first one again.
        """
        if self.dim is None:
            return self._among(x.unsqueeze(lead), n, lead, fill)
        if self.rows is not None:
            return self._gathered(x, n, lead, fill)
        if self.regular:
            x = x.movedim(lead + self.dim, lead) if self.dim else x
            return x.unsqueeze(lead + 1 + self.dim)
        shape = list(x.shape)
        d = lead + self.dim
        x = x.reshape(*shape[:d], self.outer, n, self.inner, *shape[d + 1 :]).movedim(d + 1, lead)
        return x.flatten(d + 1, d + 2)

    def restore(self, x: torch.Tensor, n: int, lead: int = 0) -> torch.Tensor:
        """The inverse of `expose`."""
        if self.dim is None:
            return x.squeeze(lead) if self.rows is None else x.select(lead, self.rows[0])
        d = lead + 1 + self.dim
        if self.rows is not None:
            sample, entry = _places(self.rows, n)[1].to(x.device)
            back = sample * x.shape[d] + entry  # more than one sample of these rows has, where they are a part of all
            return x.movedim(d, lead + 1).flatten(lead, lead + 1).index_select(lead, back).movedim(lead, d - 1)
        shape = list(x.shape)
        x = x.reshape(*shape[:d], self.outer, self.inner, *shape[d + 1 :]).movedim(lead, d)
        return x.flatten(d - 1, d + 1)

    def _among(self, x: torch.Tensor, n: int, lead: int, fill: float | None) -> torch.Tensor:
        """The entries of the single sample, `[*lead, 1, *one]`, put in its place among n."""
        if self.rows is None:
            return x
        if fill is None:
            return x.expand(*x.shape[:lead], n, *x.shape[lead + 1 :])
        own, others = self.rows[0], x.new_full((), fill)
        before, after = (others.expand(*x.shape[:lead], k, *x.shape[lead + 1 :]) for k in (own, n - own - 1))
        return torch.cat([before, x, after], lead)

    def _gathered(self, x: torch.Tensor, n: int, lead: int, fill: float | None) -> torch.Tensor:
        assert self.dim is not None and self.rows is not None
        places = _places(self.rows, n)[0].to(x.device)
        known = torch.where(places < 0, places[:, :1], places).clamp(min=0)
        found = x.movedim(lead + self.dim, lead).index_select(lead, known.flatten())
        found = found.unflatten(lead, tuple(places.shape))
        if fill is not None:
            missing = (places < 0).reshape(*places.shape, *[1] * (found.ndim - lead - 2))
            found = found.masked_fill(missing, fill)
        return found.movedim(lead + 1, lead + 1 + self.dim)

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


def _places(rows: tuple[int, ...], n: int) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows of each sample, `[n, most]` with -1 in place of missing ones; the sample and its entry for each row."""
    places, entries = _counted(rows, n)
    found = torch.tensor(places, dtype=torch.int64).view(n, _most(rows))
    return found, torch.tensor([rows, entries], dtype=torch.int64).view(2, -1)


def _most(rows: tuple[int, ...]) -> int:
    """How many of the rows one sample has, at most."""
    return max(Counter(rows).values(), default=0)


@lru_cache(maxsize=256)  # of numbers: a tensor may belong to a transform of torch.func that has ended when it is read
def _counted(rows: tuple[int, ...], n: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The rows of each sample, one sample after the other, with -1 in place of missing ones; of each row, which one of
    its sample it is."""
    found, entries = [list[int]() for _ in range(n)], list[int]()
    for row, sample in enumerate(rows):
        entries.append(len(found[sample]))
        found[sample].append(row)
    most = _most(rows)
    return tuple(row for own in found for row in own + [-1] * (most - len(own))), tuple(entries)
