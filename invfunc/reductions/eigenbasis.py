"""The curvature of a parameter in the eigenbasis of its Kronecker factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from invfunc import tree
from invfunc.kronecker.matrix import Kronecker, decomposed, rounded
from invfunc.kronecker.places import Unfactored
from invfunc.reductions.block import KroneckerReduction
from invfunc.reductions.kronecker_factors import KroneckerFactors
from invfunc.reductions.reduction import Found, Over, State, States


def bases_of(matrices: Sequence[Kronecker]) -> list[Kronecker]:
    """The eigendecomposition of each; all of it is NaN if a factor has NaN or inf in it."""
    bad = [~torch.stack([f.isfinite().all() for f in K.factors]).all() for K in matrices]
    found = decomposed([_filled(K, where, 0) for K, where in zip(matrices, bad, strict=True)])
    each = zip(matrices, found, bad, strict=True)
    return [_filled(rounded(K, basis), where, torch.nan) for K, basis, where in each]


def _filled(matrix: Kronecker, where: torch.Tensor, value: float) -> Kronecker:
    return tree.map_leaves(lambda x: x.masked_fill(where, value), matrix)


class InEigenbasis(KroneckerReduction):
    """`sum_vn (Q^T G[v, n])^2` for the eigenvectors Q of the factors, which the phase before finds."""

    paired = True
    rooted = KroneckerFactors.rooted

    def __init__(self, factors: KroneckerFactors, bases: dict[int, Kronecker | None] | None = None) -> None:
        self.before, self.factors, self.gaps = factors, factors, factors.gaps
        self.bases = bases

    def learned_apart(self, states: States, found: Found) -> dict[int, Kronecker | None]:
        matrices = {i: self.factors.finish(state, found)[0] for i, state in states.items()}
        there = {i: K for i, K in matrices.items() if K is not None}
        return {**matrices, **dict(zip(there, bases_of([*there.values()]), strict=True))}

    def knowing(self, learned: dict[int, Kronecker | None]) -> InEigenbasis:
        return InEigenbasis(self.factors, learned)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return *super().init(leaf, n, columns), None

    def step(self, shares: Any) -> State:
        assert self.bases is not None
        basis = self.bases[shares.place]
        if basis is None:
            return None, None
        assert basis.values is not None
        if len(basis.factors) == 1 and basis.is_diagonal(0):  # it is in its eigenbasis
            return basis, shares.square_sum().reshape(basis.values.shape)
        try:
            return basis, shares.rotated(basis, self.factors.joined).square_sum()
        except Unfactored:  # its factor is the block itself
            block, (q,) = shares.outer(), basis.factors
            return basis, (q.mT.to(block.dtype) @ block @ q.to(block.dtype)).diagonal()

    def merge(self, a: State, b: State, over: Over) -> State:
        if a[1] is None or b[1] is None:
            return b if a[1] is None else a
        return a[0], a[1] + b[1]

    def scaled(self, state: State, by: float) -> State:
        basis, values = state
        return basis, None if values is None else values * by**2

    def finish(self, state: State, found: Found) -> list[Any]:
        matrix, values = state
        if matrix is None:
            return [None]
        return [matrix.eigen() if values is None else replace(matrix, values=values)]
