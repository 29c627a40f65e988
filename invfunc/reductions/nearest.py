"""The Kronecker product that is nearest to a sum of several."""

from __future__ import annotations

import torch

from invfunc.kronecker.matrix import Kronecker
from invfunc.kronecker.origin import derived
from invfunc.reductions.block import added


def nearest(terms: list[Kronecker]) -> Kronecker:
    """The nearest Kronecker product to a sum of several over the same dims, in the Frobenius norm.

    With the terms `B_k kron A_k`, and `<,>` for the sum of the products of entries: the sum is a matrix
    `sum_k vec(B_k) vec(A_k)^T` with its entries in another place, whose best approximation of rank one is
    `vec(B) vec(A)^T` with `A = sum_k y_k A_k` and `B = sum_k x_k B_k / <A, A>`, `x_k = <A, A_k>`, where y is the first
    eigenvector of `<B_k, B_l>` times `<A_k, A_l>`. Factors without negative eigenvalues have products that are not
    negative, so that y and x are not either, and neither are the eigenvalues of A and B.
    """
    if len(terms) == 1:
        return terms[0]
    first, last = ([term.factors[i] for term in terms] for i in (0, -1))
    over = _products(last)
    power = _products(first) @ over
    for _ in range(_SQUARED):
        size = power.diagonal().sum()
        power = power / torch.where(size == 0, torch.ones_like(size), size)
        power = power @ power
    y = power.sum(1)
    x, length = over @ y, (y @ over @ y)
    x = x / torch.where(length == 0, torch.ones_like(length), length)
    factors = [added([c * f.to(c.dtype) for c, f in zip(cs, fs, strict=True)]) for cs, fs in ((x, first), (y, last))]
    return Kronecker(tuple(factors), terms[0].groups, terms[0].shape, origin=derived(terms[0].origin))


_SQUARED = 40
"""A power of 2^40 leaves the first eigenvector, or any where two eigenvalues are equal to rounding."""


def _products(factors: list[torch.Tensor]) -> torch.Tensor:
    """`[K, K]`"""
    wide = [f.to(torch.promote_types(f.dtype, torch.float32)) for f in factors]
    return torch.stack([torch.stack([_product(f, g) for g in wide]) for f in wide])


def _product(f: torch.Tensor, g: torch.Tensor) -> torch.Tensor:
    if f.ndim != g.ndim:
        f, g = (x.diagonal() if x.ndim == 2 else x for x in (f, g))
    return (f * g).sum()
