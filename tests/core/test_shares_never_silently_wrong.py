"""The second review's ways to a wrong number, of the first-order family: right, or refused."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from invfunc import (
    batch_grad,
    batch_jacobian,
    batch_l2_grad,
    diag_ggn,
    functional,
    gram,
    operation,
    sum_grad_squared,
)
from invfunc.errors import ArgumentError
from invfunc.testing import assert_trees_close, loop_batch_grad, loop_batch_jacobian, loop_gram
from tests.strategies import Numbers

W, X = Numbers()(3, 3), Numbers(1)(4, 3)
EXACT = 1e-10


def assert_shares(f, *args):
    """The shares, each by itself and contracted."""
    shares = loop_batch_grad(f)(*args)
    assert_trees_close(batch_grad(f)(*args), shares, EXACT)
    assert_trees_close(sum_grad_squared(f)(*args), shares.square().sum(0), EXACT)
    assert_trees_close(batch_l2_grad(f)(*args), shares.flatten(1).square().sum(1), EXACT)


class TestTheSameParameterAtCallsThatOnlyLookAlike:
    def test_names_of_arguments(self):
        x = Numbers(1)(3, 3)
        assert_shares(
            lambda w, x: (torch.matmul(input=x, other=w).sin() + torch.matmul(other=w.T, input=x).cos()).sum(1), W, x
        )

    def test_options(self):
        x, w = Numbers()(4, 2, 7), Numbers(1)(2, 2, 3)

        def f(w, x):
            strided = F.conv_transpose1d(x, w, stride=2, padding=1)[..., :7]
            return (strided.sin() * F.conv_transpose1d(x, w, dilation=2, padding=2)).flatten(1).sum(1)

        assert_shares(f, w, x)

    def test_operations_of_one_name(self):
        one, other = operation(lambda x, w: x @ w), operation(lambda x, w: x @ w.T)
        one.share_of("w")(lambda delta, x, w: ("vno,ni->io", delta, x))
        other.share_of("w")(lambda delta, x, w: ("vno,ni->oi", delta, x))
        assert_shares(lambda w, x: (one(x, w).sin() + other(x, w).cos()).sum(1), W, X)


@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_a_recurrent_layer_that_is_checkpointed(kind):
    f, params = functional(kind(3, 3, batch_first=True).double())
    x = Numbers()(4, 2, 3)

    def losses(p, x):
        return checkpoint(f, p, x, use_reentrant=False)[0].sum((1, 2))

    for loss in (losses, lambda p, x: losses(p, x).sum()):
        assert_trees_close(batch_grad(loss)(params, x), loop_batch_grad(losses)(params, x), 1e-10)


def test_an_operation_that_writes_into_its_argument():
    @operation
    def doubled(x, w):
        return x.mul_(2) * w

    doubled.share_of("w")(lambda delta, x, w: ("vni,ni->i", delta, x))
    assert_trees_close(batch_grad(lambda w, x: doubled(x.clone(), w).sum(1))(W[0], X), 2 * X, EXACT)


def test_an_operation_that_reads_a_constant_of_each_sample():
    scaled = operation(lambda x, w: x * C * w)
    scaled.share_of("w")(lambda delta, x, w: ("vni,ni,ni->i", delta, x, C))
    with pytest.raises(ArgumentError, match="equation .* with operands"):
        batch_grad(lambda w, x: scaled(x, w).sum(1), samples=[1, 0, 3, 2])(W[0], X)


C = Numbers(5)(4, 3)


def test_tangents_of_forward_mode():
    with torch.autograd.forward_ad.dual_level():
        w = torch.autograd.forward_ad.make_dual(W, torch.ones_like(W))
        with pytest.raises(ArgumentError, match="jvp"):
            batch_grad(lambda w, x: (x @ w).sum(1))(w, X)


def test_autocast_around_what_is_computed_in_full_precision(device):
    w, x = W.float().to(device), X.float().to(device)

    def f(w, x):
        with torch.autocast(device.type, enabled=False):
            return (x @ w).sin().sum(1)

    with torch.autocast(device.type, torch.bfloat16):
        found = gram(f)(w, x)
    assert_trees_close(found, loop_gram(f)(w, x), 1e-5)


@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM, nn.RNN])
def test_recurrent_layers_under_autocast(kind):
    f, params = functional(kind(3, 2, batch_first=True))

    def low(params, x):
        with torch.autocast("cpu", torch.bfloat16):
            return f(params, x)[0].float().square().sum((1, 2))

    x = Numbers()(4, 5, 3).float()
    expected = loop_batch_grad(lambda p, x: f(p, x)[0].square().sum((1, 2)))(params, x)
    assert_trees_close(batch_grad(low)(params, x), expected, 5e-2)


def test_batch_norm_in_half_precision():
    f, params = functional(nn.BatchNorm1d(3).bfloat16().eval())
    x = X.bfloat16()
    expected = loop_batch_grad(lambda p, x: f(p, x).sin().sum(1))(params, x)
    assert_trees_close(batch_grad(lambda p, x: f(p, x).sin().sum(1))(params, x), expected, 2e-2)


def test_outputs_of_the_parameters_alone():
    def f(w, x):
        return w[0].expand(len(x), 3)

    assert_trees_close(batch_jacobian(f)(W, X), loop_batch_jacobian(f)(W, X), EXACT)


def test_an_operation_called_like_a_function_of_torch_that_reads_nothing():
    def tanh_like(x):
        return x.tanh()

    op = operation(tanh_like)
    assert_shares(lambda w, x: (op(x) @ w).square().sum(1), W, X)


def test_aux_of_a_function_that_is_taken_sample_by_sample():
    def f(w, x):
        return torch.fft.rfft(x @ w).abs().sum(1), x.sum(1)

    found, aux = batch_grad(f, has_aux=True)(W, X)
    assert_trees_close(found, loop_batch_grad(lambda w, x: f(w, x)[0])(W, X), EXACT)
    assert_trees_close(aux, X.sum(1), EXACT)


def test_an_operation_without_a_rule_under_autocast():
    op = operation(lambda x, w: x @ w)

    def f(w, x):
        with torch.autocast("cpu", torch.bfloat16):
            return op((x @ w).float(), w).float().square().sum(1)

    w, x = W.float(), X.float()
    expected = loop_batch_grad(lambda w, x: ((x @ w) @ w).square().sum(1))(w, x)
    assert_trees_close(batch_grad(f)(w, x), expected, 1e-1)


def test_an_operation_without_a_rule_runs_again_in_the_precision_of_autocast():
    """A product is taken in float32, since half precision would overflow."""
    op = operation(lambda h, s: h.prod(1, keepdim=True) * s)

    def f(p, x):
        with torch.autocast("cpu", torch.float16):
            return op(x @ p["w"], p["s"]).float().sum(1) * 1e-9

    args = {"s": torch.ones(2), "w": 300 + torch.zeros(3, 4)}, 0.3 + 0.01 * X.float()
    expected = loop_batch_grad(lambda p, x: (x @ p["w"]).prod(1) * p["s"].sum() * 1e-9)(*args)
    assert_trees_close(batch_grad(f)(*args), expected, 1e-2)


class Unbatched(torch.autograd.Function):
    """Twice x; its derivative looks at numbers, which vmap cannot."""

    @staticmethod
    def forward(ctx, x):
        return 2 * x

    @staticmethod
    def backward(ctx, g):
        return 2 * g if bool(g.isfinite().all()) else g


@pytest.mark.parametrize("make", [partial(diag_ggn, method="dense"), diag_ggn, partial(diag_ggn, per_sample=True)])
def test_a_derivative_without_a_batching_rule_is_taken_column_by_column(make):
    op = operation(lambda x: Unbatched.apply(x))
    args = Numbers()(3, 4), Numbers(1)(5, 3), Numbers(2).below(4, 5)
    wanted = make(lambda w, x: 2 * (x @ w).sin(), F.cross_entropy)(*args)
    assert_trees_close(make(lambda w, x: op((x @ w).sin()), F.cross_entropy)(*args), wanted, EXACT)


def test_one_value_for_each_group_of_one_sample():
    f, params = functional(nn.GroupNorm(3, 3).double())
    found = batch_grad(lambda p, x: f(p, x).sin().sum(1), samples=[0])(params, X)
    assert_trees_close(found["bias"], torch.ones(1, 3).double(), EXACT)
