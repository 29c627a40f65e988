"""The Kronecker product that is near, or nearest, to a parameter's own block: a matrix for each side of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch

from invfunc import tree
from invfunc.kronecker.matrix import Kronecker
from invfunc.kronecker.origin import Origin
from invfunc.reductions.block import KroneckerReduction
from invfunc.reductions.reduction import Found, Over, State, States


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
    """How many of the matrices, the first ones, are sums over samples and columns."""

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

    def learned_apart(self, states: States, found: Found) -> dict[int, torch.Tensor]:
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
