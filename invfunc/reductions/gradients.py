"""Reductions of a single column: of the shares of the gradient."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from invfunc.errors import ArgumentError
from invfunc.linear_algebra.contract import joined
from invfunc.loss.square_root import safe_root
from invfunc.reductions.exchange import Exchange, Sums
from invfunc.reductions.reduction import Found, Over, Reduction, State, States


class EachSample(Reduction):
    """The shares themselves, one sample after the other."""

    each, row_axis = (0,), 0

    def step(self, shares: Any) -> State:
        return (shares.dense().squeeze(0),)

    def merge(self, a: State, b: State, over: Over) -> State:
        return (*a, *b) if over == "samples" else (joined(list(a)) + joined(list(b)),)

    def across(self, place: int, own: State, each: Sequence[State]) -> Exchange:
        return super().across(place, (joined(list(own)),), each)

    def finish(self, state: State, found: Found) -> list[Any]:
        return [state[0] if len(state) == 1 else joined([*state])]

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(n, *leaf.shape),)


class SquaredNorms(EachSample):
    """`sum_p G[n, p]^2` of each sample."""

    def step(self, shares: Any) -> State:
        return (shares.norms(),)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(n),)


class Norms(SquaredNorms):
    """`|G[n]|` of each sample, over all parameters."""

    whole = True

    def finish(self, state: State, found: Found) -> list[Any]:
        return [safe_root(joined(list(state)))]


class CentredSquares(Reduction):
    """`sum_n (G[n] - mean G)^2 / (n - correction)`, merged by the formula of Chan, Golub and LeVeque (1979)."""

    trees, entrywise = 1, True

    def __init__(self, correction: float) -> None:
        self.correction = correction

    def step(self, shares: Any) -> State:
        total, centred = shares.moments()
        return total.new_full((), shares.count), total, centred  # a fill: no device is waited for

    def merge(self, a: State, b: State, over: Over) -> State:
        (m, total, centred), (n, other, more) = a, b
        apart = other / n - total / m
        return m + n, total + other, centred + more + apart.square() * (m * n / (m + n))

    def across(self, place: int, own: State, each: Sequence[State]) -> Exchange:
        n, total, centred = own
        of_all, whole = yield Sums([n, total])
        apart = total / n.clamp(min=1) - whole / of_all
        return of_all, whole, *(yield Sums([centred + apart.square() * n]))

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        wide = torch.promote_types(leaf.dtype, torch.float32)
        return leaf.new_full((), n, dtype=wide), torch.zeros_like(leaf), torch.zeros_like(leaf)

    def finish(self, state: State, found: Found) -> list[Any]:
        divisor = found.n - self.correction
        if divisor <= 0:
            raise ArgumentError(f"correction={self.correction} leaves no divisor above 0 for {found.n} samples.")
        return [state[2] / divisor]


class SumAndCentredSquares(CentredSquares):
    """The gradient, and the centred squares of its shares."""

    several, trees = True, 2

    def finish(self, state: State, found: Found) -> list[Any]:
        return [state[1], *super().finish(state, found)]

    def assemble(self, results: list[Any], found: Found) -> Any:
        return tuple(results)


class ClippedSum(Reduction):
    """`sum_n min(1, max_norm / |G[n]|) G[n]`, with the norm over all parameters."""

    axes = ("samples",)  # the norm is of all parameters
    several, trees, entrywise = True, 1, True
    before = first = Norms()

    def __init__(self, max_norm: float | torch.Tensor, norms: torch.Tensor | None = None) -> None:
        self.max_norm = max_norm
        self.scale = None if norms is None else (norms / max_norm).clamp(min=1).reciprocal()
        self.constants = (max_norm,) if isinstance(max_norm, torch.Tensor) else ()

    def learned(self, states: States, found: Found) -> torch.Tensor:
        (norms,) = self.first.finish(self.first.together(states.values()), found)
        return norms

    def knowing(self, learned: torch.Tensor) -> ClippedSum:
        return ClippedSum(self.max_norm, learned)

    def step(self, shares: Any) -> State:
        return (shares.weighted(self.scale),)

    def assemble(self, results: list[Any], found: Found) -> Any:
        return results[0], found.before
