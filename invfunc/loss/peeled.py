"""Columns of which the largest are taken as they are, and all others are mixed by random signs.

Let `L[n]` be a square root of the Hessian of sample n whose columns come in an order, the largest first. Of M columns
the first r are those of L, and each of the others is `sum_j +-L[:, j] / sqrt(M - r)` over all j from r on, with signs
of its own: on average their products are what the first r leave out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch

from invfunc._torch.values import wide
from invfunc.errors import ArgumentError
from invfunc.loss.square_root import Elementwise, Softmax, safe_root

Uniform = Callable[[tuple[int, ...], torch.Tensor], torch.Tensor]
"""Random numbers between 0 and 1 of a shape, in the dtype and on the device of a tensor."""


@dataclass(frozen=True)
class Peel:
    """The number of columns of each sample that are taken as they are, or "auto"."""

    columns: int | str
    least: int = 1
    """How many are mixed at least, unless none is left."""


@dataclass(frozen=True)
class _Ordered:
    """A square root of the Hessian of each sample whose columns come in an order."""

    mixed: Callable[[torch.Tensor], torch.Tensor]
    """From coefficients `[M, n, *shape]` of the columns to what they sum to at the root, `[M, n, *one]`."""
    shape: torch.Size
    """What columns a sample has."""
    like: torch.Tensor
    left: torch.Tensor | None
    """`[n, r]`, the trace of what the first r columns leave out; None where a column is of one of several positions,
    which all share a pullback."""

    @property
    def rank(self) -> float:
        """The number of columns there are to take."""
        return math.inf if self.left is None else self.left.shape[1] - 1


def peeled(
    columns: Softmax | Elementwise, count: int, peel: Peel, uniform: Uniform
) -> tuple[torch.Tensor, torch.Tensor]:
    """At most `count` columns, and how many of each sample are taken as they are."""
    root = _of_classes(columns) if isinstance(columns, Softmax) else _of_entries(columns)
    count = int(min(count, max(1, root.rank)))
    signs = torch.where(uniform((count, len(root.like), *root.shape), root.like) < 0.5, -1, 1).to(root.like.dtype)
    exact = _number(root, count, peel)
    return root.mixed(_coefficients(signs, exact)), exact


def _of_classes(columns: Softmax) -> _Ordered:
    """The Cholesky factor of `k (diag p - p p^T)`, the likeliest class first.

    With R_j the probability of all classes behind the j-th, column j is `sqrt(p_j R_j / R_(j-1))` at class j, and that
    times `-p_i / R_j` at each class i behind it.
    """
    p, order = wide(columns.logits).softmax(1).sort(1, descending=True)
    since = p.flip(1).cumsum(1).flip(1)
    behind = torch.cat([since[:, 1:], torch.zeros_like(since[:, :1])], 1)
    size, weight = safe_root(p * behind / _not_zero(since)), safe_root(columns.weight).unsqueeze(1)

    def mixed(coefficients: torch.Tensor) -> torch.Tensor:
        own = coefficients * size
        each = torch.where(behind > 0, own / _not_zero(behind), 0)
        found = own - p * (each.cumsum(2) - each)
        found = torch.zeros_like(found).scatter(2, order.expand_as(found), found).to(columns.logits.dtype)
        return columns.layout(found * weight)

    left = None
    if p.shape[2] == 1:  # the sum of a class's own variance over all that are left
        left = (since - p.square().flip(1).cumsum(1).flip(1) / _not_zero(since)).squeeze(2)
    return _Ordered(mixed, p.shape[1:], p, left)


def _of_entries(columns: Elementwise) -> _Ordered:
    """The unit columns of a diagonal Hessian, times the square roots of its entries, the largest first."""
    h, order = columns.diagonal.flatten(1).sort(1, descending=True)
    left = torch.cat([h.flip(1).cumsum(1).flip(1), torch.zeros_like(h[:, :1])], 1)

    def mixed(coefficients: torch.Tensor) -> torch.Tensor:
        found = coefficients * safe_root(h)
        return (
            torch.zeros_like(found).scatter(2, order.expand_as(found), found).unflatten(2, columns.diagonal.shape[1:])
        )

    return _Ordered(mixed, h.shape[1:], h, left)


def _number(root: _Ordered, count: int, peel: Peel) -> torch.Tensor:
    """The number of columns of each sample that are taken as they are.

    With "auto" as many as make the least of `left[r]^2 / (count - r)`, about the variance of the trace.
    """
    n, device = len(root.like), root.like.device
    if root.left is None:
        if peel.columns not in ("auto", 0):
            raise ArgumentError(
                f"peel={peel.columns} counts classes of a sample, but here samples have {root.shape[1]} positions "
                "with classes each. Pass peel='auto', which mixes them all."
            )
        return torch.zeros(n, dtype=torch.long, device=device)
    if count >= root.rank:
        return torch.full((n,), int(root.rank), device=device)
    most = count - peel.least
    if isinstance(peel.columns, int):
        return torch.full((n,), min(peel.columns, most), device=device)
    left = root.left.detach()[:, : most + 1]
    mixed = torch.arange(count, peel.least - 1, -1, device=device)
    return ((left / _not_zero(left[:, :1])).square() / mixed).argmin(1)


def _coefficients(signs: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """The coefficients of M columns in the columns of the root, from signs `[M, n, K, *positions]`."""
    count, _, size = signs.shape[:3]
    v, j = (torch.arange(k, device=signs.device) for k in (count, size))
    column, place, first = v[:, None, None], j, exact[:, None]
    own = (column == place) & (place < first)
    share = (count - exact).clamp(min=1).to(signs.dtype).rsqrt()
    mixed = torch.where((column >= first) & (place >= first), share[:, None], 0)
    own, mixed = (x.reshape(*x.shape, *[1] * (signs.ndim - 3)) for x in (own, mixed))
    return torch.where(own, 1, signs * mixed)


def _not_zero(x: torch.Tensor) -> torch.Tensor:
    """A divisor, where the quotient does not matter if it is zero."""
    return torch.where(x == 0, 1, x)
