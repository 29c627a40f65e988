"""Covariances of the outputs of each sample, where the parameters have a covariance."""

from __future__ import annotations

from collections.abc import Iterable
from copy import copy
from itertools import accumulate
from typing import Any

import torch

from invfunc import thresholds, tree
from invfunc._torch.precision import double_on
from invfunc.errors import ArgumentError
from invfunc.kronecker.matrix import Kronecker
from invfunc.kronecker.places import Unfactored
from invfunc.linear_algebra.contract import joined
from invfunc.linear_algebra.low_rank import LowRank, weighted
from invfunc.reductions.gradients import EachSample
from invfunc.reductions.reduction import Found, Reduction, State

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
        """Where the entries of each are among them."""

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
