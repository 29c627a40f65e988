"""Kronecker factors of the curvature of a parameter."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch

from invfunc.kronecker.matrix import Kronecker
from invfunc.kronecker.origin import Joint, Origin
from invfunc.kronecker.places import Place, Unfactored
from invfunc.reductions.block import KroneckerReduction
from invfunc.reductions.kept_factors import DiagonalFactors, Factors, ParameterFactors, Refused
from invfunc.reductions.nearest import nearest
from invfunc.reductions.reduction import Found, Over, Shortcuts, State


class KroneckerFactors(KroneckerReduction):
    """B, the sum over columns and samples of `s s^T`, and A, the mean over samples of `a a^T`."""

    rooted = "known"
    paired = True
    sums = True  # of n samples each on its own

    def __init__(self, sharing: str, joint: bool, unsupported: str, most: float, degree: int | None = 1) -> None:
        """`most` is the largest dimension of a factor that is kept whole; `degree` the power of the loss's scale that B
        has, None if its n is not that of the samples reduced."""
        self.sharing, self.joined, self.unsupported, self.degree = sharing, joint, unsupported, degree
        self.most = most
        self.gaps = joint or unsupported == "skip"
        self.shortcuts: Shortcuts = "positions" if sharing == "expand" else "narrow"

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        (none,) = super().init(leaf, n, columns)
        inputs = float(n) if self.sharing == "backpack" else 0.0  # else samples count that are read
        return (replace(none, origin=replace(none.origin, inputs=inputs)),)

    def step(self, shares: Any) -> State:
        if self.joined and shares.weight is not None:
            return (None,)
        name, shape = shares.name(shares.place), shares.leaf.shape
        try:
            return (ParameterFactors(name, shares.kronecker(self.sharing, self.joined, self.most)),)
        except Unfactored as why:
            if sum(n != 1 for n in shape) < 2:  # its block is no larger than a factor of a matrix
                places = [Place(tuple(range(len(shape))), shape.numel())]
                block = shares.square_sum().flatten() if shape.numel() > self.most else shares.outer()
                whole = Factors(block, None, 1.0, places, "", shape)
                return (ParameterFactors(name, {"whole": whole}),)
            if self.unsupported == "skip":
                return (None,)
            if self.unsupported == "diagonal":
                return (DiagonalFactors(name, {}, shares.square_sum()),)
            return (Refused(name, {}, str(why)),)

    def scaled(self, state: State, by: float) -> State:
        return (state[0].scaled(by**2) if isinstance(state[0], ParameterFactors) else state[0],)

    def merge(self, a: State, b: State, over: Over) -> State:
        if a[0] is None or b[0] is None:
            return (None,)
        if isinstance(a[0], Kronecker) or isinstance(b[0], Kronecker):  # of samples that do not reach it
            return b if isinstance(a[0], Kronecker) else a
        return (a[0].joined(b[0], samples=over == "samples"),)

    def finish(self, state: State, found: Found) -> list[Any]:
        kept: ParameterFactors | Kronecker | None = state[0]
        if isinstance(kept, Refused):
            found.refused[kept.name] = kept.why
            return [None]
        if kept is None or isinstance(kept, Kronecker):
            return [kept]
        origin = Origin(kept.name, found.n if self.sums else None, degree=self.degree)
        if isinstance(kept, DiagonalFactors):
            dims, shape = tuple(range(kept.values.ndim)), kept.values.shape
            return [Kronecker((kept.values.flatten(),), (dims,), shape, origin=origin)]
        matrices = [self._matrix(factors, origin, found) for factors in kept.roles.values()]
        return matrices if len(matrices) == 1 else [nearest(matrices)]

    def _matrix(self, found: Factors, origin: Origin, known: Found) -> Kronecker:
        shape, blocks, (first, *rest) = found.shape, found.blocks, found.places
        b = found.b if blocks is None else _flat(found.b)
        if found.a is None:
            return Kronecker((b,), (first.dims,), shape, None, blocks, origin)
        inputs = float(known.n if self.sharing == "backpack" else found.positions)  # it does not divide by positions
        a = found.a / (inputs or known.n)
        if found.bias:
            joint = Joint(found.bias, shape, first.dims, rest[0].dims, blocks or (1,) * len(shape))
            origin = replace(origin, inputs=inputs, read=1, joint=joint)
            sizes = [math.prod(x.shape[:-1]) for x in (found.b, a)] if blocks else [len(found.b), len(a)]
            count = math.prod(blocks or (1,))
            shape, blocks = torch.Size([sizes[0], sizes[1] // count]), (count, 1) if blocks else None
            return Kronecker((b, _flat(a)), ((0,), (1,)), shape, blocks=blocks, origin=origin)
        groups, factors, read = (first.dims, rest[0].dims), (b, a if found.blocks is None else _flat(a)), 1
        if groups[0] > groups[1]:
            groups, factors, read = groups[::-1], factors[::-1], 0
        origin = Origin(origin.name, origin.n, inputs, read, origin.degree)
        return Kronecker(factors, groups, shape, None, blocks, origin)


class ChainFactors(KroneckerFactors):
    """The factors of KFRA, whose recursion needs all samples and outputs at once."""

    axes = ()
    sums = False


def _flat(x: torch.Tensor) -> torch.Tensor:
    """A factor, of which the diagonals `[g, k, 1]` of blocks become `[g, k]`."""
    return x.squeeze(-1) if x.ndim == 3 and x.shape[1] > 1 else x
