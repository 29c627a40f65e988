"""Covariances of the outputs of each sample, where the parameters have a covariance."""

from __future__ import annotations

from typing import Any

import torch

from invfunc import tree
from invfunc.contract import joined
from invfunc.errors import ArgumentError
from invfunc.kronecker import Kronecker
from invfunc.per_sample import Shares
from invfunc.per_sample.places import Unfactored
from invfunc.reductions.eigenbasis import rotated
from invfunc.reductions.gradients import EachSample
from invfunc.reductions.reduction import Found, State

Covariance = torch.Tensor | Kronecker | float | None
"""Of one parameter: variances, a matrix over its entries with eigenvalues, one variance for all, or none."""


class PredictiveCovariance(EachSample):
    """`sum_pq J[n, c, p] S[p, q] J[n, d, q]`, over all parameters."""

    axes = ("samples", "params")
    forms, whole, paired = "no", True, True

    def __init__(self, covariance: float | dict[str, Covariance]) -> None:
        """One variance for all entries of all parameters, or what is of each, by its key path."""
        self.covariance = covariance
        self.constants = tuple(tree.tensors(covariance))

    def step(self, shares: Shares) -> State:
        cotangent = shares.columns.left[shares.uses[0].site]
        given = self.of(shares.name(shares.place), shares.leaf.shape)
        if given is None:
            assert cotangent is not None
            return self.init(shares.leaf, shares.samples.count, len(cotangent))
        if isinstance(given, Kronecker):
            return (self._in_eigenbasis(shares, given),)
        like = {"dtype": torch.promote_types(shares.leaf.dtype, torch.float32), "device": shares.leaf.device}
        return (shares.covariances(torch.as_tensor(given).to(**like).expand(shares.leaf.shape)),)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(n, columns, columns),)

    def finish(self, state: State, found: Found) -> list[Any]:
        if len(found.outputs) != 1:
            raise ArgumentError(f"f returns {len(found.outputs)} outputs, but a covariance is of those of one tensor.")
        covariance, (one,) = joined(list(state)), found.outputs
        return [covariance.reshape(len(covariance), *one, *one)]

    def of(self, name: str, shape: torch.Size) -> Covariance:
        """What is given of a parameter."""
        if not isinstance(self.covariance, dict):
            return self.covariance
        path = max((path for path in self.covariance if name.endswith(path)), key=len, default=None)
        if path is None:
            raise ArgumentError(
                f"covariance has no leaf for {name}; pass a tree like the parameters, with None for those that are "
                "known."
            )
        given = self.covariance[path]
        alone = not isinstance(given, Kronecker) or given.origin.joint is None
        if isinstance(given, torch.Tensor | Kronecker) and alone and given.shape != shape:
            raise ArgumentError(f"covariance{path} has shape {list(given.shape)}, but {name} has {list(shape)}.")
        return given

    def _in_eigenbasis(self, shares: Shares, basis: Kronecker) -> torch.Tensor:
        """That of a matrix with eigenvalues: from the operands of the layers, if it is of these."""
        assert basis.values is not None
        joint = basis.origin.joint
        if joint is None and len(basis.factors) == 1 and basis.factors[0].ndim == 1:
            return shares.covariances(basis.values.reshape(shares.leaf.shape))
        if joint is not None and (shares.bias is None or shares.leaf.shape != joint.shape):
            raise ArgumentError(
                f"covariance of {shares.name(shares.place)} is of it and a bias together (joint=True), but f does not "
                "read both in one layer; pass factors of this f."
            )
        try:
            return rotated(shares, basis, joint is not None, check=True).covariances(basis.values)
        except Unfactored:
            return shares.covariances_by(lambda share: basis @ share)
