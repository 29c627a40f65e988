"""Curvature matrices as operators of scipy, against dense ones of numpy."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator

import invfunc
from invfunc import ggnvp, hvp, linear_operator
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing.models import moved
from tests import matrices
from tests.matrices import assert_near
from tests.networks import LOSSES, network, networks
from tests.strategies import Numbers

PRODUCTS = {"hvp": hvp, "ggnvp": ggnvp, "empirical": partial(ggnvp, fisher="empirical")}


def arranged(called, net, loss=LOSSES[0]):
    return PRODUCTS[called](net.f, loss), (net.params, net.x, loss.target(Numbers(1), net.n))


class TestOperator:
    @given(net=networks(), loss=st.sampled_from(LOSSES), called=st.sampled_from(list(PRODUCTS)))
    def test_is_the_matrix(self, device, dtype, net, loss, called):
        product, args = arranged(called, net, loss)
        args, rtol = moved(args, dtype, device), {torch.float64: 1e-12, torch.float32: 1e-5}[dtype]
        wanted = matrices.of(product, *args).cpu()
        operator, size = linear_operator(product)(*args), len(wanted)
        assert isinstance(operator, LinearOperator) and operator.shape == (size, size)
        assert operator.dtype == wanted.numpy().dtype
        found = operator @ np.eye(size)
        assert isinstance(found, np.ndarray) and found.dtype == operator.dtype
        assert_near(torch.tensor(found), wanted, rtol)
        x = Numbers(4)(size).numpy()
        for image in (operator @ x, operator.matvec(x[:, None])[:, 0], operator.rmatvec(x), operator.H @ x):
            assert image.shape == (size,)
            assert_near(torch.tensor(image), wanted @ torch.tensor(x).to(dtype), 10 * rtol)
        assert_near(torch.tensor(x @ operator), wanted @ torch.tensor(x).to(dtype), 10 * rtol)
        assert operator.H is operator and operator.T is operator

    def test_takes_complex_and_integer_vectors(self):
        product, args = arranged("hvp", network("affine"))
        operator, wanted = linear_operator(product)(*args), matrices.of(product, *args)
        x = torch.arange(len(wanted))
        assert_near(torch.tensor(operator @ x.numpy()), wanted @ x.double(), 1e-12)
        z = torch.complex(x.double(), x.double().cos())
        found = torch.view_as_real(torch.tensor(operator @ z.numpy()))
        assert_near(found, torch.view_as_real(wanted.to(z) @ z), 1e-12)

    def test_runs_the_function_once(self):
        net, calls = network("perceptron"), []

        def f(p, x):
            calls.append(1)
            return net.f(p, x)

        operator = linear_operator(ggnvp(f, LOSSES[0]))(net.params, net.x, LOSSES[0].target(Numbers(1), net.n))
        operator @ np.eye(operator.shape[0])
        assert len(calls) == 1


class TestRefusals:
    def test_dtypes(self):
        x = y = torch.ones(2)
        with pytest.raises(ArgumentError, match=r"params\['b'\] has dtype torch.float64, but params\['a'\] has .*32"):
            linear_operator(hvp(loss_of_two))({"a": x, "b": y.double()}, x)
        with pytest.raises(ArgumentTypeError, match=r"linear_operator\(hvp\(.*params has dtype torch.bfloat16"):
            linear_operator(hvp(loss_of_two))({"a": x.bfloat16(), "b": y.bfloat16()}, x)
        with pytest.raises(ArgumentTypeError, match=r"params\['a'\] has dtype torch.int64"):
            linear_operator(hvp(loss_of_two))({"a": x.long(), "b": y}, x)

    def test_what_is_no_product(self):
        with pytest.raises(ArgumentTypeError, match=r"linear_operator\(f\): f is of type int"):
            linear_operator(3)
        with pytest.raises(ArgumentError, match=r"hvp\(loss_of_two, blocks=True\)\): .* several vectors"):
            linear_operator(invfunc.hvp(loss_of_two, blocks=True))
        operator = linear_operator(lambda params, v, x: v[:1])(torch.ones(2), torch.ones(2))
        with pytest.raises(ArgumentError, match=r"product has shape \(1,\), but params has \(2,\)"):
            operator @ np.ones(2)
        with pytest.raises(ArgumentError, match="params are missing|parameters are missing"):
            linear_operator(hvp(loss_of_two))()


def loss_of_two(params, x):
    return (params["a"] * params["b"] * x).sum()
