"""The axis of the samples of a tensor: a dim, or an order along it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

Axis = tuple[int, Any, int]
"""`(dim, outer, inner)`: a dim, counted from the right, with `outer * N * inner` entries, of which `[:, n, :]` are of
sample n; or `(dim, order, 0)`, where they are in any `Order`. Of one sample, all is of it."""
IN_FRONT: Axis = (-1, 1, 1)
"""The axis of `[N]` losses."""


def front(x: torch.Tensor, axis: Axis, n: int, lead: int = 0, fill: bool = True) -> torch.Tensor:
    """A tensor with the samples in their own dim `lead`; what else is in their dim stays there.

    Where a sample has fewer rows than others, zeros are `fill`ed in.
    """
    if n == 1:
        return x.unsqueeze(lead)
    at, outer, inner = axis
    at += x.ndim
    if isinstance(outer, Order):
        return outer.front(x, at, lead, fill)
    if outer == inner == 1:
        x = x if at == lead else x.movedim(at, lead)
        return x.unsqueeze(at + 1)
    x = x.unflatten(at, (outer, n, inner)).movedim(at + 1, lead)
    return x.flatten(at + 1, at + 2)


def exposed(x: torch.Tensor, axis: Axis, n: int, lead: int = 0, fill: bool = True) -> torch.Tensor:
    """`[*lead, *shape] -> [*lead, n, *one]`: `one` is the shape of x with only one sample in it."""
    y = front(x, axis, n, lead, fill)
    return y.squeeze(lead + 1) if n > 1 and -axis[0] > x.ndim - lead else y


def back(x: torch.Tensor, shape: Sequence[int], axis: Axis, n: int) -> torch.Tensor:
    """Columns `[V, n, entries]` in the layout of a tensor, `[V, *shape]`."""
    if n == 1:
        return x.reshape(len(x), *shape)
    at, outer, inner = axis
    at += len(shape)
    if isinstance(outer, Order):
        if at < 0:
            return outer.restored(x.reshape(len(x), n, 1, *shape), 0).squeeze(1)
        return outer.restored(x.reshape(len(x), n, *shape[:at], outer.width, *shape[at + 1 :]), at)
    x = x.reshape(len(x), n, *shape[:at], outer, inner, *shape[at + 1 :])
    return x.movedim(1, at + 2).flatten(at + 1, at + 3)


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
        """Most rows that a sample has."""
        self.ragged = self.width * n != len(rows)
        """True if some samples have fewer rows than others."""
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

    def front(self, x: torch.Tensor, at: int, lead: int, fill: bool) -> torch.Tensor:
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


# The sample of each entry


def numbers(shape: Any, axis: Axis, n: int, device: torch.device) -> torch.Tensor:
    """The number of the sample of each entry of a tensor."""
    at, outer, inner = axis
    if -at > len(shape):
        return outer.rows.view([1] * len(shape)).expand(shape)
    count = outer.rows if isinstance(outer, Order) else torch.arange(outer * n * inner, device=device) // inner % n
    return count.view(-1, *[1] * (-at - 1)).expand(shape)


def read(known: torch.Tensor, n: int) -> Axis | None:
    """The axis from the sample of each entry, -1 where there is none; None if they are not along one dim."""
    if known.ndim and not known.numel():  # nothing was picked
        return [*known.shape].index(0) - known.ndim, Order(known.flatten(), n), 0
    low, high = (int(x) for x in known.aminmax())
    if known.ndim == 0 or high < 0:
        return None
    if low == high and n > 1:
        return alone(known.ndim, known.new_full((1,), high), n)
    order = None
    for dim in range(known.ndim):
        rows = known.movedim(dim, 0).reshape(known.shape[dim], -1)
        low, high = torch.where(rows < 0, n, rows).min(1).values, rows.max(1).values
        there = high >= 0
        if not torch.equal(low[there], high[there]):
            continue
        if order is None and bool(there.all()):
            order = (dim - known.ndim, high)
        if len(rows) % n:
            continue
        count = torch.arange(len(rows), device=known.device)
        for inner in range(1, len(rows) // n + 1):
            if len(rows) % (inner * n) == 0 and torch.equal((count // inner % n)[there], high[there]):
                return (dim - known.ndim, len(rows) // (n * inner), inner)
    return None if order is None else (order[0], Order(order[1], n), 0)


def alone(ndim: int, sample: torch.Tensor, n: int) -> Axis:
    """The axis of a tensor that is of one sample."""
    return (-ndim - 1, Order(sample, n), 0)
