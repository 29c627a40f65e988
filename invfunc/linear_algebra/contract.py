"""Contractions of small tensors by einsum, and autocorrelations of the windows of a convolution."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from functools import lru_cache, reduce
from itertools import groupby
from typing import Any, TypeVar

import opt_einsum
import torch
import torch.nn.functional as F
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from invfunc import thresholds
from invfunc._torch.functorch import dispatched, dual, transforming
from invfunc._torch.values import has_float64

T = TypeVar("T")
Term = tuple[str, torch.Tensor]
"""Labels and a tensor: V enumerates columns, N samples, lower-case letters the rest."""
Shape = tuple[str, tuple[int, ...]]
"""Labels and sizes, all that a plan depends on."""


@lru_cache(maxsize=4096)
def _plan(
    equation: str, shapes: tuple[tuple[int, ...], ...]
) -> tuple[float, int, tuple[tuple[tuple[int, ...], str], ...]]:
    """The cost in multiplications, the size of the largest intermediate, and the pairwise contractions."""
    _, info = opt_einsum.contract_path(
        equation, *shapes, shapes=True, optimize="optimal" if len(shapes) < thresholds.ORDERS else "auto"
    )
    # the labels of a step stand in the order in which opt_einsum pops the operands
    steps = tuple((tuple(sorted(step[0], reverse=True)), step[2]) for step in info.contraction_list)
    return float(info.opt_cost), int(info.largest_intermediate), steps


def _equation(terms: Sequence[Term | Shape], output: str) -> tuple[str, tuple[tuple[int, ...], ...]]:
    sizes = tuple([x.shape if isinstance(x, torch.Tensor) else x for _, x in terms])
    return ",".join([labels for labels, _ in terms]) + "->" + output, sizes


def cost(terms: Sequence[Term | Shape], output: str) -> float:
    """The number of multiplications in the cheapest order."""
    return _plan(*_equation(terms, output))[0]


def largest(terms: Sequence[Term | Shape], output: str) -> int:
    """The number of entries of the largest tensor that the cheapest order makes."""
    return _plan(*_equation(terms, output))[1]


def instantiated(terms: Sequence[Term | Shape], instance: str) -> float:
    """The cost of forming shares and squaring them."""
    sizes = {c: size for labels, x in shapes(terms) for c, size in zip(labels, x, strict=True)}
    return cost(terms, instance) + thresholds.FORMED * math.prod(sizes.get(c, 1) for c in instance)


def shapes(terms: Sequence[Term | Shape]) -> tuple[Shape, ...]:
    """The terms without their numbers."""
    return tuple((labels, tuple(x.shape) if isinstance(x, torch.Tensor) else x) for labels, x in terms)


def squares_directly(terms: list[Term], output: str, instance: str, kept: str) -> bool:
    """Tells whether the sum of squares is cheaper without forming a share: `instance` are its labels, `kept` those
    left.
    """
    return _squares_directly(shapes(terms), output, instance, kept, cancel(terms), has_float64(terms[0][1].device))


@lru_cache(maxsize=4096)
def _squares_directly(
    terms: tuple[Shape, ...], output: str, instance: str, kept: str, cancels: bool, exact: bool
) -> bool:
    if len(terms) == 1 and set(terms[0][0]) <= set(instance):  # there is nothing to form
        return False
    pair = twice(terms, terms, output)
    wide = cancels and crosses(pair, output)
    if wide and not exact:
        return False
    slow = thresholds.DOUBLE if wide else 1  # in float64
    return slow * cost(pair, present(kept, terms)) < instantiated(terms, present(instance, terms))


def cancel(terms: Sequence[Term]) -> bool:
    """Tells whether sums of products of these, which cancel, are to be taken in float64."""
    return all(x.dtype in thresholds.CANCELS for _, x in terms)


def crosses(pair: Sequence[tuple[str, Any]], output: str) -> bool:
    """Tells whether products of positions with positions are summed, which may cancel."""
    inner = [c for labels, _ in pair for c in labels if c not in "VNMW" + output]
    return len(set(inner)) < len(inner)


def contract(terms: list[Term], output: str) -> torch.Tensor:
    """The einsum of the terms in the cheapest order of pairs."""
    tensors = [x for _, x in terms]
    for positions, pair in _plan(*_equation(terms, output))[2]:
        some, (before, after) = [tensors.pop(i) for i in positions], pair.split("->")
        tensors.append(some[0] if before == after else torch.einsum(pair, *some))
    return tensors[0]


def in_place(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Tells whether a result of them can be written to memory that is there: of one dtype, and nobody differentiates
    it."""
    return not (x.requires_grad or y.requires_grad or x.dtype != y.dtype or transforming())


def summed(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of at least one tensor, of which no more than one at a time has to be there; of one, itself."""
    tensors = iter(tensors)
    total = next(tensors)
    for i, more in enumerate(tensors):
        total = added(total, more) if i else total + more
    return total


def added(total: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    """Their sum, where that can be in the memory of the total, which is nobody else's: fresh memory takes longer."""
    return total.add_(more) if in_place(total, more) and total.shape == more.shape else total + more


def joined(parts: list[torch.Tensor], dim: int = 0) -> torch.Tensor:
    """The parts in one tensor; a single one is not copied."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat(parts, dim)


def outer(x: torch.Tensor, other: torch.Tensor | None = None, diagonal: bool = False) -> torch.Tensor:
    """`sum_br x[b, k, r] other[b, l, r]`, symmetric where the other is x itself; of `[b, g, k, r]` one for each g.

    Its diagonal is `[k]`, and `[g, k, 1]` of several.
    """
    if diagonal:
        squares = _squares(x, x if other is None else other)
        return squares if x.ndim == 3 else squares.unsqueeze(-1)
    if x.ndim == 4:
        x, other = (y.permute(1, 2, 0, 3).flatten(2) for y in (x, x if other is None else other))
        return x @ other.mT
    b, k, r = x.shape
    large = r >= thresholds.ADDED_POSITIONS and x.numel() >= thresholds.ADDED_NUMBERS
    if large and x.device.type in thresholds.ADDED_ON and not transforming():
        return torch.addbmm(x.new_zeros(k, k), x, (x if other is None else other).mT)
    rows = x[:, :, 0] if r == 1 else x.mT.reshape(b * r, k)
    plain = k < 2 * thresholds.MIRRORED or x.device.type not in thresholds.ADDED_ON or dispatched()
    if other is not None or plain or not in_place(x, x):
        return rows.mT @ (rows if other is None else other.mT.reshape(b * r, k))
    found = x.new_empty(k, k)  # whose upper blocks mirror the lower ones
    for start in range(0, k, thresholds.MIRRORED):
        stop = start + thresholds.MIRRORED
        torch.mm(rows[:, start:stop].mT, rows[:, :stop], out=found[start:stop, :stop])
        found[:start, start:stop] = found[start:stop, :start].mT
    return found


def _squares(x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """`sum_br x[b, ..., k, r] other[b, ..., k, r]`, in blocks that stay in the cache."""
    step = max(256, 2**18 * x.shape[-2] // max(1, x.numel()))
    pairs = zip(x.split(step, -2), other.split(step, -2), strict=True)
    return torch.cat([(a * b).sum((0, -1)) for a, b in pairs], -1)


def squeezed(terms: list[Term]) -> list[Term]:
    """The terms without dimensions of size 1, so that the cost model sees what is there."""
    return [_squeezed(labels, x) if 1 in x.shape else (labels, x) for labels, x in terms]


def _squeezed(labels: str, x: torch.Tensor) -> Term:
    labels, sizes = _without_ones(labels, x.shape)
    return labels, x.reshape(sizes)


@lru_cache(maxsize=4096)
def _without_ones(labels: str, shape: torch.Size) -> tuple[str, tuple[int, ...]]:
    kept = [(c, size) for c, size in zip(labels, shape, strict=True) if size != 1]
    return "".join(c for c, _ in kept), tuple(size for _, size in kept)


def present(labels: str, terms: Sequence[tuple[str, Any]]) -> str:
    """The labels that occur in the terms."""
    found = "".join([other for other, _ in terms])
    return "".join([c for c in labels if c in found])


def promoted(terms: list[Term]) -> list[Term]:
    """The terms in the dtype that holds all of them."""
    dtype = reduce(torch.promote_types, [x.dtype for _, x in terms])
    return [(labels, x.to(dtype)) for labels, x in terms]


def narrowed(terms: list[Term], label: str, start: int, stop: int) -> list[Term]:
    """The terms for a range of one label."""
    return [
        (labels, x.narrow(labels.index(label), start, stop - start) if label in labels else x) for labels, x in terms
    ]


def twice(terms: Sequence[tuple[str, T]], others: Sequence[tuple[str, T]], output: str) -> list[tuple[str, T]]:
    """The terms of a product of two contractions: what is summed within one gets its own labels in the other."""
    return [*terms, *_renamed(others, {c: c for c in output + "VN"})]


def side_by_side(terms: list[Term], output: str) -> list[Term]:
    """The terms of the products of each column (V) of a sample with each column (W) of the same sample."""
    return [*terms, *_renamed(terms, {**{c: c for c in output + "N"}, "V": "W"})]


def _renamed(terms: Sequence[tuple[str, T]], names: dict[str, str]) -> list[tuple[str, T]]:
    """The terms with the names given, and fresh ones for all other labels."""
    free = iter("ZYXUTRQPOLKJIHGFEDCBA")
    inner = sorted({c for labels, _ in terms for c in labels} - set(names))
    renamed = str.maketrans({**names, **{c: next(free) for c in inner}})
    return [(labels.translate(renamed), x) for labels, x in terms]


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
        return outer(unfolded(x, kernel, (1,) * len(kernel), list(pads), dilation) if kernel else x.mT[None])
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


def unfolded(
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
