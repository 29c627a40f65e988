"""Fast path == generic path == the plain loop, for every rule and option and every way to read a parameter."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import tree
from invfunc import batch_grad, diag_ggn, sum_grad_squared, variance
from invfunc.jacobian.engine import Options
from invfunc.testing import (
    assert_trees_close,
    dense_diag_ggn,
    loop_batch_grad,
    loop_sum_grad_squared,
    loop_variance,
)
from tests import strategies
from tests.strategies import Numbers, moved

RTOL = {torch.float64: 1e-10, torch.float32: 1e-4}


def generic(statistic):
    """The same statistic by the path that every operation can take."""
    return replace(statistic, options=Options(fast=False))


def cross_entropy(z, target):
    return F.cross_entropy(z.reshape(z.shape[0], -1), target)


def assert_fast_equals_generic_equals_loop(case, device, dtype):
    """The law, for all statistics; the fast path also in float32."""
    f, dims = case.f, (*case.in_dims, 0)
    params, inputs = moved((case.params, case.inputs), torch.float64, device)
    z = f(params, *inputs)
    target = Numbers(1)(*z.shape).to(device)
    label = Numbers(2).below(z[0].numel(), len(z)).to(device)

    def losses(params, *batch):
        z = f(params, *batch[:-1])
        return (z - batch[-1]).square().reshape(z.shape[0], -1).sum(1)

    def mean(params, *batch):
        return losses(params, *batch).mean()

    given = (params, *inputs, target)
    shares = loop_batch_grad(losses)(*given)
    laws = [
        (batch_grad(losses, in_dims=dims), given, shares),
        (batch_grad(mean, in_dims=dims), given, tree.map_tensors(lambda g: g / len(z), shares)),
        (sum_grad_squared(losses, in_dims=dims), given, loop_sum_grad_squared(losses)(*given)),
        (variance(losses, in_dims=dims), given, loop_variance(losses)(*given)),
    ]
    for loss, t in (F.mse_loss, target), (cross_entropy, label):
        given = (params, *inputs, t)
        laws.append((diag_ggn(f, loss, in_dims=dims), given, dense_diag_ggn(f, loss)(*given)))
    for statistic, given, expected in laws:
        for path, kind in (statistic, dtype), (generic(statistic), dtype), (statistic, torch.float32):
            assert_trees_close(path(*moved(given, kind, device)), expected, RTOL[kind])


@pytest.mark.parametrize("form", [f for forms in strategies.FORMS.values() for f in forms], ids=str)
@given(data=st.data())
def test_form(form, data, device, dtype):
    assert_fast_equals_generic_equals_loop(data.draw(strategies.formed(form)), device, dtype)


@given(case=strategies.linears())
def test_linear(case, device, dtype):
    assert_fast_equals_generic_equals_loop(case, device, dtype)


@given(case=strategies.matmuls())
def test_matmul(case, device, dtype):
    assert_fast_equals_generic_equals_loop(case, device, dtype)


@pytest.mark.parametrize("transposed", [False, True], ids=["conv", "conv_transpose"])
@pytest.mark.parametrize("d", [1, 2, 3], ids="{}d".format)
@given(data=st.data())
def test_convolution(d, transposed, data, device, dtype):
    assert_fast_equals_generic_equals_loop(data.draw(strategies.convolutions(d, transposed)), device, dtype)
