"""Curvature matrices as operators of scipy, against dense ones of numpy."""

import importlib.util
import sys
from functools import cache, partial
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.sparse.linalg import LinearOperator

import invfunc
from invfunc import ggnvp, hvp, linear_operator, streamed, tree
from invfunc.errors import ArgumentError, ArgumentTypeError, MissingExtraError
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
        assert repr(operator).startswith(f"<linear_operator({product!r})(p")
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


# Curvature matrices as operators of torch's tensors, against dense ones; curvlinops' estimators and solvers take
# them

RTOL = {torch.float64: 1e-12, torch.float32: 1e-5}


class Base:
    """The used part of curvlinops' base class: a matrix as a list of `[*p, K]` and as one tensor."""

    def __init__(self, in_shape, out_shape):
        self._in_shape, self._out_shape = in_shape, out_shape
        self.shape = tuple(sum(np.prod(s, dtype=int) for s in shapes) for shapes in (out_shape, in_shape))

    def __matmul__(self, x):
        parts = x.split([int(np.prod(s)) for s in self._in_shape])
        count = x.shape[1] if x.ndim > 1 else 1
        columns = [part.reshape(*s, count) for part, s in zip(parts, self._in_shape, strict=True)]
        return torch.cat([y.reshape(-1, count) for y in self._matmat(columns)]).reshape(x.shape)


@pytest.fixture(scope="class")
def base():
    """A module of its name, so that what is made of its class is tested without it."""
    kind = type("HessianLinearOperator", (type("PyTorchLinearOperator", (Base,), {}),), {})
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "curvlinops", SimpleNamespace(HessianLinearOperator=kind))
        yield


def of_torch(product):
    return linear_operator(product, kind="torch")


@pytest.mark.quick
@pytest.mark.usefixtures("base")
class TestOperatorTorch:
    @settings(max_examples=20)
    @given(net=networks(), loss=st.sampled_from(LOSSES), called=st.sampled_from(list(PRODUCTS)))
    def test_is_the_matrix(self, device, dtype, net, loss, called):
        product, args = arranged(called, net, loss)
        args = moved(args, dtype, device)
        wanted, operator = matrices.of(product, *args), of_torch(product)(*args)
        assert operator.shape == wanted.shape and operator.dtype == wanted.dtype and operator.device == wanted.device
        size, columns = len(wanted), Numbers(4)(len(wanted), 3).to(wanted)
        assert_near(operator @ torch.eye(len(wanted)).to(wanted), wanted, RTOL[dtype])
        assert_near(operator @ columns, wanted @ columns, 10 * RTOL[dtype])
        assert_near(operator @ columns[:, 0], wanted @ columns[:, 0], 10 * RTOL[dtype])
        assert ", kind='torch')(p" in repr(operator)
        assert repr(operator).endswith(f": {size}x{size}, {wanted.dtype}, {wanted.device}>")
        assert (operator @ columns).is_contiguous() and operator._adjoint() is operator and operator.SELF_ADJOINT

    @pytest.mark.parametrize("called", PRODUCTS)
    def test_of_a_loader_goes_through_it_once_for_all_columns(self, called):
        net, ways = network("convolution", 5), []
        product, args = arranged(called, net)

        class Loader:
            def __iter__(self):
                ways.append(1)
                return zip(*(x.split(2) for x in args[1:]), strict=True)

        wanted = matrices.of(product, *args)
        operator = of_torch(streamed(product))(args[0], Loader())
        ways.clear()
        assert_near(operator @ torch.eye(len(wanted)).to(wanted), wanted, 1e-12)
        assert len(ways) == 1

    def test_refuses_what_is_not_of_one_kind(self):
        a, b = torch.ones(2), torch.ones(2).double()
        with pytest.raises(ArgumentError, match=r"params\['b'\] has dtype torch.float64, but params\['a'\] has .*32"):
            of_torch(PRODUCTS["hvp"](loss_of_two))({"a": a, "b": b}, a)
        with pytest.raises(ArgumentError, match=r"params\['b'\] is on meta, but .* on cpu; .* one device"):
            of_torch(lambda params, v, x: v)({"a": a, "b": torch.ones(2, device="meta")}, a)
        with pytest.raises(ArgumentTypeError, match=r"x\['a'\] has dtype torch.float64, but params\['a'\] has .*32"):
            of_torch(PRODUCTS["hvp"](loss_of_two))({"a": a, "b": a}, a) @ torch.ones(4, 2).double()
        with pytest.raises(ArgumentError, match=r"kind='numpy'\): kind is one of 'scipy', 'torch'"):
            linear_operator(PRODUCTS["hvp"](loss_of_two), kind="numpy")


def test_curvlinops_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, "curvlinops", None)
    operator = of_torch(PRODUCTS["hvp"](loss_of_two))
    with pytest.raises(MissingExtraError, match=r"kind='torch'\).*curvlinops is missing: .*curvlinops-for-pytorch"):
        operator({"a": torch.ones(2), "b": torch.ones(2)}, torch.ones(2))


@cache
def why_not():
    """The reason why curvlinops is missing; empty if it is there."""
    names = ("curvlinops", "backpack", "einconv", "linear_operator", "einops", "scipy", "tqdm")
    missing = [name for name in names if importlib.util.find_spec(name) is None]
    return f"{', '.join(missing)} not installed: pip install curvlinops-for-pytorch" if missing else ""


@pytest.mark.skipif(bool(why_not()), reason=why_not())
class TestCurvlinops:
    """Its estimates and solutions with our products."""

    @pytest.fixture(params=["at once", "streamed"])
    def given(self, request):
        """The operator of a GGN, damped, and the matrix."""
        from curvlinops.examples import IdentityLinearOperator

        product, (params, *batch) = arranged("ggnvp", network("convolution", 5))
        wanted = matrices.of(product, params, *batch)
        if request.param == "streamed":
            product, batch = streamed(product), [[*zip(*(x.split(3) for x in batch), strict=True)]]
        operator = of_torch(product)(params, *batch)
        shift = 0.1 * IdentityLinearOperator([p.shape for p in tree.leaves(params)], operator.device, operator.dtype)
        return operator + shift, wanted + 0.1 * torch.eye(len(wanted)).to(wanted)

    def test_estimates_as_of_the_dense_matrix(self, given):
        """From the same draws."""
        import curvlinops

        for name in ("hutchpp_trace", "xtrace", "hutchinson_trace", "hutchinson_squared_fro", "xdiag"):
            found = []
            for matrix in given:
                torch.manual_seed(0)
                found.append(getattr(curvlinops, name)(matrix, 12))
            assert_near(*found, 1e-10)
