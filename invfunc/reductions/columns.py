"""Reductions of several columns: of those of a square root of a Hessian, or of one for each output."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch

from invfunc import thresholds, tree
from invfunc._torch.values import double_on, doubled
from invfunc.errors import ArgumentError
from invfunc.kronecker.matrix import Kronecker, LowRank, weighted
from invfunc.kronecker.places import Unfactored
from invfunc.linear_algebra.contract import joined
from invfunc.reductions.gradients import EachSample
from invfunc.reductions.reduction import Found, Over, Reduction, State, States


class SquaresOfEach(EachSample):
    """`sum_v G[v, n]^2` of each sample."""

    shortcuts, power = "all", 2

    def step(self, shares: Any) -> State:
        return (shares.square_sum(each=True),)

    def directly(self, rows: torch.Tensor) -> State:
        return (rows,)


class SumOfSquares(Reduction):
    """`sum_vn G[v, n]^2`."""

    shortcuts, trees, power = "all", 1, 2

    def step(self, shares: Any) -> State:
        return (shares.square_sum(),)

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
    """Number of samples m that are not among the n; with none, they are the same."""

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
        return (leaf.new_zeros(columns, max(0, n - self.others), columns, self.others),)

    def sample_axes(self, found: Found) -> tuple[int, ...]:
        return self.each


class SquareRoot(Reduction):
    """The columns as they are, one after the other: `[V, n, *p]`."""

    each, row_axis, by_column = (1,), 1, True
    rooted, power = "all", 1

    def step(self, shares: Any) -> State:
        return (shares.dense(),)

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


Covariance = torch.Tensor | Kronecker | float | None
"""Of one parameter: variances, a matrix over its entries with eigenvalues, one variance for all, or none."""


class PredictiveCovariance(EachSample):
    """`sum_pq J[n, c, p] S[p, q] J[n, d, q]`, over all parameters."""

    axes = ("samples", "params")
    whole = paired = True

    def __init__(self, covariance: float | dict[str, Covariance] | LowRank) -> None:
        """One variance for all entries of all parameters, what is of each, by its key path, or a matrix over all."""
        over_all = isinstance(covariance, LowRank)
        self.low_rank = covariance if over_all else LowRank({})
        self.covariance = covariance.scale if over_all else covariance
        self.vectors = dict(tree.named_leaves(self.low_rank.vectors))
        self.constants = tuple(tree.tensors(covariance))
        self.dense: torch.Tensor | None = None
        """A matrix over the entries of all parameters, in their order."""
        self.starts: list[int] = []
        """Places of the entries of each among them."""

    def at(self, problem: Any) -> Reduction:
        leaves = problem.leaves
        given = self.covariance.get("") if isinstance(self.covariance, dict) and len(self.covariance) == 1 else None
        starts = [0, *accumulate(leaf.numel() for leaf in leaves)]
        if not isinstance(given, torch.Tensor) or given.shape != (starts[-1], starts[-1]):
            return self
        if len(leaves) == 1 and leaves[0].shape == given.shape:  # variances of one entry
            return self
        found = copy(self)
        found.dense, found.starts = given, starts
        return found

    def step(self, shares: Any) -> State:
        """The covariance, and beside it what the shares are along the vectors of a matrix over all parameters."""
        if self.dense is not None:
            own = shares.dense().transpose(0, 1).unsqueeze(-1).flatten(2)
            own = own.to(torch.promote_types(own.dtype, torch.float32))
            before = own.new_zeros(*own.shape[:2], own.shape[1] + self.starts[shares.place])
            after = own.new_zeros(*own.shape[:2], self.starts[-1] - self.starts[shares.place + 1])
            return (torch.cat([before, own, after], -1),)
        covariance = self._of_its_own(shares)
        if not self.vectors:
            return (covariance,)
        vectors = self.vectors_of(shares.name(shares.place), shares.leaf.shape)
        at_once = max(thresholds.DIRECTIONS, thresholds.WIDENED // max(1, shares.leaf.numel()))
        along = [shares.projected(some.to(covariance)) for some in vectors.split(at_once)]
        return (torch.cat([covariance, *along], -1),)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(n, columns, columns + self._rank),)

    def finish(self, state: State, found: Found) -> list[Any]:
        if len(found.outputs) != 1:
            raise ArgumentError(f"f returns {len(found.outputs)} tensors, but has to return one. Join or pick.")
        kept, (one,) = joined(list(state)), found.outputs
        covariance, along = kept.split([kept.shape[1], self._rank], -1)
        if self._rank:
            weights = self.low_rank.weights if self.dense is None else self.dense
            covariance = covariance + weighted(along, weights) @ along.mT
        return [covariance.reshape(len(covariance), *one, *one)]

    @property
    def _rank(self) -> int:
        """The number of vectors that the shares are kept along."""
        return self.low_rank.rank if self.dense is None else len(self.dense)

    def of(self, name: str, shape: torch.Size) -> Covariance:
        """The covariance of a parameter alone."""
        if not isinstance(self.covariance, dict):
            return self.covariance
        path = _place(self.covariance, name)
        if path is None:
            raise ArgumentError(
                f"covariance has no entry for {name}; pass a tree like the parameters, with None for those that are "
                "known."
            )
        given = self.covariance[path]
        alone = not isinstance(given, Kronecker) or given.origin.joint is None
        if isinstance(given, torch.Tensor | Kronecker) and alone and given.shape != shape:
            raise ArgumentError(f"covariance{path} has shape {list(given.shape)}, but {name} has {list(shape)}.")
        return given

    @property
    def joined(self) -> bool:
        """Tells whether the matrix of some weight is that of it and its bias together."""
        return any([isinstance(x, Kronecker) and x.origin.joint is not None for x in _given(self.covariance)])

    def vectors_of(self, name: str, shape: torch.Size) -> torch.Tensor:
        """The entries of the vectors that are of a parameter."""
        path = _place(self.vectors, name)
        if path is None:
            raise ArgumentError(f"{self.low_rank!r} has no entry for {name}; pass a tree like the parameters.")
        found = self.vectors[path]
        if found.shape[1:] != shape:
            raise ArgumentError(
                f"{self.low_rank!r}: vectors{path} has shape {list(found.shape)}, but for {name} of shape "
                f"{list(shape)} it has to be {[len(found), *shape]}."
            )
        return found

    def _of_its_own(self, shares: Any) -> torch.Tensor:
        """The result with the matrix of one parameter."""
        given = self.of(shares.name(shares.place), shares.leaf.shape)
        if given is None:
            columns = shares.run.columns
            return shares.leaf.new_zeros(shares.count, columns, columns)
        if isinstance(given, Kronecker):
            return self._in_eigenbasis(shares, given)
        wide = torch.promote_types(shares.leaf.dtype, torch.float32)
        device = shares.leaf.device
        like = {"dtype": double_on(device) if self.vectors else wide, "device": device}  # the two parts may cancel
        given = given.to(**like) if isinstance(given, torch.Tensor) else torch.tensor(given, **like)
        return shares.covariances(given.expand(shares.leaf.shape))

    def _in_eigenbasis(self, shares: Any, basis: Kronecker) -> torch.Tensor:
        """The result of a matrix with eigenvalues: from the operands of the layers, if it is of these."""
        assert basis.values is not None
        joint = basis.origin.joint
        if joint is None and len(basis.factors) == 1 and basis.is_diagonal(0):
            return shares.covariances(basis.values.reshape(shares.leaf.shape))
        if joint is not None and (shares.bias is None or shares.leaf.shape != joint.shape):
            raise ArgumentError(
                f"the covariance of {shares.name(shares.place)} is joint with a bias (joint=True), but f does not read "
                "both in one layer. Pass factors of this f."
            )
        if shares.run.apart:  # nothing is known of the operations
            return shares.covariances_by(lambda share: basis @ share)
        try:
            return shares.rotated(basis, joint is not None).covariances(basis.values)
        except Unfactored:
            return shares.covariances_by(lambda share: basis @ share)


def _given(covariance: Any) -> Iterable[Any]:
    return covariance.values() if isinstance(covariance, dict) else ()


def _place(given: dict[str, Any], name: str) -> str | None:
    """The key path, among those of a tree like the parameters, that a parameter of this name is at."""
    return next((path for path in given if name == "params" + path), None)
