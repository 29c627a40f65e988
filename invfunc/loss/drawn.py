"""Columns drawn at random, or partly peeled, whose products `S S^T` average to the Hessian of a loss."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from invfunc import thresholds, tree
from invfunc._torch.functorch import plainly, transforming
from invfunc._torch.values import wide
from invfunc.errors import ArgumentError
from invfunc.loss.hessian import row_blocks
from invfunc.loss.square_root import Affine, Columns, Elementwise, FormedColumns, Softmax, safe_root

Uniform = Callable[[tuple[int, ...], torch.Tensor], torch.Tensor]
"""Random numbers between 0 and 1 of a shape, in the dtype and on the device of a tensor."""


@dataclass(frozen=True)
class Peel:
    """The number of columns of each sample that are taken as they are, or "auto"."""

    columns: int | str
    least: int = 1
    """Number of columns that are mixed at least, unless none is left."""


@dataclass(frozen=True)
class _Ordered:
    """A square root of the Hessian of each sample whose columns come in an order."""

    mixed: Callable[[torch.Tensor], torch.Tensor]
    """From coefficients `[M, n, *shape]` of the columns to what they sum to at the root, `[M, n, *one]`."""
    shape: torch.Size
    """Columns of a sample."""
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


Source = torch.Generator | Sequence[torch.Generator]
"""Source of random numbers: one generator for all samples, or one for each of them."""


def drawn(made: list[Columns], count: int, source: Source, peel: Peel | None = None) -> list[Columns]:
    """`count` columns for each kind: the gradient of its loss at targets from the predictive of the model, or, to be
    peeled, those of a square root, of which all but the largest are mixed."""
    return [_drawn(columns, count, source, peel) for columns in made]


def _drawn(columns: Columns, count: int, source: Source, peel: Peel | None) -> FormedColumns:
    if isinstance(columns, Affine):
        inner = _drawn(columns.inner, count, source, peel)
        return FormedColumns(columns.pull(inner.values[columns.root], slice(None)), inner.exact)
    if peel is not None and isinstance(columns, (Softmax, Elementwise)):
        found, exact = peeled(columns, count, peel, partial(_uniform, source=source))
        return FormedColumns({columns.root: found}, exact)
    if isinstance(columns, Softmax):
        return FormedColumns({columns.root: columns.layout(_categorical(columns, count, source))})
    if isinstance(columns, Elementwise):
        noise = _NOISE[columns.predictive](columns, count, source)
        return FormedColumns({columns.root: noise * (safe_root(columns.diagonal) * count**-0.5)})
    raise ArgumentError(
        "mc_samples needs a loss with a known sampler: one of torch's convex losses, alone. Pass `sample=`, a function "
        "(outputs, generator) -> target that draws from the model's predictive, or leave mc_samples out."
    )


def _categorical(columns: Softmax, count: int, source: Source) -> torch.Tensor:
    """`sqrt(k / M) (p - onehot(y))` with y from p: `[M, n, C, positions]`; without derivatives for some rows at a time,
    so that there is one such tensor, laid out as the logits are."""
    x, scale = columns.logits, (safe_root(columns.weight) * count**-0.5).unsqueeze(1)
    n, _, positions = x.shape
    number = _uniform((count, n, 1, positions), wide(x.detach()[:1, :1]), source)

    def drawn_for(x: torch.Tensor, scale: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
        p = x.softmax(-1)
        target = _reached(wide(p.detach()), number)
        found = p.expand(count, *p.shape)
        return found.scatter(-1, target, found.gather(-1, target) - 1) * scale

    most = thresholds.CACHE.get(x.device.type, thresholds.ELSEWHERE)
    if x.requires_grad or transforming() or x.numel() * count <= most:
        return drawn_for(x.mT, scale.mT, number.mT).mT
    found = torch.empty_like(x, dtype=torch.promote_types(x.dtype, scale.dtype)).expand(count, *x.shape)
    found = found if count == 1 else found.movedim(2, -1).contiguous().movedim(-1, 2)
    for given, share, *each in row_blocks(1, x, scale, *number, *found):
        for made, one in zip(each[count:], drawn_for(given, share, torch.stack(each[:count])), strict=True):
            made.copy_(one)
    return found


def _reached(p: torch.Tensor, number: torch.Tensor) -> torch.Tensor:
    """The class `[M, ..., 1]` at which the running sum of `p [..., C]` exceeds a part of the whole. None has the
    probability 0."""
    below = p.cumsum(-1)
    number = number.clamp(max=1 - torch.finfo(p.dtype).eps) * below[..., -1:]
    return (below <= number).sum(-1, keepdim=True).clamp(max=p.shape[-1] - 1)


def _normal(columns: Elementwise, count: int, source: Source) -> torch.Tensor:
    h = columns.diagonal
    return by(source, torch.randn, (count, *h.shape), h.dtype, h.device)


def _bernoulli(columns: Elementwise, count: int, source: Source) -> torch.Tensor:
    """`(p - y) / sqrt(p (1 - p))`, which has variance 1; 0 where p is 0 or 1 up to rounding."""
    assert columns.logits is not None
    p = wide(columns.logits).sigmoid()
    number = _uniform((count, *p.shape), p, source)
    variance = p * (1 - p)
    none = variance <= 0
    noise = torch.where(none, 0, (p - (number < p).to(p.dtype)) * torch.where(none, 1, variance).rsqrt())
    return noise.to(columns.diagonal.dtype)


def _signs(columns: Elementwise, count: int, source: Source) -> torch.Tensor:
    h = columns.diagonal
    return torch.where(_uniform((count, *h.shape), h, source) < 0.5, -1.0, 1.0).to(h.dtype)


_NOISE = {"normal": _normal, "bernoulli": _bernoulli, "signs": _signs}


def _uniform(shape: tuple[int, ...], like: torch.Tensor, source: Source) -> torch.Tensor:
    return by(source, torch.rand, shape, like.dtype, like.device)


def by(source: Source, draw: Callable, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Random numbers, drawn where the generator is, and brought to where they are wanted; `[M, n, ...]` if n draw."""
    with plainly():
        if isinstance(source, torch.Generator):
            return draw(shape, dtype=dtype, device=source.device, generator=source).to(device)
        one = (shape[0], 1, *shape[2:])
        return torch.cat([draw(one, dtype=dtype, device=g.device, generator=g) for g in source], 1).to(device)


def key_of(generator: torch.Generator) -> int:
    """A number that generators of samples are made of, drawn from a generator."""
    with plainly():
        return int(torch.randint(2**31, (), generator=generator, device=generator.device))


def of_samples(key: int, first: int, n: int, device: torch.device) -> list[torch.Generator]:
    """A generator for each of n samples: what it draws depends on the place of the sample, not on those beside it."""
    return seeded([torch.Generator(device) for _ in range(n)], key, first)


def seeded(each: list[torch.Generator], key: int, first: int) -> list[torch.Generator]:
    """The generators of samples, made new for those from a place on."""
    for i, g in enumerate(each, first):
        g.manual_seed(key + i)
    return each


def targets(sample: Callable, outputs: Any, dims: Sequence[int | None], source: Source) -> Any:
    """Targets from a sampler of the user's, for outputs whose leaves have their samples in these dimensions."""
    if isinstance(source, torch.Generator):
        return sample(outputs, source)
    leaves, structure = tree.flatten(outputs)
    each = [
        [z if dim is None else z.narrow(dim, i, 1) for z, dim in zip(leaves, dims, strict=True)]
        for i in range(len(source))
    ]
    return joined([sample(tree.unflatten(one, structure), g) for one, g in zip(each, source, strict=True)], 0)


def joined(trees: Sequence[Any], dim: int) -> Any:
    """Trees of tensors by name, one behind the other along a dimension; what is no tensor is that of the last."""
    *others, last = ([*tree.named_leaves(one)] for one in trees)
    named = [*map(dict, others)]
    columns = [[*(one[path] for one in named), x] for path, x in last]
    found = [torch.cat(x, dim) if isinstance(x[-1], torch.Tensor) else x[-1] for x in columns]
    return tree.unflatten(found, tree.flatten(trees[-1])[1])
