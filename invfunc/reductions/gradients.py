"""Reductions of a single column: of the shares of the gradient."""

from __future__ import annotations

from typing import Any

import torch

from invfunc.contract import joined
from invfunc.errors import ArgumentError
from invfunc.loss.square_root import safe_root
from invfunc.per_sample import Shares
from invfunc.reductions.reduction import Found, Reduction, State


class EachSample(Reduction):
    """The shares themselves, one sample after the other."""

    each = (0,)
    forms = "all"

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        return (shares.dense().squeeze(0),)

    def over_samples(self, a: State, b: State) -> State:
        return (*a, *b)

    def finish(self, state: State, found: Found) -> list[Any]:
        return [joined(list(state))]

    def zero(self, leaf: torch.Tensor, found: Found) -> list[Any]:
        return [leaf.new_zeros(found.n, *leaf.shape)]

    def without(self, leaf: torch.Tensor, samples: int, columns: int) -> State:
        return (leaf.new_zeros(samples, *leaf.shape),)


class SquaredNorms(EachSample):
    """`sum_p G[n, p]^2` of each sample."""

    forms = "no"

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        return (shares.norms(),)

    def zero(self, leaf: torch.Tensor, found: Found) -> list[Any]:
        return [leaf.new_zeros(found.n)]

    def without(self, leaf: torch.Tensor, samples: int, columns: int) -> State:
        return (leaf.new_zeros(samples),)


class CentredSquares(Reduction):
    """`sum_n (G[n] - mean G)^2 / (n - correction)`, merged by the formula of Chan, Golub and LeVeque (1979)."""

    forms = "blocks"

    def __init__(self, correction: float) -> None:
        self.correction = correction

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        total, centred = shares.moments()
        return total.new_tensor(shares.samples.count), total, centred

    def over_samples(self, a: State, b: State) -> State:
        (m, total, centred), (n, other, more) = a, b
        apart = other / n - total / m
        return m + n, total + other, centred + more + apart.square() * (m * n / (m + n))

    def finish(self, state: State, found: Found) -> list[Any]:
        return [state[2] / self._divisor(found.n)]

    def zero(self, leaf: torch.Tensor, found: Found) -> list[Any]:
        return [torch.zeros_like(leaf) / self._divisor(found.n)]

    def without(self, leaf: torch.Tensor, samples: int, columns: int) -> State:
        wide = torch.promote_types(leaf.dtype, torch.float32)
        return leaf.new_tensor(samples, dtype=wide), torch.zeros_like(leaf), torch.zeros_like(leaf)

    def _divisor(self, n: int) -> float:
        if n - self.correction <= 0:
            raise ArgumentError(f"correction={self.correction} leaves no divisor for the shares of {n} samples.")
        return n - self.correction


class SumAndCentredSquares(CentredSquares):
    """The gradient, and the centred squares of its shares."""

    several = True

    def finish(self, state: State, found: Found) -> list[Any]:
        return [state[1], *super().finish(state, found)]

    def zero(self, leaf: torch.Tensor, found: Found) -> list[Any]:
        return [torch.zeros_like(leaf), *super().zero(leaf, found)]

    def assemble(self, trees: list[Any], found: Found) -> Any:
        return tuple(trees)


class ClippedSum(Reduction):
    """`sum_n min(1, max_norm / |G[n]|) G[n]`, with the norm over all parameters."""

    several = True
    before = SquaredNorms()

    def __init__(self, max_norm: float | torch.Tensor) -> None:
        self.max_norm = max_norm
        self.constants = (max_norm,) if isinstance(max_norm, torch.Tensor) else ()

    def joint(self, states: list[State], zeros: torch.Tensor) -> torch.Tensor:
        return safe_root(sum((torch.cat(state) for state in states), zeros))

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        assert joint is not None
        return (shares.weighted((joint / self.max_norm).clamp(min=1).reciprocal()),)

    def assemble(self, trees: list[Any], found: Found) -> Any:
        return trees[0], found.joint
