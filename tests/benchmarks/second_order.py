"""The curvature: how each peer computes it."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp, vjp, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import invfunc

from .peers import (
    BACKPACK,
    FUNC,
    OURS,
    Call,
    Params,
    Peer,
    Problem,
    Result,
    backpack,
    transformed,
    vmap_jacrev,
)

Draws = dict[str, Any]
"""The options of a statistic that draws one target."""


def _ours(build: Callable[[Problem], Callable]) -> dict[str, Peer]:
    return {OURS: transformed(build)}


def _drawn(build: Callable[[Problem, Draws], Callable]) -> dict[str, Peer]:
    """Ours with one drawn target: each call draws on from where the last one stopped."""
    return _ours(lambda p: build(p, {"mc_samples": 1, "generator": _generator(p)}))


def _generator(problem: Problem) -> torch.Generator:
    return torch.Generator(problem.x.device).manual_seed(0)


def _direction(problem: Problem) -> Params:
    """Vector that the matrices are multiplied with: numbers of the normal distribution."""
    generator = _generator(problem)
    return {
        name: torch.randn(p.shape, generator=generator, device=p.device, dtype=p.dtype)
        for name, p in problem.params.items()
    }


def _times(product: Callable[[Problem], Callable]) -> Peer:
    """A product `(params, v, x, y)`, times one direction."""

    def build(problem: Problem):
        multiply, v = product(problem), _direction(problem)
        return lambda params, x, y: multiply(params, v, x, y)

    return transformed(build)


def _vmap_drawn(problem: Problem) -> Callable:
    """The squares of `vmap(grad)` at drawn targets of a cross entropy, summed."""
    generator = _generator(problem)
    weight = 1 / math.sqrt(problem.y.numel())  # squared it is that of the mean

    def share(params: Params, x: Tensor, y: Tensor) -> Tensor:
        return weight * F.cross_entropy(problem.f(params, x[None]), y[None], reduction="sum")

    def statistic(params: Params, x: Tensor, y: Tensor) -> Params:
        p = problem.f(params, x).detach().softmax(1).movedim(1, -1)
        drawn = torch.multinomial(p.flatten(0, -2), 1, generator=generator).view(y.shape)
        shares = vmap(grad(share), in_dims=(None, 0, 0))(params, x, drawn)
        return {name: g.square().sum(0) for name, g in shares.items()}

    return statistic


def _unfused(peer: Peer) -> Peer:
    """A peer without fused attention, which has no second derivative."""

    def build(problem: Problem) -> Call:
        call = peer(problem)

        def unfused() -> Result:
            with sdpa_kernel(SDPBackend.MATH):
                return call()

        return unfused

    return build


def _func_hvp(problem: Problem) -> Callable:
    def product(params: Params, v: Params, x: Tensor, y: Tensor) -> Params:
        return jvp(lambda q: grad(problem.loss_fn)(q, x, y), (params,), (v,))[1]

    return product


def _func_ggnvp(problem: Problem) -> Callable:
    def product(params: Params, v: Params, x: Tensor, y: Tensor) -> Params:
        def f(q: Params) -> Tensor:
            return problem.f(q, x)

        outputs, moved = jvp(f, (params,), (v,))[:2]
        cotangents = jvp(grad(lambda z: problem.loss(z, y)), (outputs,), (moved,))[1]
        return vjp(f, params)[1](cotangents)[0]

    return product


def _backpack_hvp(problem: Problem) -> Call:
    from backpack.hessianfree.hvp import hessian_vector_product

    leaves, v = list(problem.model.parameters()), list(_direction(problem).values())

    def call() -> Result:
        loss = problem.loss(problem.model(problem.x), problem.y)
        return dict(zip(problem.params, hessian_vector_product(loss, leaves, v), strict=True))

    return call


def _backpack_ggnvp(problem: Problem) -> Call:
    from backpack.hessianfree.ggnvp import ggn_vector_product

    v = list(_direction(problem).values())

    def call() -> Result:
        outputs = problem.model(problem.x)
        loss = problem.loss(outputs, problem.y)
        return dict(zip(problem.params, ggn_vector_product(loss, outputs, problem.model, v), strict=True))

    return call


SECOND_ORDER: dict[str, dict[str, Peer]] = {
    "diag_ggn_mc": {
        **_drawn(lambda p, draws: invfunc.diag_ggn(p.f, p.loss, **draws)),
        FUNC: transformed(_vmap_drawn),
        BACKPACK: backpack("DiagGGNMC"),
    },
    "diag_ggn": {
        **_ours(lambda p: invfunc.diag_ggn(p.f, p.loss)),
        FUNC: vmap_jacrev(),
        BACKPACK: backpack("DiagGGNExact"),
    },
    "diag_ggn_of_each": {
        **_ours(lambda p: invfunc.diag_ggn(p.f, p.loss, per_sample=True)),
        FUNC: vmap_jacrev(over=(1,)),
        BACKPACK: backpack("BatchDiagGGNExact"),
    },
    "diag_hessian": {
        **_ours(lambda p: invfunc.diag_hessian(p.f, p.loss)),
        BACKPACK: backpack("DiagHessian"),
    },
    "kfac": {
        **_drawn(lambda p, draws: invfunc.kfac(p.f, p.loss, weight_sharing="backpack", **draws)),
        BACKPACK: backpack("KFAC"),
    },
    "kfac_expand": _drawn(lambda p, draws: invfunc.kfac(p.f, p.loss, **draws)),
    "ekfac": _drawn(lambda p, draws: invfunc.ekfac(p.f, p.loss, **draws)),
    "kfac_exact": {
        **_ours(lambda p: invfunc.kfac(p.f, p.loss, weight_sharing="backpack", fisher="exact")),
        BACKPACK: backpack("KFLR"),
    },
    "kfac_exact_expand": _ours(lambda p: invfunc.kfac(p.f, p.loss, fisher="exact")),
    "hvp": {
        OURS: _times(lambda p: invfunc.hvp(p.f, p.loss)),
        FUNC: _unfused(_times(_func_hvp)),
        BACKPACK: _unfused(_backpack_hvp),
    },
    "ggnvp": {
        OURS: _times(lambda p: invfunc.ggnvp(p.f, p.loss)),
        FUNC: _unfused(_times(_func_ggnvp)),
        BACKPACK: _unfused(_backpack_ggnvp),
    },
    "diag_ggn_and_variance": {
        **_ours(lambda p: invfunc.together(invfunc.diag_ggn(p.loss_fn), invfunc.variance(p.loss_fn))),
        BACKPACK: backpack("DiagGGNExact", "Variance"),
    },
    "diag_ggn_mc_and_variance": {
        **_drawn(lambda p, draws: invfunc.together(invfunc.diag_ggn(p.loss_fn, **draws), invfunc.variance(p.loss_fn))),
        BACKPACK: backpack("DiagGGNMC", "Variance"),
    },
}
"""Each peer by its name, for each row by its own."""

DRAWN = {"diag_ggn_mc", "kfac", "kfac_expand", "ekfac", "diag_ggn_mc_and_variance"}
"""Rows whose numbers are drawn, so that no two peers agree."""
