"""The Kronecker product that is near, or nearest, to a parameter's own block: a matrix for each side of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch

from invfunc.kronecker import Kronecker, Origin
from invfunc.per_sample import Shares
from invfunc.reductions.block import Block
from invfunc.reductions.exchange import Exchange, Sums, of_triangle, triangle
from invfunc.reductions.reduction import Found, Over, State


class Sides(Block):
    """Of a parameter as a matrix G `[first dim, all others]`: two matrices, of one side each, and its shape.

    Of a parameter with one dim it is the block itself, and None.
    """

    rooted, forms, squares, shortcuts = "all", "blocks", True, "narrow"
    summed: ClassVar[int]
    """How many of the matrices, the first ones, are sums over samples and columns."""

    def step(self, shares: Shares) -> State:
        shape = shares.leaf.shape
        return (shares.outer(), None, shape) if is_vector(shape) else (*self.of(shares), shape)

    def of(self, shares: Shares) -> tuple[torch.Tensor, torch.Tensor]:
        """The two matrices, of a block of samples."""
        raise NotImplementedError  # each says them

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        if is_vector(leaf.shape):
            return leaf.new_zeros(leaf.numel(), leaf.numel()), None, leaf.shape
        b, a = (leaf.new_zeros(size, size) for size in (len(leaf), leaf[0].numel()))
        return b, a, leaf.shape

    def merge(self, a: State, b: State, over: Over) -> State:
        sums = [None if x is None else x + y for x, y in zip(a[: self.summed], b, strict=False)]
        return self._with(b if a[1] is None else a, sums)

    def scaled(self, state: State, by: float) -> State:
        return self._with(state, [None if x is None else x * by**2 for x in state[: self.summed]])

    def across(self, place: int, own: State, each: Sequence[State]) -> Exchange:
        """Of symmetric matrices, a triangle says all."""
        mine = [x for x in own[: self.summed] if x is not None]
        sums = yield Sums([triangle(x) for x in mine])
        return self._with(own, [*map(of_triangle, sums, mine), None][: self.summed])

    def _with(self, state: State, summed: list[Any]) -> State:
        return *summed, *state[self.summed :]

    def finish(self, state: State, found: Found) -> list[Any]:
        matrix, other, shape = state
        dims, origin = tuple(range(len(shape))), Origin(n=None)
        if other is None:
            return [Kronecker((matrix,), (dims,), shape, origin=origin)]
        b, a = self.product(matrix, other)
        by = (_trace(a) / _trace(b)).sqrt()
        return [Kronecker((b * by, a / by), (dims[:1], dims[1:]), shape, origin=origin)]

    def product(self, matrix: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The factors of the first dim and of the others, of the two that are kept."""
        raise NotImplementedError  # each says them


class BothSides(Sides):
    """`sum_vn G G^T` and `sum_vn G^T G`, whose product is divided by the trace that they share."""

    summed = 2

    def of(self, shares: Shares) -> tuple[torch.Tensor, torch.Tensor]:
        return shares.side(0), shares.side(1)

    def product(self, matrix: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return matrix, other / _trace(matrix)


class OneSide(Sides):
    """`sum_vn G A G^T` for an A of norm 1 that the phase before finds, or `sum_vn G^T B G` for its B.

    The first of the phases has A = 1.
    """

    summed = 1

    def __init__(self, phase: int, known: dict[int, torch.Tensor] | None = None) -> None:
        self.phase, self.known = phase, known or {}
        self.before = OneSide(phase - 1) if phase else None

    @property
    def first(self) -> bool:
        """Whether it is of the first dim."""
        return self.phase % 2 == 0

    def learned_of(self, state: State, found: Found) -> torch.Tensor:
        return state[0] / _but_zero(torch.linalg.matrix_norm(state[0]))

    def knowing(self, learned: dict[int, torch.Tensor]) -> OneSide:
        return OneSide(self.phase, learned)

    def of(self, shares: Shares) -> tuple[torch.Tensor, torch.Tensor]:
        other = self.known.get(shares.place)
        if other is None:
            size = shares.leaf[0].numel() if self.first else len(shares.leaf)
            other = torch.eye(size, dtype=shares.leaf.dtype, device=shares.leaf.device)
        return shares.side(not self.first, other), other

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        """Samples that do not reach a parameter do not tell the other matrix."""
        b, a, shape = super().init(leaf, n, columns)
        return b if self.first or a is None else a, None, shape

    def finish(self, state: State, found: Found) -> list[Any]:
        matrix, other, shape = state
        if other is None and not is_vector(shape):
            size = shape.numel() // len(matrix)
            other = matrix.new_zeros(size, size)
        return super().finish((matrix, other, shape), found)

    def product(self, matrix: torch.Tensor, other: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (matrix, other) if self.first else (other, matrix)


def is_vector(shape: Sequence[int]) -> bool:
    """Whether a parameter has one side only."""
    return sum(size != 1 for size in shape) < 2


def _trace(x: torch.Tensor) -> torch.Tensor:
    return _but_zero(x.diagonal().sum())


def _but_zero(x: torch.Tensor) -> torch.Tensor:
    return torch.where(x == 0, torch.ones_like(x), x)
