"""The patches that a convolution reads."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F


def spread(option: Any, d: int) -> tuple[int, ...]:
    """One number for each of d dimensions."""
    values = tuple(option) if isinstance(option, Sequence) else (option,)
    return values * d if len(values) == 1 else values


def same_padding(padding: Any, kernel: tuple[int, ...], dilation: tuple[int, ...]) -> list[tuple[int, int]]:
    """Padding before and after each dimension, also for "same" and "valid" (the odd one goes behind, as in torch)."""
    if padding == "valid":
        return [(0, 0)] * len(kernel)
    if padding == "same":
        total = [a * (k - 1) for a, k in zip(dilation, kernel, strict=True)]
        return [(t // 2, t - t // 2) for t in total]
    return [(p, p) for p in spread(padding, len(kernel))]


def patches(
    x: torch.Tensor,
    kernel: tuple[int, ...],
    stride: tuple[int, ...],
    pads: list[tuple[int, int]],
    dilation: tuple[int, ...],
) -> torch.Tensor:
    """`[B, C, *spatial] -> [B, C * prod(kernel), positions]`; negative padding crops."""
    d = len(kernel)
    symmetric = all(a == b >= 0 for a, b in pads)
    if math.prod(kernel) == math.prod(stride) == 1 and not any(map(any, pads)):
        return x.flatten(2)
    if not symmetric or d == 3:
        x = F.pad(x, [p for pair in reversed(pads) for p in pair])
        pads = [(0, 0)] * d
    if d < 3:
        grow = (1,) * (2 - d)
        padding = (0,) * (2 - d) + tuple(a for a, _ in pads)
        x = x if d == 2 else x.unsqueeze(2)
        return F.unfold(x, grow + kernel, grow + dilation, padding, grow + stride)
    for dim in range(d):
        span = dilation[dim] * (kernel[dim] - 1) + 1
        x = x.unfold(2 + dim, span, stride[dim])[..., :: dilation[dim]]
    # [B, C, *positions, *kernel] -> [B, C, *kernel, *positions]
    order = [0, 1, *range(2 + d, 2 + 2 * d), *range(2, 2 + d)]
    return x.permute(order).flatten(1, 1 + d).flatten(2)
