"""Squares of shares that are formed, and their moments."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from invfunc.linear_algebra.contract import summed


def shifted_moments(shares: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`sum G` and `sum (G - mean)^2` of blocks `[b, *p]`: the latter around the mean of the first block, corrected."""
    shift, totals, squares, n = None, [], [], 0
    for share in shares:
        shift = share.mean(0) if shift is None else shift
        n += len(share)
        share = share - shift
        totals.append(share.sum(0))
        squares.append(squared(share, fresh=True).sum(0))
    total = summed(totals)
    centred = torch.addcmul(summed(squares), total, total, value=-1 / n).clamp(min=0)
    assert shift is not None
    return total + n * shift, centred


def squared(share: torch.Tensor, other: torch.Tensor | None = None, fresh: bool = False) -> torch.Tensor:
    """`share^2`, or its product with another; what is fresh may be overwritten."""
    if other is not None:
        return share * other
    return share.square_() if fresh and not share.requires_grad else share.square()
