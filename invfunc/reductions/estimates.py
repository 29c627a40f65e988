"""Estimates of random quantities, and how far off they may be: noise of the gradient, errors of drawn columns."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from invfunc import tree
from invfunc._extras import table
from invfunc._torch.values import double_on, doubled
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.linear_algebra.contract import summed
from invfunc.loss.square_root import safe_root
from invfunc.reductions.reduction import Found, Over, Reduction, State

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


Drawn = dict[tuple[int, int], torch.Tensor]
"""By the range of a lot of columns, which of them are drawn for each sample: `[v, n]`."""


@dataclass(frozen=True)
class Lot:
    """The columns of a range, of which each but the first is drawn anew in place of the same ones."""

    start: int
    stop: int
    exact: torch.Tensor | None = None
    """Number of the first ones of each sample that are not drawn; None if all are drawn."""


def drawn(lots: list[Lot], part: slice | torch.Tensor, values: torch.Tensor) -> Drawn:
    """The columns that are drawn for the samples of a part, of which there are values `[V, n, ...]`."""
    found: Drawn = {}
    for lot in lots:
        v = torch.arange(lot.stop - lot.start, device=values.device)[:, None]
        which = v >= (0 if lot.exact is None else lot.exact[part])
        found[lot.start, lot.stop] = which.expand(-1, values.shape[1])
    return found


def variances(values: torch.Tensor, drawn: Drawn) -> torch.Tensor:
    """The variance of `sum_v values[v, n]` as `[n, ...]`, in float64.

    Of m draws x[v] of a lot, the variance of their sum is `m / (m - 1) sum_v (x[v] - mean x)^2`.
    """
    size = values.detach().abs().amax()
    size = torch.where((size > 0) & size.isfinite(), size, 1)  # squares of small numbers would be 0
    total = torch.zeros_like(values[0])
    for (start, stop), which in drawn.items():
        which = which.reshape(*which.shape, *[1] * (values.ndim - 2))
        x, m = values[start:stop] / size, which.sum(0).to(values.dtype)
        mean = torch.where(which, x, 0).sum(0) / m.clamp(min=1)
        total = total + torch.where(which, x - mean, 0).square().sum(0) * (m / (m - 1))
    return doubled(total) * doubled(size).square()


class Estimate(NamedTuple):
    """A mean of random values, and the standard error of that mean.

    Both have the same structure: tensors, or trees of them. Of `estimate_trace` and `estimate_diagonal` the error is
    the standard deviation of the values for single vectors, divided by the square root of how many they are; with one
    vector it is NaN. With `with_error=True` each sample has an error like that, between the vectors that are drawn for
    it, and the squares of these are added up.
    """

    value: Any
    standard_error: Any

    def _repr_html_(self) -> str:
        both = zip(tree.named_leaves(self.value), tree.named_leaves(self.standard_error), strict=True)
        rows = [(path or "value", [*x.shape] or "number", _size(x), _size(error)) for (path, x), (_, error) in both]
        return table("Estimate", ["", "shape", "value, or its norm", "standard error, or its norm"], rows)


def _size(x: torch.Tensor) -> float:
    return float(doubled(x).norm()) if x.ndim else float(x)


class EstimatedSquares(Reduction):
    """`sum_vn G[v, n]^2`, and its variance, which is the sum of those of the samples, as each has draws of its own."""

    axes = ("samples", "params")  # a variance is of all columns of a sample
    trees, several = 2, True

    def step(self, shares: Any) -> State:
        return shares.squares_and_variance()

    def scaled(self, state: State, by: float) -> State:
        return state[0] * by**2, state[1] * by**4

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return torch.zeros_like(leaf), torch.zeros_like(leaf, dtype=double_on(leaf.device))

    def finish(self, state: State, found: Found) -> list[Any]:
        return [state[0], safe_root(state[1])]

    def assemble(self, results: list[Any], found: Found) -> Any:
        return Estimate(*results)


class EstimatedTrace(EstimatedSquares):
    """`sum_pvn G[v, n, p]^2` of all parameters together or of each, and its standard error.

    A draw is of all parameters at once, so that what is kept are the sums of each column and sample.
    """

    trees, by_column = 0, True

    def __init__(self, per_parameter: bool) -> None:
        self.whole = not per_parameter

    def step(self, shares: Any) -> State:
        return shares.squares_of_columns()

    def scaled(self, state: State, by: float) -> State:
        return state[0] * by**2, state[1]

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return leaf.new_zeros(columns, n), {}

    def merge(self, a: State, b: State, over: Over) -> State:
        (norms, drawn), (others, more) = a, b
        lots = dict.fromkeys([*drawn, *more])
        if over == "params":
            return norms + others, {lot: _which(drawn, lot, norms) | _which(more, lot, norms) for lot in lots}
        each = {lot: torch.cat([_which(drawn, lot, norms), _which(more, lot, others)], 1) for lot in lots}
        return torch.cat([norms, others], 1), each

    def finish(self, state: State, found: Found) -> list[Any]:
        norms, drawn = state
        return [norms.sum(), safe_root(variances(norms, drawn).sum())]


def _which(drawn: Drawn, lot: tuple[int, int], norms: torch.Tensor) -> torch.Tensor:
    """The columns of a lot that are drawn for each sample; none where no column reaches a parameter."""
    start, stop = lot
    return drawn[lot] if lot in drawn else torch.zeros_like(norms[start:stop], dtype=torch.bool)
