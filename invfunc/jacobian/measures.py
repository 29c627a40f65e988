"""What a statistic keeps of the shares, and how it folds over samples, columns and parameters."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from invfunc import tree
from invfunc.errors import ArgumentError
from invfunc.jacobian.shares import Shares

State = tuple[torch.Tensor, ...]


@dataclass
class Finished:
    """The results of all parameters, before they become what the caller gets."""

    leaves: list[Any]
    unflatten: Callable[[list[Any]], Any]
    """From leaves to a tree like the parameters."""
    joint: torch.Tensor | None
    outputs: list[torch.Size]
    """The shapes of the model's outputs for one sample."""
    structure: Any
    """Of the outputs."""


class Measure:
    """A fold: `partial` of one block, `over_samples` and `over_columns` of two of them, `finish` of the whole."""

    axes: ClassVar[tuple[str, ...]] = ("outputs", "samples", "params")
    """What it folds over."""
    each: ClassVar[tuple[int, ...]] = ()
    """The axes of the result of a parameter that count the samples."""
    several: ClassVar[bool] = False
    """Whether the caller gets a tuple of results."""
    rooted: ClassVar[bool] = False
    """Whether the columns have to be those of a square root, without weights."""
    before: ClassVar[Measure | None] = None
    """What has to be known of all parameters before the first partial result; `joint` makes one tensor of it."""

    def joint(self, states: list[State], zeros: torch.Tensor) -> torch.Tensor:
        """Of what `before` kept of the parameters that are reached; `zeros` has an entry for each sample."""
        raise NotImplementedError  # only where there is something before

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        """What is kept of one parameter and one block."""
        raise NotImplementedError  # each statistic says it

    def over_samples(self, a: State, b: State) -> State:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    def over_columns(self, a: State, b: State) -> State:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    def finish(self, state: State, n: int) -> Any:
        """The result of one parameter, of n samples: a tensor, or a tuple of several."""
        return state[0]

    def zero(self, leaf: torch.Tensor, n: int, columns: int) -> Any:
        """The result of a parameter that has no influence."""
        return torch.zeros_like(leaf)

    def assemble(self, found: Finished) -> Any:
        """What the caller gets."""
        return found.unflatten(found.leaves)


class EachSample(Measure):
    """The shares themselves, one sample after the other."""

    each = (0,)

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        return (shares.dense().squeeze(0),)

    def over_samples(self, a: State, b: State) -> State:
        return (*a, *b)

    def finish(self, state: State, n: int) -> torch.Tensor:
        return state[0] if len(state) == 1 else torch.cat(state)

    def zero(self, leaf: torch.Tensor, n: int, columns: int) -> torch.Tensor:
        return leaf.new_zeros(n, *leaf.shape)


class SquaredNorms(EachSample):
    """`sum_p G[n, p]^2` of each sample."""

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        return (shares.norms(),)

    def zero(self, leaf: torch.Tensor, n: int, columns: int) -> torch.Tensor:
        return leaf.new_zeros(n)


class SquaresOfEach(EachSample):
    """`sum_v G[v, n]^2` of each sample."""

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        return (shares.square_sum(each=True),)


class SumOfSquares(Measure):
    """`sum_vn G[v, n]^2`."""

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        return (shares.square_sum(),)


class CentredSquares(Measure):
    """`sum_n (G[n] - mean G)^2 / (n - correction)`, merged by the formula of Chan, Golub and LeVeque (1979)."""

    def __init__(self, correction: float) -> None:
        self.correction = correction

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        total, centred = shares.moments()
        return total.new_tensor(shares.samples.count), total, centred

    def over_samples(self, a: State, b: State) -> State:
        (m, total, centred), (n, other, more) = a, b
        apart = other / n - total / m
        return m + n, total + other, centred + more + apart.square() * (m * n / (m + n))

    def finish(self, state: State, n: int) -> Any:
        return state[2] / self._divisor(n)

    def zero(self, leaf: torch.Tensor, n: int, columns: int) -> Any:
        return torch.zeros_like(leaf) / self._divisor(n)

    def _divisor(self, n: int) -> float:
        if n - self.correction <= 0:
            raise ArgumentError(f"correction={self.correction} leaves no divisor for the shares of {n} samples.")
        return n - self.correction


class SumAndCentredSquares(CentredSquares):
    """The gradient as well."""

    several = True

    def finish(self, state: State, n: int) -> tuple[torch.Tensor, torch.Tensor]:
        return state[1], super().finish(state, n)

    def zero(self, leaf: torch.Tensor, n: int, columns: int) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.zeros_like(leaf), super().zero(leaf, n, columns)

    def assemble(self, found: Finished) -> Any:
        return tuple(found.unflatten([leaf[i] for leaf in found.leaves]) for i in (0, 1))


class ClippedSum(Measure):
    """`sum_n min(1, max_norm / |G[n]|) G[n]`, with the norm over all parameters."""

    several = True
    before = SquaredNorms()

    def __init__(self, max_norm: float) -> None:
        self.max_norm = max_norm

    def joint(self, states: list[State], zeros: torch.Tensor) -> torch.Tensor:
        square = sum((torch.cat(state) for state in states), zeros)
        some = square > 0  # the square root has no derivative at 0
        return torch.where(some, torch.where(some, square, 1).sqrt(), 0)

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        assert joint is not None
        return (shares.weighted((joint / self.max_norm).clamp(min=1).reciprocal()),)

    def assemble(self, found: Finished) -> Any:
        return found.unflatten(found.leaves), found.joint


class InnerProducts(Measure):
    """`sum_p G[v, n, p] G[w, m, p]`, of all parameters together or of each."""

    axes = ("params",)
    each = (0, 2)

    def __init__(self, per_parameter: bool) -> None:
        self.per_parameter = per_parameter

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        return (shares.products(),)

    def finish(self, state: State, n: int) -> torch.Tensor:
        return state[0].permute(1, 0, 3, 2)

    def zero(self, leaf: torch.Tensor, n: int, columns: int) -> torch.Tensor:
        return leaf.new_zeros(n, columns, n, columns)

    def assemble(self, found: Finished) -> Any:
        shaped = [_with_outputs(_with_outputs(k, 3, found.outputs), 1, found.outputs) for k in found.leaves]
        return found.unflatten(shaped) if self.per_parameter else sum(shaped[1:], shaped[0])


class JacobianRows(Measure):
    """The columns themselves, one after the other."""

    each = (0,)

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        return (shares.dense(),)

    def over_samples(self, a: State, b: State) -> State:
        return (torch.cat([a[0], b[0]], 1),)

    def over_columns(self, a: State, b: State) -> State:
        return (torch.cat([a[0], b[0]]),)

    def finish(self, state: State, n: int) -> torch.Tensor:
        return state[0].movedim(0, 1)

    def zero(self, leaf: torch.Tensor, n: int, columns: int) -> torch.Tensor:
        return leaf.new_zeros(n, columns, *leaf.shape)

    def assemble(self, found: Finished) -> Any:
        start, trees = 0, []
        for one in found.outputs:
            stop = start + math.prod(one)
            trees.append(found.unflatten([_with_outputs(j[:, start:stop], 1, [one]) for j in found.leaves]))
            start = stop
        return tree.unflatten(trees, found.structure)


class SquareRoot(JacobianRows):
    """The columns as they are: `[V, n, *p]`."""

    each = (1,)
    rooted = True

    def finish(self, state: State, n: int) -> torch.Tensor:
        return state[0]

    def zero(self, leaf: torch.Tensor, n: int, columns: int) -> torch.Tensor:
        return leaf.new_zeros(columns, n, *leaf.shape)

    def assemble(self, found: Finished) -> Any:
        return found.unflatten(found.leaves)


def _with_outputs(x: torch.Tensor, dim: int, outputs: Sequence[torch.Size]) -> torch.Tensor:
    """The dimension that counts the columns as those of the only output."""
    (one,) = outputs
    return x.reshape(*x.shape[:dim], *one, *x.shape[dim + 1 :])
