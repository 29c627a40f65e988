"""Windows over the last dimensions of labels."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F

from invfunc.operations.receptive_fields.regions import NONE
from invfunc.operations.receptive_fields.step import flattened

POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


def each(sizes: Sequence[int], d: int) -> list[int]:
    return [*sizes] if len(sizes) == d else [*sizes] * d


def padded(rows: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    if not any(p for pair in pairs for p in pair):
        return rows
    return F.pad(rows, [p for pair in reversed(pairs) for p in pair], value=NONE)


def windows(
    rows: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """The maximum of each window over the last dimensions."""
    d = len(kernel)
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
        rows, padding = padded(rows, [(p, p) for p in padding]), [0] * d
    if all(k == 1 for k in kernel) and not any(padding):
        return rows if all(s == 1 for s in stride) else rows[(..., *(slice(None, None, s) for s in stride))]
    sizes = (tuple(kernel), tuple(stride), tuple(padding), tuple(dilation))
    return flattened(rows, d, lambda maps: POOLS[d](maps, *sizes))
