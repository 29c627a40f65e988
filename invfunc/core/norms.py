"""Norms of shares that are products of two factors, from the products of positions with positions ("ghost norms").

`|sum_r s_r a_r^T|^2 = sum_qr (s_q . s_r) (a_q . a_r)` forms no share, but its sum may cancel: its rounding is that of
`|s|^2 |a|^2`. So it is taken in the precision of the factors where it turns out to be not much less than this.
"""

from __future__ import annotations

import math
from functools import lru_cache, reduce

import torch

from invfunc import thresholds
from invfunc._torch.functorch import dual_level, transforming
from invfunc._torch.values import anywhere, fake
from invfunc.linear_algebra.contract import (
    Shape,
    Term,
    cancel,
    contract,
    cost,
    crosses,
    instantiated,
    largest,
    narrowed,
    present,
    shapes,
    twice,
)


def tried(terms: list[Term], output: str) -> bool:
    """Tells whether norms may come from products of positions in float32, if these turn out not to cancel.

    That is where they are cheaper than shares and take no more memory, nobody waits for what is read, and nobody
    differentiates it.
    """
    x = terms[0][1]
    if not cancel(terms) or x.device.type not in thresholds.GHOST_ON or fake(x):
        return False
    moved = any(x.requires_grad for _, x in terms) or transforming() or dual_level()  # a derivative may cancel
    return not moved and _cheaper(shapes(terms), output)


@lru_cache(maxsize=4096)
def _cheaper(terms: tuple[Shape, ...], output: str) -> bool:
    pair, kept, instance = twice(terms, terms, output), present("N", terms), present("N" + output, terms)
    inner = "".join(labels for labels, _ in terms)
    if any(inner.count(c) == 1 for c in {*inner} - {*instance}) or not crosses(pair, output):
        return False  # a sum within one factor is not in the bound
    share = math.prod(size for c, size in _sizes(terms).items() if c in instance)
    return thresholds.GHOST_PRODUCTS * largest(pair, kept) <= share and cost(pair, kept) < instantiated(terms, instance)


def _positions(terms: tuple[Shape, ...], output: str) -> int:
    """The number of positions that are summed over."""
    return math.prod(size for c, size in _sizes(terms).items() if c not in "N" + output)


def _sizes(terms: tuple[Shape, ...]) -> dict[str, int]:
    return {c: size for labels, shape in terms for c, size in zip(labels, shape, strict=True)}


def narrow_norms(terms: list[Term], output: str) -> torch.Tensor | None:
    """`sum_p G[n, p]^2` in the precision of the terms; None where that of a sample cancels too much, or may have left
    the range of numbers on the way."""
    norms = _by_positions(terms, output)
    sizes = [_size(labels, x) for labels, x in terms]
    bound = reduce(torch.mul, sizes).square()
    most = thresholds.GHOST_CANCELS * _positions(shapes(terms), output)
    within = bound.isfinite() & (reduce(torch.minimum, sizes) >= torch.finfo(norms.dtype).tiny ** 0.4)
    return None if anywhere(~(within & (bound <= most * norms))) else norms


def _by_positions(terms: list[Term], output: str) -> torch.Tensor:
    """The norms by products of positions; of many, those of the last half with the first one stand for two."""
    kept, sizes = present("N", terms), _sizes(shapes(terms))
    shared = set.intersection(*({*labels} for labels, _ in terms)) - {*"N" + output}
    label = max(sorted(shared), key=sizes.__getitem__, default="")
    count = sizes.get(label, 0)
    if count < max(2, thresholds.HALVED):
        return contract(twice(terms, terms, output), kept)
    first, last = narrowed(terms, label, 0, count // 2), narrowed(terms, label, count // 2, count)
    times = terms[0][1].new_ones(count)
    times[count // 2 :] = 2
    below = contract([*twice(terms, first, output), (label, times)], kept)
    return below + contract(twice(last, last, output), kept)


def _size(labels: str, x: torch.Tensor) -> torch.Tensor:
    """The norm of a factor, for each sample if it has any."""
    dims = [d for d, c in enumerate(labels) if c != "N"]
    return torch.linalg.vector_norm(x, dim=dims) if dims else x.abs()
