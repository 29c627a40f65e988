"""The axis of the samples of a tensor, or their order along it."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Axis:
    """The dim of a tensor that has its samples, as (outer, sample, inner); `dim=None`, all of it is of one sample."""

    dim: int | None
    outer: int = 1
    inner: int = 1

    def at(self, dim: int) -> Axis:
        return Axis(dim, self.outer, self.inner)

    def expose(self, x: torch.Tensor, n: int, lead: int = 0) -> torch.Tensor:
        """`[*lead, *shape] -> [*lead, n, *one]`: `one` is the shape of x with only one sample in it."""
        if self.dim is None:
            return x.unsqueeze(lead)
        d = lead + self.dim
        if self.outer == self.inner == 1:
            return (x.movedim(d, lead) if d > lead else x).unsqueeze(d + 1)
        return x.unflatten(d, (self.outer, n, self.inner)).movedim(d + 1, lead).flatten(d + 1, d + 2)

    def restore(self, x: torch.Tensor, n: int, lead: int = 0) -> torch.Tensor:
        """The inverse of `expose`."""
        if self.dim is None:
            return x.squeeze(lead)
        d = lead + 1 + self.dim
        if self.outer == self.inner == 1:
            x = x.squeeze(d)
            return x.movedim(lead, d - 1) if d - 1 > lead else x
        return x.unflatten(d, (self.outer, self.inner)).movedim(lead, d).flatten(d - 1, d + 1)


WHOLE = Axis(None)


class Order:
    """The sample of each row of a dim; it stands in place of `outer` in an axis `(dim, order, 0)`.

    A tensor of one sample alone has a single row, in a dim in front of all others that it does not have.
    """

    def __init__(self, rows: torch.Tensor, n: int) -> None:
        """`rows` are the numbers of the samples, of which there are n."""
        self.rows, self.n = rows, n
        order = rows.argsort(stable=True)
        counts = rows.bincount(minlength=n)
        self.width = int(counts.max())
        """How many rows a sample has, at most."""
        self.ragged = self.width * n != len(rows)
        """Whether some samples have fewer rows than others."""
        first = counts.cumsum(0) - counts
        slots = torch.arange(len(rows), device=rows.device) - first[rows[order]]
        self.places = torch.full((n * self.width,), -1, device=rows.device)
        """The row of each place `[n * width]`, -1 where there is none."""
        self.places[rows[order] * self.width + slots] = order
        self.back = torch.empty_like(rows)
        """The place of each row."""
        self.back[order] = rows[order] * self.width + slots

    def __eq__(self, other: object) -> bool:
        return self is other or (isinstance(other, Order) and torch.equal(self.rows, other.rows))

    def __hash__(self) -> int:
        return len(self.rows)

    def __repr__(self) -> str:
        return f"samples in another order, {self.width} or fewer of each"

    def front(self, x: torch.Tensor, at: int, lead: int, fill: bool = True) -> torch.Tensor:
        """The samples in a dim of their own, and their rows in dim `at + 1`; missing ones are `fill`ed with zeros."""
        x, at = (x.unsqueeze(lead), lead) if at < lead else (x, at)
        x = x.movedim(at, lead).index_select(lead, self.places.clamp(min=0))
        if self.ragged and fill:
            x = x.masked_fill((self.places < 0).view(-1, *[1] * (x.ndim - lead - 1)), 0)
        return x.unflatten(lead, (self.n, self.width)).movedim(lead + 1, at + 1)

    def restored(self, x: torch.Tensor, at: int) -> torch.Tensor:
        """Columns `[V, n, entries of its rows]` in the layout of a tensor, whose dim it is, `[V, *shape]`."""
        x = x.movedim(at + 2, 2).flatten(1, 2).index_select(1, self.back)
        return x.movedim(1, at + 1)


@dataclass(frozen=True)
class Moved(Axis):
    """An axis along which the samples are in any order; `dim=None`, all of it is of one of them."""

    order: Order = None  # pyright: ignore[reportAssignmentType]

    def at(self, dim: int) -> Moved:
        return Moved(dim, order=self.order)

    def expose(self, x: torch.Tensor, n: int, lead: int = 0) -> torch.Tensor:
        if self.dim is None:
            return self.order.front(x, lead - 1, lead).squeeze(lead + 1)
        return self.order.front(x, lead + self.dim, lead)

    def restore(self, x: torch.Tensor, n: int, lead: int = 0) -> torch.Tensor:
        if not lead:
            return self.restore(x.unsqueeze(0), n, 1).squeeze(0)
        return (
            self.order.restored(x.unsqueeze(2), 0).squeeze(1) if self.dim is None else self.order.restored(x, self.dim)
        )
