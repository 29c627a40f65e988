"""Reductions of several columns: of those of a square root of a Hessian, or of one for each output."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.precision import doubled
from invfunc.reductions.gradients import EachSample
from invfunc.reductions.reduction import Found, Over, Reduction, State


class SquaresOfEach(EachSample):
    """`sum_v G[v, n]^2` of each sample."""

    shortcuts = "all"

    def step(self, shares: Any) -> State:
        return (shares.square_sum(each=True),)

    def scaled(self, state: State, by: float) -> State:
        return tuple(x * by**2 for x in state)

    def directly(self, rows: torch.Tensor) -> State:
        return (rows,)


class SumOfSquares(Reduction):
    """`sum_vn G[v, n]^2`."""

    shortcuts, trees = "all", 1

    def step(self, shares: Any) -> State:
        return (shares.square_sum(),)

    def scaled(self, state: State, by: float) -> State:
        return (state[0] * by**2,)

    def directly(self, rows: torch.Tensor) -> State:
        return (rows.sum(0),)


class SquaresOfPlaces(SumOfSquares):
    """The same of what each place adds where an operation reads a parameter."""

    def step(self, shares: Any) -> State:
        return (shares.squares_of_places(),)


class MatrixTrace(SumOfSquares):
    """`sum_pvn G[v, n, p]^2`, of all parameters together or of each."""

    trees = 0

    def __init__(self, per_parameter: bool) -> None:
        self.whole = not per_parameter

    def step(self, shares: Any) -> State:
        return (shares.square_sum().sum(),)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(()),)


class InnerProducts(Reduction):
    """`sum_p G[v, n, p] G[w, m, p]`, of all parameters together or of each."""

    axes = ("params",)
    pooled = pairs = by_column = True
    others = 0
    """How many samples m are not among the n; with none, they are the same."""

    def __init__(self, per_parameter: bool) -> None:
        self.whole = not per_parameter

    def step(self, shares: Any) -> State:
        return (shares.products(),)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(columns, n, columns, n),)

    def finish(self, state: State, found: Found) -> list[Any]:
        (one,) = found.outputs
        return [_with_outputs(_with_outputs(state[0].permute(1, 0, 3, 2), 3, one), 1, one)]

    def sample_axes(self, found: Found) -> tuple[int, ...]:
        return (0, 1 + len(found.outputs[0]))


class ProductsOfColumns(InnerProducts):
    """The same of the columns of a square root, in float64: `[V, n, V, n]`."""

    rooted, rounded = "all", False

    def __init__(self) -> None:
        super().__init__(per_parameter=False)

    def step(self, shares: Any) -> State:
        return (shares.products(exact=True),)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (doubled(super().init(leaf, n, columns)[0]),)

    def finish(self, state: State, found: Found) -> list[Any]:
        return [state[0]]

    def sample_axes(self, found: Found) -> tuple[int, ...]:
        return (1, 3)


class ProductsWithOthers(InnerProducts):
    """The same with others, the last samples of a run."""

    each, row_axis = (0,), 1
    pairs = False

    def __init__(self, per_parameter: bool, others: int) -> None:
        super().__init__(per_parameter)
        self.others = others

    def step(self, shares: Any) -> State:
        return (shares.products_with(self.others),)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(columns, n - self.others, columns, self.others),)

    def sample_axes(self, found: Found) -> tuple[int, ...]:
        return self.each


class SquareRoot(Reduction):
    """The columns as they are, one after the other: `[V, n, *p]`."""

    each, row_axis, by_column = (1,), 1, True
    rooted = "all"

    def step(self, shares: Any) -> State:
        return (shares.dense(),)

    def scaled(self, state: State, by: float) -> State:
        return (state[0] * by,)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(columns, n, *leaf.shape),)

    def merge(self, a: State, b: State, over: Over) -> State:
        return (torch.cat([a[0], b[0]]),) if over == "columns" else super().merge(a, b, over)


class JacobianRows(SquareRoot):
    """The same of the rows of the Jacobian, a tree of the outputs."""

    each, rooted = (0,), "no"

    def finish(self, state: State, found: Found) -> list[Any]:
        sizes = [math.prod(one) for one in found.outputs]
        parts = state[0].movedim(0, 1).split(sizes, 1)
        return [_with_outputs(j, 1, one) for j, one in zip(parts, found.outputs, strict=True)]

    def assemble(self, results: list[Any], found: Found) -> Any:
        return tree.unflatten(results, found.structure)


def _with_outputs(x: torch.Tensor, dim: int, one: Sequence[int]) -> torch.Tensor:
    """A tensor whose dimension of columns is reshaped to the dimensions of an output."""
    return x.reshape(*x.shape[:dim], *one, *x.shape[dim + 1 :])
