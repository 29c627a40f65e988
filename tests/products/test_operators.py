"""Curvature matrices as operators of scipy, against dense ones of numpy."""

import sys
from functools import partial

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator, aslinearoperator, cg, eigsh, lobpcg, minres

import invfunc
from invfunc import ggnvp, hvp, linear_operator, tree
from invfunc.errors import ArgumentError, ArgumentTypeError, MissingExtraError
from invfunc.testing.models import moved
from tests import matrices
from tests.matrices import assert_near, flat, shaped
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

    def test_of_a_product_of_the_user(self):
        def shifted(params, v, x, *, by):
            return tree.map_leaves(lambda p, v: x.sum() * v + by * p.new_ones(()) * v, params, v)

        params = {"a": torch.ones(2), "b": [torch.ones(1, 3)]}
        operator = linear_operator(shifted)(params, torch.ones(4), by=0.5)
        assert operator.dtype == np.float32 and np.allclose(operator @ np.eye(5), 4.5 * np.eye(5))
        assert repr(linear_operator(shifted)) == "linear_operator(shifted)"
        assert repr(linear_operator(hvp(F.linear))) == "linear_operator(hvp(linear))"

    def test_drops_aux_and_keeps_no_graph(self):
        net = network("affine")
        tracked = tree.map_leaves(lambda p: p.clone().requires_grad_(), net.params)
        y = LOSSES[0].target(Numbers(1), net.n)
        product = ggnvp(lambda p, x: (net.f(p, x), "aux"), LOSSES[0], has_aux=True)
        wanted = matrices.of(ggnvp(net.f, LOSSES[0]), net.params, net.x, y)
        found = linear_operator(product)(tracked, net.x, y) @ np.eye(len(wanted))
        assert_near(torch.tensor(found), wanted, 1e-12)


class TestSolvers:
    """In float64 on any device."""

    @pytest.mark.parametrize("called", PRODUCTS)
    def test_eigsh_and_lobpcg_find_the_eigenvalues(self, device, called):
        product, args = arranged(called, network("convolution", 5))
        args = moved(args, torch.float64, device)
        operator, dense = linear_operator(product)(*args), matrices.of(product, *args).cpu()
        wanted = torch.linalg.eigvalsh(dense)
        values, vectors = eigsh(operator, 3, which="LA", v0=np.ones(len(dense)))
        assert_near(torch.tensor(values), wanted[-3:], 1e-8)
        assert_near(dense @ torch.tensor(vectors), torch.tensor(vectors * values), 1e-7)
        smallest = eigsh(operator, 1, which="SA", v0=np.ones(len(dense)), return_eigenvectors=False)
        assert_near(torch.tensor(smallest), wanted[:1], 1e-8, floor=wanted.abs().max().item())
        if called != "empirical":  # of a rank that lobpcg exhausts
            values, _ = lobpcg(operator, Numbers(2)(len(dense), 2).numpy(), largest=True, tol=1e-9, maxiter=300)
            assert_near(torch.tensor(np.sort(values)), wanted[-2:], 1e-8)

    @pytest.mark.parametrize("solver", [cg, minres], ids=lambda s: s.__name__)
    def test_solve_damped_systems(self, device, solver):
        product, args = arranged("ggnvp", network("convolution", 5))
        args = moved(args, torch.float64, device)
        gradient = torch.func.grad(lambda p: LOSSES[0](network("convolution", 5).f(p, args[1]), args[2]))(args[0])
        right = flat(gradient).cpu()
        operator, dense = linear_operator(product)(*args), matrices.of(product, *args).cpu()
        damped = operator + 0.1 * aslinearoperator(np.eye(len(dense)))
        step, info = solver(damped, right.numpy(), rtol=1e-12, maxiter=1000)
        assert info == 0
        wanted = torch.linalg.solve(dense + 0.1 * torch.eye(len(dense)).double(), right)
        assert_near(torch.tensor(step), wanted, 1e-8)
        assert tree.flatten(shaped(torch.tensor(step), args[0]))[1] == tree.flatten(args[0])[1]


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

    def test_scipy_is_missing(self, monkeypatch):
        monkeypatch.setitem(sys.modules, "scipy.sparse.linalg", None)
        operator = linear_operator(hvp(loss_of_two))
        with pytest.raises(MissingExtraError, match=r"linear_operator\(.*scipy.* is missing: .*'invfunc\[scipy\]'"):
            operator({"a": torch.ones(2), "b": torch.ones(2)}, torch.ones(2))


def loss_of_two(params, x):
    return (params["a"] * params["b"] * x).sum()
