"""Squares of shares that are formed, and their moments."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from invfunc.linear_algebra.contract import added, in_place


def shifted_moments(shares: Iterable[torch.Tensor], fresh: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """`sum G` and `sum (G - mean)^2` of blocks `[b, *p]`: the latter around the mean of the first block, corrected;
    what is fresh may be overwritten."""
    shift = total = squares = None
    n = 0
    for share in shares:
        shift = share.mean(0) if shift is None else shift
        n += len(share)
        share = share.sub_(shift) if fresh and in_place(share, shift) else share - shift
        total = share.sum(0) if total is None else added(total, _over_samples(share))
        square = squared(share, fresh=True)
        squares = square.sum(0) if squares is None else added(squares, _over_samples(square))
    assert shift is not None and total is not None and squares is not None
    centred = torch.addcmul(squares, total, total, value=-1 / n).clamp(min=0)
    return total + n * shift, centred


def _over_samples(block: torch.Tensor) -> torch.Tensor:
    """The sum of a block `[b, *p]`, without a copy of a single sample."""
    return block[0] if len(block) == 1 else block.sum(0)


def squared(share: torch.Tensor, other: torch.Tensor | None = None, fresh: bool = False) -> torch.Tensor:
    """`share^2`, or its product with another; what is fresh may be overwritten."""
    if other is not None:
        return share * other
    return share.square_() if fresh and not share.requires_grad else share.square()
