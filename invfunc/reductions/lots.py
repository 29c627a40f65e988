"""Errors of sums over drawn columns: the spread between the draws of each sample."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from invfunc._torch.precision import doubled

Drawn = dict[tuple[int, int], torch.Tensor]
"""By the range of a lot of columns, which of them are drawn for each sample: `[v, n]`."""


@dataclass(frozen=True)
class Lot:
    """The columns of a range, of which each but the first is drawn anew in place of the same ones."""

    start: int
    stop: int
    exact: torch.Tensor | None = None
    """How many of the first ones of each sample are not drawn; None if all are."""


def drawn(lots: list[Lot], part: slice | torch.Tensor, values: torch.Tensor) -> Drawn:
    """The columns that are drawn for the samples of a part, of which there are values `[V, n, ...]`."""
    found: Drawn = {}
    for lot in lots:
        v = torch.arange(lot.stop - lot.start, device=values.device)[:, None]
        which = v >= (0 if lot.exact is None else lot.exact[part])
        found[lot.start, lot.stop] = which.expand(-1, values.shape[1])
    return found


def variances(values: torch.Tensor, drawn: Drawn) -> torch.Tensor:
    """The variance of `sum_v values[v, n]` as `[n, ...]`, in float64.

    Of m draws x[v] of a lot, the variance of their sum is `m / (m - 1) sum_v (x[v] - mean x)^2`.
    """
    size = values.detach().abs().amax()
    size = torch.where((size > 0) & size.isfinite(), size, 1)  # squares of small numbers would be 0
    total = torch.zeros_like(values[0])
    for (start, stop), which in drawn.items():
        which = which.reshape(*which.shape, *[1] * (values.ndim - 2))
        x, m = values[start:stop] / size, which.sum(0).to(values.dtype)
        mean = torch.where(which, x, 0).sum(0) / m.clamp(min=1)
        total = total + torch.where(which, x - mean, 0).square().sum(0) * (m / (m - 1))
    return doubled(total) * doubled(size).square()
