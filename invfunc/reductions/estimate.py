"""Sums of squares of drawn columns, and how far they may be from those of all columns."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from invfunc import tree
from invfunc._extras import table
from invfunc._torch.precision import double_on, doubled
from invfunc.loss.square_root import safe_root
from invfunc.reductions.lots import Drawn, variances
from invfunc.reductions.reduction import Found, Over, Reduction, State


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
