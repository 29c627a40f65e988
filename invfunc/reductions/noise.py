"""The noise of a gradient whose samples were drawn."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from invfunc._torch.precision import double_on, doubled
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.linear_algebra.contract import summed
from invfunc.reductions.reduction import Found, Reduction, State

Groups = Callable[[str], str | None]
"""From the path of a parameter to the name of its group; None where it is in none."""


class NoiseScale(NamedTuple):
    """Unbiased estimates of `|E G|^2` and `tr Cov G` for the gradient G of a sample, tensors without dimensions.

    Of small batches `squared_norm` may be negative. Both are averaged over steps first, and then divided.
    """

    squared_norm: torch.Tensor
    trace: torch.Tensor

    @property
    def scale(self) -> torch.Tensor:
        """`trace / squared_norm`: the batch size at which the gradient of a mean is half noise, by its square."""
        return self.trace / self.squared_norm


class SumAndNoise(Reduction):
    """`sum_n G[n]`, and of all parameters, or of each group, what its square and those of the shares say of the noise.

    These are set aside in float64, as the estimates are differences of what may be nearly equal.
    """

    several, trees = True, 1

    def __init__(self, groups: Groups | None) -> None:
        self.groups = groups

    def step(self, shares: Any) -> State:
        if self.group(shares.name(shares.place).removeprefix("params")) is None:
            return (total := shares.weighted()), total.new_zeros((), dtype=double_on(total.device))
        total, norms = shares.sum_and_norms()
        return total, doubled(norms).sum()

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return torch.zeros_like(leaf), leaf.new_zeros((), dtype=double_on(leaf.device))

    def aside(self, state: State, found: Found) -> tuple[torch.Tensor, torch.Tensor]:
        rows = state[0].flatten(1) if state[0].ndim > 1 else state[0]
        return doubled(rows.square().sum(-1)).sum(), state[1]  # without a copy in float64

    def assemble(self, results: list[Any], found: Found) -> Any:
        if found.n < 2:
            raise ArgumentError(f"noise is a variance, and there is {found.n} sample: DataLoader(..., drop_last=True)?")
        groups: dict[str, list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for path, squares in found.aside.items():
            if (name := self.group(path)) is not None:
                groups.setdefault(name, []).append(squares)
        if not groups:
            raise ArgumentError(f"groups has a name for none of the parameters {', '.join(found.aside)}.")
        each = {name: _noise(squares, found) for name, squares in groups.items()}
        return results[0], each[""] if self.groups is None else each

    def group(self, path: str) -> str | None:
        """The name of the group that a parameter is in."""
        return group_of(path, self.groups)


def group_of(path: str, groups: Groups | None) -> str | None:
    """The name of the group that a parameter is in; all are in one without groups."""
    name = "" if groups is None else groups(path)
    if not (name is None or isinstance(name, str)):
        raise ArgumentTypeError(
            f"groups({path!r}) is of type {type(name).__name__}, but has to be the name of a group, or None."
        )
    return name


def _noise(squares: list[tuple[torch.Tensor, torch.Tensor]], found: Found) -> NoiseScale:
    """The estimates, of the squared norm of the sum and the sum of those of the shares, in some parameters each."""
    of_sum, of_shares = (summed(x) for x in zip(*squares, strict=True))
    pairs = found.n * (found.n - 1)
    squared_norm, trace = (of_sum - of_shares) / pairs, (found.n * of_shares - of_sum) / pairs
    trace = torch.where(of_sum.isfinite(), trace.clamp(min=0), math.nan)  # a sum that overflows is not without noise
    return NoiseScale(squared_norm.to(found.dtype), trace.to(found.dtype))
