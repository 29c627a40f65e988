"""The axis of the samples of a tensor."""

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
