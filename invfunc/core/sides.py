"""Products of shares with their own transposes, over all columns and samples, without a share where that is cheaper."""

from __future__ import annotations

import torch


def formed(share: torch.Tensor, last: bool, other: torch.Tensor | None, diagonal: bool) -> torch.Tensor:
    """`sum_vn G A G^T` of shares `[V, b, *p]` as matrices over the first dim and all others, or with `last`
    `sum_vn G^T B G`, or its diagonal; the identity in the middle if there is no other matrix, a vector is diagonal."""
    matrices = share.flatten(3)
    matrices = matrices.mT if last else matrices
    scaled = matrices
    if other is not None:
        other = other.to(matrices.dtype)
        scaled = matrices * other if other.ndim == 1 else matrices @ other
    if diagonal:
        return (matrices * scaled).sum((0, 1, 3))
    rows, others = (x.movedim(2, 0).flatten(1) for x in (matrices, scaled))
    return rows @ others.mT
