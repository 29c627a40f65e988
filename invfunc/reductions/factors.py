"""Reductions whose result is a Kronecker product for each parameter."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar

import torch

from invfunc import tree
from invfunc.errors import ArgumentError
from invfunc.kronecker.matrix import Joint, Kronecker, Origin, decomposed, derived, rounded
from invfunc.kronecker.places import Place, Unfactored
from invfunc.reductions.reduction import Found, Over, Reduction, Shortcuts, State, States


class KroneckerReduction(Reduction):
    """A reduction whose result is a `Kronecker` for each parameter."""

    squares = True
    most: float = math.inf
    """The largest dimension of a factor that is kept whole."""

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        dims = tuple(range(leaf.ndim))
        groups = (dims[:1], dims[1:]) if leaf.ndim > 1 else (dims,)
        zeros = tuple(leaf.new_zeros(math.prod(leaf.shape[d] for d in group)) for group in groups)
        return (Kronecker(zeros, groups, leaf.shape, origin=Origin(n=n, reached=False)),)

    def bound(self, shape: torch.Size) -> list[list[int]]:
        sizes = [shape[0], shape[1:].numel()] if shape.count(1) < len(shape) - 1 else [shape.numel()]
        return [[size] if size > self.most else [size, size] for size in sizes]

    def assemble(self, results: list[Any], found: Found) -> Any:
        if found.refused:
            which = "; ".join(f"{name}: {why}" for name, why in found.refused.items())
            raise ArgumentError(
                f"there are no Kronecker factors of {which}. They are of parameters that a linear layer, convolution, "
                "embedding, scale or shift reads. Pass unsupported='diagonal' for the diagonals of their blocks or "
                "unsupported='skip' for None in their places, close over them, or keep them in another argument."
            )
        return results[0]


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of symmetric matrices; a vector stands for a diagonal matrix."""
    if len(parts) == 1:
        return parts[0]
    dense = max([x.ndim for x in parts])
    found = parts[0] if parts[0].ndim == dense else torch.diag_embed(parts[0])
    for x in parts[1:]:
        found = found + (x if x.ndim == dense else torch.diag_embed(x))
    return found


def nearest(terms: list[Kronecker]) -> Kronecker:
    """The nearest Kronecker product to a sum of several over the same dims, in the Frobenius norm.

    With the terms `B_k kron A_k`, and `<,>` for the sum of the products of entries: the sum is a matrix
    `sum_k vec(B_k) vec(A_k)^T` with its entries in another place, whose best approximation of rank one is
    `vec(B) vec(A)^T` with `A = sum_k y_k A_k` and `B = sum_k x_k B_k / <A, A>`, `x_k = <A, A_k>`, where y is the first
    eigenvector of `<B_k, B_l>` times `<A_k, A_l>`. Factors without negative eigenvalues have products that are not
    negative, so that y and x are not either, and neither are the eigenvalues of A and B.
    """
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


@tree.register("b", "a")
@dataclass
class Factors:
    """The factors of one parameter in one role: sums of outer products, in the order of its dims."""

    b: torch.Tensor
    a: torch.Tensor | None
    """None where it has one factor only, or other columns brought it."""
    positions: float
    """Number of them in all samples."""
    places: list[Place]
    bias: str
    """Name of the bias that is one more input, if there is one."""
    shape: torch.Size
    blocks: tuple[int, ...] | None = None

    def joined(self, other: Factors, samples: bool) -> Factors:
        a = self.a if other.a is None else other.a
        if samples and self.a is not None and other.a is not None:
            a = self.a + other.a
        positions = self.positions + other.positions if samples else self.positions
        return replace(self, b=self.b + other.b, a=a, positions=positions)


@tree.register("roles")
@dataclass
class ParameterFactors:
    """The state of one parameter: its factors in each of the roles in which operations read it."""

    name: str
    roles: dict[Hashable, Factors]
    refused: str = ""
    """The reason why it has none."""

    def joined(self, other: ParameterFactors, samples: bool) -> ParameterFactors:
        if self.refused or other.refused:
            return self if self.refused else other
        if (WHOLE in self.roles) != (WHOLE in other.roles):
            why = "part of its gradient comes from operations with factors, part from others"
            return ParameterFactors(self.name, {}, why)
        found = dict(self.roles)
        for role, factors in other.roles.items():
            found[role] = found[role].joined(factors, samples) if role in found else factors
        return replace(self, roles=found)

    def scaled(self, by: float) -> ParameterFactors:
        """With B so many times as large."""
        return replace(self, roles={role: replace(f, b=f.b * by) for role, f in self.roles.items()})


WHOLE = "whole"
"""The role of a parameter whose block of the curvature, or its diagonal, is kept in place of factors."""


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
            small = is_vector(shape)  # its block is no larger than a factor of a matrix
            if not small and self.unsupported == "skip":
                return (None,)
            if not small and self.unsupported == "error":
                return (ParameterFactors(name, {}, str(why)),)
            large = not small or shape.numel() > self.most
            block = shares.square_sum().flatten() if large else shares.outer()
            places = [Place(tuple(range(len(shape))), shape.numel())]
            return (ParameterFactors(name, {WHOLE: Factors(block, None, 1.0, places, "", shape)}),)

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
        if kept is None or isinstance(kept, Kronecker):
            return [kept]
        if kept.refused:
            found.refused[kept.name] = kept.refused
            return [None]
        origin = Origin(kept.name, found.n if self.sums else None, degree=self.degree)
        matrices = [*map(partial(self._matrix, origin, found), kept.roles.values())]
        return matrices if len(matrices) == 1 else [nearest(matrices)]

    def _matrix(self, origin: Origin, known: Found, found: Factors) -> Kronecker:
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

    def learned(self, states: States, found: Found) -> dict[int, Kronecker | None]:
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


@tree.register("matrix", "other")
@dataclass
class Sided:
    """Of a parameter as a matrix G `[first dim, all others]`: two matrices, of one side each.

    Of a parameter with one dim it is the block itself, and None.
    """

    matrix: torch.Tensor
    other: torch.Tensor | None
    shape: torch.Size
    """Of the parameter."""

    def changed(self, summed: list[torch.Tensor]) -> Sided:
        """With other sums in place of the first one, or of both."""
        return replace(self, matrix=summed[0], other=summed[1] if summed[1:] else self.other)


class Sides(KroneckerReduction):
    """A reduction that keeps a matrix for each side of a parameter."""

    rooted, shortcuts = "all", "narrow"
    summed: ClassVar[int]
    """Number of the matrices, the first ones, that are sums over samples and columns."""

    def __init__(self, most: float) -> None:
        """`most` is the largest dimension of a matrix that is kept whole, not as its diagonal."""
        self.most = most

    def step(self, shares: Any) -> State:
        shape = shares.leaf.shape
        if not is_vector(shape):
            return (Sided(*self.of(shares), shape),)
        large = shape.numel() > self.most
        return (Sided(shares.square_sum().flatten() if large else shares.outer(), None, shape),)

    def side(self, shares: Any, last: bool, other: torch.Tensor | None = None) -> torch.Tensor:
        """The factor of the first dim, or of the last ones, or its diagonal."""
        size = shares.leaf.shape[1:].numel() if last else len(shares.leaf)
        return shares.side(last, other, diagonal=size > self.most)

    def of(self, shares: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The two matrices, of a block of samples."""
        raise NotImplementedError  # each says them

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        found = [leaf.new_zeros(form) for form in self.bound(leaf.shape)]
        return (Sided(found[0], found[1] if found[1:] else None, leaf.shape),)

    def merge(self, a: State, b: State, over: Over) -> State:
        pairs = zip(self._sums(a), self._sums(b), strict=True)
        return ((b if a[0].other is None else a)[0].changed([x + y for x, y in pairs]),)

    def scaled(self, state: State, by: float) -> State:
        return (state[0].changed([x * by**2 for x in self._sums(state)]),)

    def _sums(self, state: State) -> list[torch.Tensor]:
        return [x for x in (state[0].matrix, state[0].other)[: self.summed] if x is not None]

    def finish(self, state: State, found: Found) -> list[Any]:
        kept: Sided = state[0]
        dims, origin = tuple(range(len(kept.shape))), Origin(n=None)
        if kept.other is None:
            return [Kronecker((kept.matrix,), (dims,), kept.shape, origin=origin)]
        b, a = self.product(kept.matrix, kept.other)
        by = (_trace(a) / _trace(b)).sqrt()
        return [Kronecker((b * by, a / by), (dims[:1], dims[1:]), kept.shape, origin=origin)]

    def product(self, matrix: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of the first dim and of the others, of the two that are kept."""
        raise NotImplementedError  # each says them


class BothSides(Sides):
    """`sum_vn G G^T` and `sum_vn G^T G`, whose product is divided by the trace that they share."""

    summed = 2

    def of(self, shares: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.side(shares, False), self.side(shares, True)

    def product(self, matrix: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return matrix, other / _trace(matrix)


class OneSide(Sides):
    """`sum_vn G A G^T` for an A of norm 1 that the phase before finds, or `sum_vn G^T B G` for its B.

    The first of the phases has A = 1.
    """

    summed = 1

    def __init__(self, most: float, phase: int, known: dict[int, torch.Tensor] | None = None) -> None:
        super().__init__(most)
        self.phase, self.known = phase, known or {}
        self.before = OneSide(most, phase - 1) if phase else None

    @property
    def first(self) -> bool:
        """Tells whether it is of the first dim."""
        return self.phase % 2 == 0

    def learned(self, states: States, found: Found) -> dict[int, torch.Tensor]:
        matrices = {i: kept.matrix for i, (kept,) in states.items()}
        return {i: matrix / _but_zero(torch.linalg.vector_norm(matrix)) for i, matrix in matrices.items()}

    def knowing(self, learned: dict[int, torch.Tensor]) -> OneSide:
        return OneSide(self.most, self.phase, learned)

    def of(self, shares: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        other = self.known.get(shares.place)
        return self.side(shares, not self.first, other), other

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        """Samples that do not reach a parameter do not tell the other matrix."""
        kept: Sided = super().init(leaf, n, columns)[0]
        matrix = kept.matrix if self.first or kept.other is None else kept.other
        return (Sided(matrix, None, kept.shape),)

    def finish(self, state: State, found: Found) -> list[Any]:
        kept: Sided = state[0]
        if kept.other is None and not is_vector(kept.shape):
            size = kept.shape.numel() // len(kept.matrix)
            ones = kept.matrix.new_ones(size)
            kept = replace(kept, other=ones if size > self.most else ones.diag())
        return super().finish((kept,), found)

    def product(self, matrix: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (matrix, other) if self.first else (other, matrix)


def is_vector(shape: Sequence[int]) -> bool:
    """Tells whether a parameter has one side only."""
    return sum(size != 1 for size in shape) < 2


def _trace(x: torch.Tensor) -> torch.Tensor:
    return _but_zero((x.diagonal() if x.ndim == 2 else x).sum())


def _but_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)
