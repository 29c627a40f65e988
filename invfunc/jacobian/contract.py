"""Contractions of a factored Jacobian: opt_einsum chooses how, by cost."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import opt_einsum
import torch

from invfunc._functorch import transforming
from invfunc._pages import room

Term = tuple[str, torch.Tensor]
"""Labels and a tensor: V enumerates columns, N samples, lower-case letters the rest."""


@lru_cache(maxsize=4096)
def _plan(
    equation: str, shapes: tuple[tuple[int, ...], ...]
) -> tuple[float, int, tuple[tuple[tuple[int, ...], str], ...]]:
    """The cost in multiplications, the size of the largest intermediate, and the pairwise contractions."""
    _, info = opt_einsum.contract_path(
        equation, *shapes, shapes=True, optimize="optimal" if len(shapes) < 6 else "auto"
    )
    steps = tuple((tuple(step[0]), step[2]) for step in info.contraction_list)
    return float(info.opt_cost), int(info.largest_intermediate), steps


def _equation(terms: list[Term], output: str) -> tuple[str, tuple[tuple[int, ...], ...]]:
    return ",".join(labels for labels, _ in terms) + "->" + output, tuple(tuple(x.shape) for _, x in terms)


def cost(terms: list[Term], output: str) -> float:
    """How many multiplications the cheapest order takes."""
    return _plan(*_equation(terms, output))[0]


def largest(terms: list[Term], output: str) -> int:
    """How many numbers the largest tensor has that the cheapest order makes."""
    return _plan(*_equation(terms, output))[1]


def contract(terms: list[Term], output: str) -> torch.Tensor:
    """The einsum of the terms in the cheapest order of pairs."""
    tensors = [x for _, x in terms]
    for positions, pair in _plan(*_equation(terms, output))[2]:
        taken = [tensors.pop(i) for i in sorted(positions, reverse=True)]
        # the labels of a step stand in the order in which opt_einsum pops the operands
        tensors.append(_pair(pair, taken))
    return tensors[0]


def _pair(equation: str, operands: list[torch.Tensor]) -> torch.Tensor:
    """One step, as an element-wise product or as one batched matrix product.

    torch.einsum would make batched products of length-one vectors of the former, and knows one order of the latter.
    """
    inputs, output = equation.split("->")
    labels = inputs.split(",")
    if len(operands) == 1 or any(c not in output for c in set(labels[0]) ^ set(labels[1])):
        return torch.einsum(equation, *operands)
    (left, right), (x, y) = labels, operands
    shared = [c for c in left if c in right]
    batch, summed = [c for c in shared if c in output], [c for c in shared if c not in output]
    rows, columns = [c for c in left if c not in right], [c for c in right if c not in left]
    if not summed or not (rows or columns):
        order = [*output, *summed]
        x, y = _ordered(x, left, order), _ordered(y, right, order)
        product = torch.mul(x, y, out=_room(torch.broadcast_shapes(x.shape, y.shape), x, y))
        return product.sum(list(range(len(output), len(order)))) if summed else product
    sizes = dict(zip(left + right, (*x.shape, *y.shape), strict=True))
    ordered = not columns or (rows and output.index(rows[0]) < output.index(columns[0]))
    second = columns if ordered else rows
    if ordered is (math.prod(sizes[c] for c in second) < _NARROW):
        left, right, x, y, rows, columns = right, left, y, x, columns, rows
    x = x.permute([left.index(c) for c in (*batch, *rows, *summed)])
    y = y.permute([right.index(c) for c in (*batch, *columns, *summed)])
    b, k = (math.prod(sizes[c] for c in group) for group in (batch, summed))
    x, y = x.reshape(b, -1, k), y.reshape(b, -1, k)
    out = _room((b, x.shape[1], y.shape[1]), x, y)
    product = torch.bmm(x, y.mT, out=out) if b > 1 else torch.mm(x[0], y[0].T, out=None if out is None else out[0])
    order = [*batch, *rows, *columns]
    product = product.reshape([sizes[c] for c in order])
    return product.permute([order.index(c) for c in output])


def _room(shape: Sequence[int], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """Where a large result that nobody differentiates can be written."""
    if x.requires_grad or y.requires_grad or x.dtype != y.dtype or transforming():
        return None
    return room(list(shape), x)


_NARROW = 128
"""A matrix product with fewer columns is faster as the transpose of the other order (twice, at 27 columns)."""


def _ordered(x: torch.Tensor, labels: str, order: list[str]) -> torch.Tensor:
    """x with its dimensions in an order, of size 1 where it has none."""
    x = x.permute([labels.index(c) for c in order if c in labels])
    return x[tuple(slice(None) if c in labels else None for c in order)]


def squeezed(terms: list[Term]) -> list[Term]:
    """The terms without dimensions of size 1, so that the cost model sees what is there."""
    out = []
    for labels, x in terms:
        kept = [i for i, size in enumerate(x.shape) if size != 1]
        out.append(("".join(labels[i] for i in kept), x.reshape([x.shape[i] for i in kept])))
    return out


def present(labels: str, terms: list[Term]) -> str:
    """Those of the labels that occur in the terms."""
    return "".join(c for c in labels if any(c in other for other, _ in terms))


def widened(terms: list[Term]) -> list[Term]:
    """Half precision accumulates in float32."""
    low = (torch.float16, torch.bfloat16)
    wide = torch.float32 if all(x.dtype in low for _, x in terms) else None
    if wide is None:
        wide = max((x.dtype for _, x in terms), key=lambda d: torch.finfo(d).bits)
    return [(labels, x.to(wide)) for labels, x in terms]


def narrowed(terms: list[Term], label: str, start: int, stop: int) -> list[Term]:
    """The terms for a range of one label."""
    return [
        (labels, x.narrow(labels.index(label), start, stop - start) if label in labels else x) for labels, x in terms
    ]


def stacked(alike: list[list[Term]]) -> list[Term]:
    """Several lists of terms with the same labels as one, whose label S enumerates them."""
    return [("S" + labels, torch.stack([terms[i][1] for terms in alike])) for i, (labels, _) in enumerate(alike[0])]


def twice(terms: list[Term], others: list[Term], output: str) -> list[Term]:
    """The terms of a product of two contractions: what is summed within one gets its own labels in the other."""
    return [*terms, *_renamed(others, {c: c for c in output + "VN"})]


def paired(terms: list[Term], output: str) -> list[Term]:
    """The terms of the products of each column of each sample (V, N) with each of each other (W, M)."""
    return [*terms, *_renamed(terms, {**{c: c for c in output}, "V": "W", "N": "M"})]


def _renamed(terms: list[Term], names: dict[str, str]) -> list[Term]:
    """The terms with the names given, and fresh ones for all other labels."""
    free = iter("ZYXUTRQPOLKJIHGFEDCBA")
    inner = sorted({c for labels, _ in terms for c in labels} - set(names))
    renamed = str.maketrans({**names, **{c: next(free) for c in inner}})
    return [(labels.translate(renamed), x) for labels, x in terms]
