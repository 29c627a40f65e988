"""The products of the samples of two runs: the shares of one are kept, factored, until those of the other come."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from invfunc.errors import ArgumentError
from invfunc.reductions.reduction import Found, Reduction, State, States
from invfunc.reductions.squares import InnerProducts


@dataclass(frozen=True, eq=False)
class SampleShares:
    """The shares of the samples of one run."""

    shares: list[Any]
    """Of each parameter; None where it does not influence the result."""
    n: int
    columns: int
    outputs: list[torch.Size]


class KeptShares(Reduction):
    """The shares as they are, factored."""

    axes = ("params",)
    whole = keeps = True

    def step(self, shares: Any) -> State:
        return (shares,)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (None,)

    def together(self, states: States) -> State:
        return tuple(state[0] for state in states.values())

    def finish(self, state: State, found: Found) -> list[Any]:
        return [SampleShares(list(state), found.n, found.columns, found.outputs)]


class ProductsWithKept(InnerProducts):
    """`sum_p G[v, n, p] H[w, m, p]`, of the shares G that were kept with those of another run."""

    def __init__(self, per_parameter: bool, kept: SampleShares) -> None:
        super().__init__(per_parameter)
        self.kept = kept

    def step(self, shares: Any) -> State:
        own = self.kept.shares[shares.place]
        if own is None:
            return ProductsWithKept.init(self, shares.leaf, shares.count, self.kept.columns)
        return (own.products_between(shares),)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(self.kept.columns, self.kept.n, columns, n),)

    def finish(self, state: State, found: Found) -> list[Any]:
        if found.outputs != self.kept.outputs:
            first, other = (tuple(*map(tuple, shapes)) for shapes in (self.kept.outputs, found.outputs))
            raise ArgumentError(f"the outputs of one sample have shape {first} in one batch, and {other} in another.")
        return super().finish(state, found)


class RowsWithKept(ProductsWithKept):
    """The same with the samples of the other run in front, so that the rows of batches are joined."""

    each, row_axis = (0,), 1
    pairs = False

    def step(self, shares: Any) -> State:
        return tuple(x.permute(2, 3, 0, 1) for x in super().step(shares))

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(columns, n, self.kept.columns, self.kept.n),)
