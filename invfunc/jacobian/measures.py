"""What a statistic keeps of the shares, and how it folds over samples, columns and parameters."""

from __future__ import annotations

from typing import Protocol

import torch

from invfunc.jacobian.shares import Shares

State = tuple[torch.Tensor, ...]


class Measure(Protocol):
    """A fold: `partial` of one block, `over_samples` and `over_columns` of two of them, `finish` of the whole."""

    def partial(self, shares: Shares) -> State: ...

    def over_samples(self, a: State, b: State) -> State: ...

    def over_columns(self, a: State, b: State) -> State: ...

    def finish(self, state: State, n: int) -> torch.Tensor: ...

    def zero(self, leaf: torch.Tensor, n: int) -> torch.Tensor: ...


class EachSample:
    """The shares themselves, one sample after the other."""

    def partial(self, shares: Shares) -> State:
        return (shares.dense().squeeze(0),)

    def over_samples(self, a: State, b: State) -> State:
        return (*a, *b)

    def over_columns(self, a: State, b: State) -> State:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    def finish(self, state: State, n: int) -> torch.Tensor:
        return state[0] if len(state) == 1 else torch.cat(state)

    def zero(self, leaf: torch.Tensor, n: int) -> torch.Tensor:
        return leaf.new_zeros(n, *leaf.shape)


class SumOfSquares:
    """`sum_vn G[v, n]^2`."""

    def partial(self, shares: Shares) -> State:
        return (shares.square_sum(),)

    def over_samples(self, a: State, b: State) -> State:
        return (a[0] + b[0],)

    over_columns = over_samples

    def finish(self, state: State, n: int) -> torch.Tensor:
        return state[0]

    def zero(self, leaf: torch.Tensor, n: int) -> torch.Tensor:
        return torch.zeros_like(leaf)


class CentredSquares:
    """`sum_n (G[n] - mean G)^2 / (n - correction)`, merged by the formula of Chan, Golub and LeVeque (1979)."""

    def __init__(self, correction: float) -> None:
        self.correction = correction

    def partial(self, shares: Shares) -> State:
        total, centred = shares.moments()
        return total.new_tensor(shares.n), total / shares.n, centred

    def over_samples(self, a: State, b: State) -> State:
        (m, mean, centred), (n, other, more) = a, b
        apart = other - mean
        count = m + n
        return count, mean + apart * (n / count), centred + more + apart.square() * (m * n / count)

    def over_columns(self, a: State, b: State) -> State:
        raise AssertionError("first-order statistics have one column")

    def finish(self, state: State, n: int) -> torch.Tensor:
        return state[2] / (n - self.correction)

    def zero(self, leaf: torch.Tensor, n: int) -> torch.Tensor:
        return torch.zeros_like(leaf) / (n - self.correction)
