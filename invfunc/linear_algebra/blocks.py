"""Products of matrices with tensors, and the places of blocks in a matrix."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext

import torch


def gathered(v: torch.Tensor, shape: Sequence[int], blocks: Sequence[int]) -> torch.Tensor:
    """`[*lead, *shape]` as `[blocks, *lead, *part]`: dim d is divided into `blocks[d]` parts of equal length."""
    lead = v.ndim - len(shape)
    pairs = [n for size, count in zip(shape, blocks, strict=True) for n in (count, size // count)]
    x = v.reshape([*v.shape[:lead], *pairs])
    order = [*range(lead, x.ndim, 2), *range(lead), *range(lead + 1, x.ndim, 2)]
    x = x.permute(order)
    return x.reshape([math.prod(blocks), *x.shape[len(shape) :]])


def scattered(x: torch.Tensor, shape: Sequence[int], blocks: Sequence[int]) -> torch.Tensor:
    """The inverse of `gathered`."""
    d = len(shape)
    lead = x.ndim - 1 - d
    x = x.reshape([*blocks, *x.shape[1:]])
    order = [*range(d, d + lead), *(n for i in range(d) for n in (i, d + lead + i))]
    x = x.permute(order)
    return x.reshape([*x.shape[:lead], *shape])


def part(shape: Sequence[int], blocks: Sequence[int]) -> torch.Size:
    """The shape of a block."""
    return torch.Size(size // count for size, count in zip(shape, blocks, strict=True))


def divide(blocks: Sequence[int], shape: Sequence[int]) -> bool:
    """Tells whether each number divides the length of its dim."""
    return len(blocks) == len(shape) and all(n > 0 and size % n == 0 for n, size in zip(blocks, shape, strict=True))


def product(factors: tuple[torch.Tensor, ...], x: torch.Tensor, transposed: bool = False) -> torch.Tensor:
    """Each factor applied along its axis, which are the last ones of x."""
    device = x.device.type
    with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
        for axis, f in enumerate(factors, -len(factors)):
            f, x = f.to(x.dtype), x.movedim(axis, -1)
            x = x * f if f.ndim == 1 else x @ (f if transposed else f.mT)
            x = x.movedim(-1, axis)
    return x
