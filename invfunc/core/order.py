"""Samples in any order along a dim: picked, permuted, several times, or with several rows each."""

from __future__ import annotations

import torch


class Order:
    """The sample of each row of a dim; it stands in place of `outer` in an axis `(dim, order, 0)`."""

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

    def front(self, x: torch.Tensor, at: int, lead: int) -> torch.Tensor:
        """The samples in a dim of their own, and their rows, with zeros in place of missing ones, in dim `at + 1`."""
        x = x.movedim(at, lead).index_select(lead, self.places.clamp(min=0))
        if self.ragged:
            x = x.masked_fill((self.places < 0).view(-1, *[1] * (x.ndim - lead - 1)), 0)
        return x.unflatten(lead, (self.n, self.width)).movedim(lead + 1, at + 1)

    def restored(self, x: torch.Tensor, at: int, lead: int) -> torch.Tensor:
        """The inverse of `front`."""
        return x.movedim(at + 1, lead + 1).flatten(lead, lead + 1).index_select(lead, self.back).movedim(lead, at)
