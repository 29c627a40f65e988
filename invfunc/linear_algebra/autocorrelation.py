"""The Gram matrix of the patches that a convolution of stride 1 reads, without the patches.

Entry k of a kernel reads, at position p, the input at p + k (times the dilation). Summed over *all* positions, a
product of two entries depends on their displacement only,

    sum_p x[c, p + k] x[c', p + k'] = T[c, c', k' - k],    T[c, c', t] = sum_p x[c, p] x[c', p + t],

and T[c, c', -t] = T[c', c, t]: half of prod(2 k - 1) products of channels with channels instead of prod(k)^2. They are
one weight gradient, of the convolution of x whose cotangent is x.

All positions are those of a padding so wide that every entry reads every pixel. Those that the true padding leaves out
are subtracted: in each dimension, positions of equal coordinate read a few slices of the input. With these slices as
channels, their Gram matrix is the same problem in one dimension less.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from itertools import groupby

import torch
import torch.nn.functional as F
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from invfunc import thresholds
from invfunc._torch.functorch import dual, transforming
from invfunc.linear_algebra.contract import joined, outer, summed

Ints = tuple[int, ...]
Pads = tuple[tuple[int, int], ...]
Read = tuple[list[list[int]], list[tuple[slice, slice]]]
"""Slices of the input, and blocks: entries of the kernel with those of the slices that they read."""

_CORRELATE: dict[int, Callable] = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}


def patches_gram(x: torch.Tensor, kernel: Ints, pads: list[tuple[int, int]], dilation: Ints) -> torch.Tensor | None:
    """`sum_bp patches[b, i, p] patches[b, j, p]` for `[B, C, *spatial]`; None where the patches are the better way."""
    if x.device.type not in thresholds.DISPLACED_ON or x.dtype not in thresholds.DISPLACED_DTYPES:
        return None
    if x.requires_grad or transforming() or dual(x):
        return None  # the result is assembled in place
    kept: list[tuple[int, int]] = []
    for dim, (k, (a, b), step) in enumerate(zip(kernel, pads, dilation, strict=True), start=2):
        size, reach = x.shape[dim] + min(a, 0) + min(b, 0), (k - 1) * step
        if size < 1 or x.shape[dim] + a + b <= reach:
            return None
        x = x.narrow(dim, max(-a, 0), size)
        kept.append((min(max(a, 0), reach), min(max(b, 0), reach)))  # beyond, all entries read zeros
    problem = kernel, tuple(kept), dilation
    return _gram(x, *problem) if _cost(tuple(x.shape), *problem)[1] else None


def _gram(x: torch.Tensor, kernel: Ints, pads: Pads, dilation: Ints) -> torch.Tensor:
    """The Gram matrix for pads of at most the kernel's reach, in the cheaper way."""
    if not _cost(tuple(x.shape), kernel, pads, dilation)[1]:
        return outer(patches(x, kernel, (1,) * len(kernel), list(pads), dilation) if kernel else x.mT[None])
    found = _all_positions(x, kernel, dilation)
    for dim, (k, step) in enumerate(zip(kernel, dilation, strict=True)):
        sizes = x.shape[1], math.prod(kernel[:dim]), math.prod(kernel[dim + 1 :])
        place = found.view((sizes[0], sizes[1], k, sizes[2]) * 2)
        for slices, blocks in _left_out(x.shape[2 + dim], k, pads[dim], step):
            n = len(slices)
            read = x.index_select(2 + dim, torch.tensor(slices, device=x.device).flatten()).unflatten(2 + dim, (n, -1))
            read = read.movedim((3 + dim, 2 + dim), (1, 3)).flatten(0, 1).flatten(1, 2)
            gram = _gram(read, *_without(dim, kernel, pads, dilation))
            gram = gram.view((sizes[0], n, *sizes[1:]) * 2).permute(0, 2, 1, 3, 4, 6, 5, 7)
            for entries, rows in blocks:
                place[:, :, entries, :, :, :, entries] -= gram[:, :, rows, :, :, :, rows]
    return found


def _all_positions(x: torch.Tensor, kernel: Ints, dilation: Ints) -> torch.Tensor:
    """The matrix for the widest padding: entry (c, k, c', k') is T[c, c', k' - k]."""
    c, d, pixels = x.shape[1], len(kernel), math.prod(x.shape[2:])
    reach = [(k - 1) * step for k, step in zip(kernel, dilation, strict=True)]
    around = [(0, reach[0])] + [(r, r) for r in reach[1:]]  # the displacements that go forth in the first dimension
    spans = [2 * k - 1 for k in kernel]
    size = c, c, kernel[0], *spans[1:]
    read = F.pad(x, [p for pair in reversed(around) for p in pair])
    samples, rows = max(1, thresholds.EXACT // pixels), max(1, thresholds.EXACT * x.shape[2] // pixels)
    half = summed(
        _CORRELATE[d](at[:, :, i : i + rows + reach[0]], size, of[:, :, i : i + rows], dilation=dilation)
        for at, of in zip(read.split(samples), x.split(samples), strict=True)
        for i in range(0, x.shape[2], rows)
    )
    back = half[:, :, 1:].transpose(0, 1).flip(*range(2, 2 + d))
    offset = torch.arange(math.prod(spans), device=x.device).view(spans)[tuple(slice(k) for k in kernel)].flatten()
    displacement = offset - offset[:, None] + math.prod(spans) // 2
    index = displacement[:, None] + math.prod(spans) * torch.arange(c, device=x.device)[:, None]
    whole = joined([back, half], 2).flatten(1)
    return torch.index_select(whole, 1, index.flatten()).view((c * len(offset),) * 2)


@lru_cache(maxsize=4096)
def _left_out(size: int, k: int, pads: tuple[int, int], step: int) -> list[Read]:
    """The entries that are read in one dimension by positions that only the widest padding has."""
    (before, after), reach = pads, (k - 1) * step
    coordinates = [*range(-reach, -before), *range(size + after - reach, size)]
    ranges = groupby(coordinates, lambda p: (max(0, -(p // step)), min(k, (size - 1 - p) // step + 1)))
    runs = [(read, list(positions)) for read, positions in ranges if read[0] < read[1]]
    parts = [(slice(*read), [[p + i * step for p in run] for i in range(*read)]) for read, run in runs]
    found: list[Read] = []
    for entries, part in sorted(parts, key=lambda part: -len(part[1])):
        for slices, blocks in found:  # fewer entries read a part of what more of them do
            start = slices.index(part[0]) if part[0] in slices else 0
            if slices[start : start + len(part)] == part:
                blocks.append((entries, slice(start, start + len(part))))
                break
        else:
            found.append((part, [(entries, slice(0, len(part)))]))
    return found


def _without(dim: int, kernel: Ints, pads: Pads, dilation: Ints) -> tuple[Ints, Pads, Ints]:
    """The problem in the other dimensions: those after `dim` still have all positions, those before the true ones."""
    reach = [(k - 1) * step for k, step in zip(kernel[dim + 1 :], dilation[dim + 1 :], strict=True)]
    wide = tuple((r, r) for r in reach)
    return kernel[:dim] + kernel[dim + 1 :], pads[:dim] + wide, dilation[:dim] + dilation[dim + 1 :]


@lru_cache(maxsize=4096)
def _cost(shape: Ints, kernel: Ints, pads: Pads, dilation: Ints) -> tuple[float, bool]:
    """The cost of the cheaper way in multiplications, and whether it is the one through displacements."""
    b, c, *spatial = shape
    entries = math.prod(kernel)
    rows = c * entries
    axes = list(zip(spatial, kernel, pads, dilation, strict=True))
    positions = math.prod(size + sum(pair) - (k - 1) * step for size, k, pair, step in axes)
    direct = thresholds.CALL + b * positions * rows * (rows + (thresholds.UNFOLD if entries > 1 else 0))
    if entries == 1:
        return direct, False
    found = thresholds.CALL + c * c * b * math.prod(spatial) * kernel[0] * math.prod(2 * k - 1 for k in kernel[1:])
    found += thresholds.ASSEMBLE * rows * rows
    for dim, (size, k, pair, step) in enumerate(axes):
        for slices, blocks in _left_out(size, k, pair, step):
            if found >= direct:
                return direct, False
            other = b * len(slices[0]), c * len(slices), *spatial[:dim], *spatial[dim + 1 :]
            found += thresholds.SLICES + _cost(other, *_without(dim, kernel, pads, dilation))[0]
            found += thresholds.ASSEMBLE * sum((rows * len(slices[part]) // k) ** 2 for _, part in blocks)
    return min((found, True), (direct, False))


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
        return F.unfold(x, (*grow, *kernel), (*grow, *dilation), padding, (*grow, *stride))
    for dim in range(d):
        span = dilation[dim] * (kernel[dim] - 1) + 1
        x = x.unfold(2 + dim, span, stride[dim])[..., :: dilation[dim]]
    # [B, C, *positions, *kernel] -> [B, C, *kernel, *positions]
    order = [0, 1, *range(2 + d, 2 + 2 * d), *range(2, 2 + d)]
    return x.permute(order).flatten(1, 1 + d).flatten(2)
