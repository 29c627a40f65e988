# pyright: strict
"""Programs as users write them, with the types that a checker finds; pyright looks at them strictly, and they run."""

from typing import Any, assert_type

import torch
import torch.nn.functional as F
from torch import Tensor

import invfunc
from invfunc.invertible.checks import InverseReport
from invfunc.kronecker import Kronecker
from invfunc.plan import Explanation
from invfunc.reductions.estimates import Estimate, NoiseScale

Params = dict[str, Tensor]

model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 3))
f, params = invfunc.functional(model)
x, y = torch.randn(8, 6), torch.randint(3, (8,))


def losses(params: Params, x: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(f(params, x), y, reduction="none")


def linear(w: Tensor, x: Tensor) -> Tensor:
    return x @ w


def generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def half(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(x @ w)


def statistics() -> None:
    assert_type(params, Params)
    assert_type(invfunc.variance(losses)(params, x, y), Params)
    assert_type(invfunc.variance(linear)(torch.ones(6), x), Tensor)
    assert_type(invfunc.grad_and_variance(losses)(params, x, y), tuple[Params, Params])
    assert_type(invfunc.clipped_grad(losses, 1.0)(params, x, y), tuple[Params, Tensor])
    assert_type(invfunc.noise_scale(losses)(params, x, y), tuple[Params, NoiseScale])
    assert_type(invfunc.gram(losses)(params, x, y), Tensor)
    assert_type(invfunc.diag_ggn(f, F.cross_entropy)(params, x, y), Params)
    assert_type(invfunc.ggn_trace(f, F.cross_entropy)(params, x, y), Tensor)


def with_more() -> None:
    def and_outputs(params: Params, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        outputs = f(params, x)
        return F.cross_entropy(outputs, y, reduction="none"), outputs

    result: tuple[Params, Tensor] = assert_type(invfunc.variance(and_outputs, has_aux=True)(params, x, y), Any)
    assert result[1].shape == (8, 3)


def factors() -> None:
    found = invfunc.kfac(f, F.cross_entropy, generator=generator())(params, x, y)
    assert_type(found, dict[str, Kronecker])
    assert_type(invfunc.ekfac(f, F.cross_entropy, fisher="exact")(params, x, y), dict[str, Kronecker])


def around() -> None:
    t = invfunc.variance(losses)
    assert_type(invfunc.chunked(t, 2)(params, x, y), Params)
    assert_type(invfunc.chunked(t, memory="1GiB")(params, x, y), Params)
    assert_type(invfunc.compiled(t)(params, x, y), Params)
    assert_type(invfunc.certified(t, generator=0)(params, x, y), Params)
    assert_type(invfunc.streamed(t)(params, [(x, y)]), Params)
    assert_type(invfunc.distributed(invfunc.streamed(t))(params, [(x, y)]), Params)
    assert_type(
        invfunc.together(invfunc.batch_grad(losses), t, invfunc.variance(losses))(params, x, y),
        tuple[Params, Params, Params],
    )
    assert_type(invfunc.explain(t)(params, x, y), Explanation)

    @invfunc.chunked(n=2)
    def outputs(params: Params, x: Tensor) -> Tensor:
        return f(params, x)

    assert_type(outputs(params, x), Tensor)


def products() -> None:
    product = invfunc.ggnvp(f, F.cross_entropy)
    assert_type(product(params, params, x, y), Params)
    assert_type(product.linearize(params, x, y)(params), Params)
    assert_type(invfunc.compiled(invfunc.hvp(losses)).linearize(params, x, y)(params), Params)
    assert_type(invfunc.estimate_trace(product, probes=2, generator=generator())(params, x, y), Estimate)


def blocks() -> None:
    pair = invfunc.additive_coupling(half, half)
    state = torch.randn(4, 3), torch.randn(4, 3)
    weights = torch.randn(3, 3), torch.randn(3, 3)
    assert_type(invfunc.check_inverse(pair, state, weights), InverseReport)
    left, right = invfunc.invertible_checkpoint(pair)(state, weights)
    assert left.shape == right.shape
    invfunc.pairs.drift(pair, state, [weights, weights])
