"""Ways in which each peer computes the statistics, and the tables of them: their problems and rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jacrev, jvp, vjp, vmap
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import invfunc

from .peers import (
    BACKPACK,
    FUNC,
    OPACUS,
    OURS,
    Call,
    Params,
    Peer,
    Problem,
    Result,
    backpack,
    backpack_diag_ggn,
    by_leaf,
    opacus,
    plain_gradient,
    transformed,
    vmap_grad,
    vmap_jacrev,
)
from .problems import autoencoder, gpt, resnet_18, three_c_three_d, tiny

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
        invfunc.batch_l2_grad, by_leaf(lambda g: g.flatten(1).square().sum(1)), backpack("BatchL2Grad"), opacus()
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
    "diag_hessian": {**_ours(lambda p: invfunc.diag_hessian(p.f, p.loss)), BACKPACK: backpack("DiagHessian")},
    "kfac": {
        **_drawn(lambda p, draws: invfunc.kfac(p.f, p.loss, weight_sharing="backpack", **draws)),
        BACKPACK: backpack("KFAC"),
    },
    "ekfac": _drawn(lambda p, draws: invfunc.ekfac(p.f, p.loss, **draws)),
    "kfac_exact": {
        **_ours(lambda p: invfunc.kfac(p.f, p.loss, weight_sharing="backpack", fisher="exact")),
        BACKPACK: backpack("KFLR"),
    },
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
}
"""Each peer by its name, for each row by its own."""

DRAWN = {"diag_ggn_mc", "kfac", "ekfac"}
"""Rows whose numbers are drawn, so that no two peers agree."""

Case = tuple[str, str]
"""A row and a peer."""
Rows = dict[str, dict[str, Peer]]
"""Each peer by its name, for each row by its own."""
GRADIENT: Case = ("one plain gradient", "torch")


@dataclass(frozen=True)
class Table:
    """Rows of one problem."""

    title: str
    problem: Callable[[], Problem]
    rows: Rows
    rounds: int = 1
    """Of calls, for each round that is asked for: short calls take more of them."""

    def peers(self) -> dict[Case, Peer]:
        """Each peer by its row's name and its own."""
        return {GRADIENT: plain_gradient} | {
            (row, name): p for row, peers in self.rows.items() for name, p in peers.items()
        }


def _rows(*names: str, without: Iterable[str] = ()) -> Rows:
    """Statistics by their names, without peers that would take very long."""
    every = FIRST_ORDER | SECOND_ORDER
    return {name: {peer: build for peer, build in every[name].items() if peer not in without} for name in names}


def _in_chunks(n: int) -> dict[str, Peer]:
    ours = transformed(lambda p: invfunc.chunked(invfunc.diag_ggn(p.f, p.loss, method="dense"), n))
    return {OURS: ours, BACKPACK: backpack_diag_ggn(n), FUNC: vmap_jacrev(n)}


_SHARES = "batch_l2_grad", "sum_grad_squared", "variance", "grad_and_variance", "clipped_grad", "batch_grad"
_DRAWN = "diag_ggn_mc", "kfac"
_QUICK = *_DRAWN, "ekfac", "hvp", "ggnvp"
_EXACT = "diag_ggn", "diag_ggn_of_each", "diag_hessian", "kfac_exact"

TABLES = {
    "autoencoder": Table(
        "the exact GGN diagonal of BackPACK's tutorial auto-encoder, 3x32x32, N = 5, 3072 outputs",
        autoencoder,
        {"by itself": _rows("diag_ggn", without=[FUNC])["diag_ggn"]}
        | {f"chunks={n}": _in_chunks(n) for n in (1, 4, 16, 64)},
    ),
    "3c3d": Table(
        "statistics of 3c3d, 3x32x32, N = 32, cross entropy over 10 classes",
        three_c_three_d,
        _rows(*_SHARES, *_QUICK, *_EXACT),
    ),
    "resnet-18": Table(
        "statistics of ResNet-18 with 11 million parameters, 3x32x32, N = 16, batch norms in eval mode",
        resnet_18,
        _rows(*_SHARES, *_DRAWN),
    ),
    **{
        f"gpt-{samples}": Table(
            f"statistics of a GPT of 4 layers, d = 256, 128 places, 1000 words, N = {samples}",
            partial(gpt, samples),
            _rows(*_SHARES, *_DRAWN),
        )
        for samples in (8, 32)
    },
    "tiny": Table("calls of a net of 10-10-2, N = 8, which cost what their Python costs", tiny, FIRST_ORDER, rounds=10),
}
