"""Contractions of a factored Jacobian: opt_einsum chooses how, by cost."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import lru_cache, reduce
from typing import Any, TypeVar

import opt_einsum
import torch

from invfunc import thresholds
from invfunc._torch.functorch import transforming
from invfunc._torch.precision import has_float64
from invfunc.linear_algebra.pairwise import in_place, product

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
        tensors.append(product(pair, [tensors.pop(i) for i in positions]))
    return tensors[0]


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
    return rows.mT @ (rows if other is None else other.mT.reshape(b * r, k))


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
