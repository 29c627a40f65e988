"""The statistics of shares: how each peer computes them."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.func import jacrev, vmap

import invfunc

from .peers import (
    BACKPACK,
    FUNC,
    OPACUS,
    OURS,
    Params,
    Peer,
    Problem,
    Result,
    backpack,
    by_leaf,
    opacus,
    transformed,
    vmap_grad,
)

MAX_NORM = 0.0434
"""About half of 3c3d's shares are larger."""


def _peers(
    transform: Callable[[Callable], Callable],
    of_shares: Callable[[Params], Result],
    extension: Peer | None = None,
    fast: Peer | None = None,
) -> dict[str, Peer]:
    peers = {OURS: transformed(lambda problem: transform(problem.loss_fn)), FUNC: vmap_grad(of_shares)}
    return peers | {name: peer for name, peer in ((BACKPACK, extension), (OPACUS, fast)) if peer is not None}


_sum = by_leaf(lambda g: g.sum(0))
_variance = by_leaf(lambda g: g.var(0, correction=0))


def _clipped(shares: Params) -> Result:
    norms = torch.stack([g.flatten(1).square().sum(1) for g in shares.values()]).sum(0).sqrt()
    factors = (MAX_NORM / norms).clamp(max=1)
    return {name: torch.tensordot(factors, g, 1) for name, g in shares.items()}, norms


def _gram(shares: Params) -> Tensor:
    return torch.stack([g.flatten(1) @ g.flatten(1).T for g in shares.values()]).sum(0)


def _of_model(transform: Callable[[Problem], Callable[[Params, Tensor], Result]]) -> Peer:
    """A transform of the model function, which takes no target."""

    def build(problem: Problem):
        transformed_model = transform(problem)
        return lambda params, x, _: transformed_model(params, x)

    return transformed(build)


FIRST_ORDER = {
    "batch_grad": _peers(invfunc.batch_grad, lambda shares: shares, backpack("BatchGrad")),
    "batch_l2_grad": _peers(
        invfunc.batch_l2_grad,
        by_leaf(lambda g: g.flatten(1).square().sum(1)),
        backpack("BatchL2Grad"),
        opacus(),
    ),
    "sum_grad_squared": _peers(
        invfunc.sum_grad_squared, by_leaf(lambda g: g.square().sum(0)), backpack("SumGradSquared")
    ),
    "variance": _peers(invfunc.variance, _variance, backpack("Variance")),
    "grad_and_variance": _peers(
        invfunc.grad_and_variance, lambda shares: (_sum(shares), _variance(shares)), backpack("Variance", gradient=True)
    ),
    "clipped_grad": _peers(lambda f: invfunc.clipped_grad(f, MAX_NORM), _clipped, fast=opacus(MAX_NORM)),
    "gram": _peers(invfunc.gram, _gram),
    "batch_jacobian": {
        OURS: _of_model(lambda p: invfunc.batch_jacobian(p.f)),
        FUNC: _of_model(lambda p: vmap(jacrev(lambda params, x: p.f(params, x[None])[0]), in_dims=(None, 0))),
    },
}
"""Each peer by its name, for each statistic by its own."""
