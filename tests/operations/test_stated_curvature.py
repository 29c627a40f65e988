"""What the entries say of second derivatives, biases and gradients: each name has a call, at which it is so."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import grad, jacrev

from invfunc.operations.heard import function_of
from invfunc.operations.operation import OPERATIONS, known
from invfunc.testing import assert_trees_close
from tests.operations.test_stated_effects import Heard, stated
from tests.strategies import Numbers

EXACT = 1e-9
CLASSES = torch.tensor([2, 0, 2])
CALLS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "cross_entropy": lambda z, y: F.cross_entropy(z, CLASSES),
    "mse_loss": F.mse_loss,
    "binary_cross_entropy_with_logits": F.binary_cross_entropy_with_logits,
    "huber_loss": F.huber_loss,
    "smooth_l1_loss": F.smooth_l1_loss,
    "poisson_nll_loss": F.poisson_nll_loss,
    "log_softmax": lambda z, y: -(z.log_softmax(1) * y).sum(),
    "log_sigmoid": lambda z, y: -F.logsigmoid((2 * y - 1) * z).sum(),
    "nll_loss": lambda z, y: F.nll_loss(z, CLASSES),
    "kl_div": lambda z, y: F.kl_div(z, y, reduction="sum"),
}
"""A scalar loss of outputs `[3, 4]`, and of targets from 0 to 1."""
Z, Y = 3 * Numbers()(3, 4), Numbers(1)(3, 4).sigmoid()


def matrix(name: str, z: Tensor = Z, y: Tensor = Y) -> Tensor:
    """The Hessian of the loss of this name."""
    return jacrev(grad(lambda flat: CALLS[name](flat.view_as(z), y)))(z.flatten())


def test_each_name_has_a_call():
    assert set(stated("hessian")) | set(stated("loss")) == CALLS.keys()
    assert set(stated("cornered")) | set(stated("predictive")) <= set(stated("hessian", "elementwise"))
    assert set(stated("loss", "convex", "logarithm")) == set(stated("hessian"))


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_of_their_name(name):
    with Heard() as heard:
        CALLS[name](Z, Y)
    assert name in [function.name for function, _, _ in heard.calls]


@pytest.mark.parametrize("name", stated("hessian", "elementwise"))
def test_a_hessian_by_elements_is_diagonal(name):
    h = matrix(name)
    assert h.diagonal().abs().max() > 0
    assert_trees_close(h, h.diagonal().diag(), EXACT)


@pytest.mark.parametrize("name", stated("hessian", "softmax", "log_softmax"))
def test_a_hessian_of_a_softmax_is_its_covariance(name):
    p, h = Z.softmax(1), matrix(name).view(3, 4, 3, 4)
    covariance = p.diag_embed() - p[:, :, None] * p[:, None]
    own = torch.stack([h[n, :, n] for n in range(3)])
    size = own.diagonal(dim1=1, dim2=2).sum(1) / covariance.diagonal(dim1=1, dim2=2).sum(1)
    assert_trees_close(own, size[:, None, None] * covariance, EXACT)
    assert_trees_close(h.sum(2), own, EXACT)
    if OPERATIONS[name].hessian == "log_softmax":
        assert_trees_close(size, Y.sum(1), EXACT)  # the slopes are -Y


@pytest.mark.parametrize("name", stated("loss", "convex", "logarithm"))
def test_what_is_convex_has_no_negative_curvature(name):
    assert torch.linalg.eigvalsh(matrix(name)).min() > -EXACT


@pytest.mark.parametrize("name", stated("loss", "of logarithm"))
def test_a_loss_of_a_logarithm_is_linear(name):
    assert matrix(name).abs().max() == 0
    assert known(name).linear == 1


@pytest.mark.parametrize("name", stated("predictive", "normal"))
def test_with_a_normal_predictive_the_second_derivative_is_constant(name):
    assert_trees_close(matrix(name), matrix(name, Z.exp(), Y.cos()), EXACT)


@pytest.mark.parametrize("name", stated("predictive", "bernoulli"))
def test_with_a_bernoulli_predictive_the_slopes_have_the_variance_of_the_second_derivative(name):
    z, p = Z[:1, :1], Z[:1, :1].sigmoid()
    no, yes = (grad(CALLS[name])(z, torch.full_like(z, y)) for y in (0.0, 1.0))
    assert_trees_close((1 - p) * no + p * yes, torch.zeros_like(z), EXACT, floor=1.0)
    assert_trees_close((1 - p) * no**2 + p * yes**2, matrix(name, z, p.round()), EXACT)


@pytest.mark.parametrize("name", stated("hessian", "elementwise"))
def test_the_second_derivative_of_torch_at_nan_is_0_where_there_is_a_corner(name):
    z = Z.clone()
    z[0, 0] = torch.nan
    assert (matrix(name, z)[0, 0] == 0).item() is OPERATIONS[name].cornered


@pytest.mark.parametrize("name", stated("biased"))
def test_a_bias_is_added_to_each_channel(name):
    func, d = getattr(F, name), next((int(c) for c in name if c.isdigit()), 0)
    x, weight, bias = Numbers()(2, 3, *[4] * d), Numbers(1)(3, 3, *[2] * d), Numbers(2)(3)
    added = func(x, weight, bias) - func(x, weight)
    assert_trees_close(added, bias.view(3, *[1] * (weight.ndim - 2)).expand_as(added), EXACT)


GRADIENTS: dict[str, list[Callable[[Tensor, Tensor], object]]] = {
    "grad": [torch.autograd.grad],
    "backward": [lambda y, x: torch.autograd.backward(y, inputs=[x]), lambda y, x: y.backward(inputs=[x])],
}


@pytest.mark.parametrize("name", stated("differentiates"))
def test_what_differentiates_is_heard_to(name):
    for take in GRADIENTS[name]:
        x = Numbers()(3).requires_grad_()
        with Heard() as heard:
            given = take(x.sin().sum(), x)
        function, args, kwargs = heard.first(name)
        assert function is function_of(function.func) and function.entry.differentiates
        assert function.argument(args, kwargs, "inputs")[0] is x
        assert_trees_close(x.grad if given is None else given[0], x.detach().cos(), EXACT)
