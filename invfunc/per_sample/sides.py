"""Products of shares with their own transposes, over all columns and samples, without a share where that is cheaper."""

from __future__ import annotations

import math

import torch

from invfunc import thresholds
from invfunc._torch.precision import doubled, has_float64
from invfunc.linear_algebra.contract import (
    Term,
    cancel,
    contract,
    cost,
    crosses,
    instantiated,
    largest,
    present,
    squeezed,
    summed,
    widened,
)
from invfunc.per_sample.cotangents import length
from invfunc.per_sample.factor import Factor


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


def factored(factor: Factor, last: bool, other: torch.Tensor | None, diagonal: bool) -> torch.Tensor | None:
    """The same of a factor, whose shares are not formed; None where they had better be."""
    shape, output = factor.use.param.shape, factor.output
    if factor.lands or factor.recipe.cells or factor.recipe.own is not None or factor.sizes() != [*shape]:
        return None
    first, *_ = parts = factor.samples.parts(factor.work, thresholds.OPERANDS * factor.budget)
    terms = factor.terms(first)
    pair, kept = _twice(terms, output, shape, last, other, diagonal)
    side = shape[1:].numel() if last else shape[0]
    count = math.prod({c: s for labels, x in terms for c, s in zip(labels, x.shape, strict=True) if c in "VN"}.values())
    forming = instantiated(terms, present("VN" + output, terms)) + count * shape.numel() * (1 if diagonal else side)
    wide = cancel(pair) and crosses(terms, output)  # where positions meet positions, and may cancel
    if cost(pair, kept) * (thresholds.DOUBLE if wide else 1) >= forming:
        return None
    if wide and not has_float64(terms[0][1].device):
        return None
    size = largest(pair, kept) // length(first)
    parts = factor.samples.parts(max(factor.work, size), thresholds.PRODUCTS * factor.budget)
    found = []
    for part in parts:
        pair, kept = _twice(factor.terms(part), output, shape, last, other, diagonal)
        exact = [(labels, doubled(x)) for labels, x in pair] if wide else pair
        found.append(contract(exact, kept).to(pair[0][1].dtype).reshape([side] * (1 if diagonal else 2)))
    return summed(found)


def _twice(
    terms: list[Term], output: str, shape: torch.Size, last: bool, other: torch.Tensor | None, diagonal: bool
) -> tuple[list[Term], str]:
    """The terms of a product of two shares with the matrix between them, and the labels of what is left."""
    mine, shared = (output[1:], output[:1]) if last else (output[:1], output[1:])
    flat = other is None or other.ndim == 1
    between = shared * flat + mine * diagonal
    inner = sorted({c for labels, _ in terms for c in labels} - set("VN" + between))
    renamed = str.maketrans(dict(zip(inner, "ZYXUTRQPOLKJIHGFEDCBA", strict=False)))
    pair = [*terms, *((labels.translate(renamed), x) for labels, x in terms)]
    if other is not None:
        sizes = shape[:1] if last else shape[1:]
        others = shared if flat else shared + shared.translate(renamed)
        pair += squeezed([(others, other.reshape([*sizes] * (1 if flat else 2)))])
    return widened(pair), present(mine if diagonal else mine + mine.translate(renamed), pair)
