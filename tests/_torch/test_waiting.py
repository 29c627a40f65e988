"""Number of times that the host asks a tensor for its numbers, for which it has to wait for an accelerator."""

from functools import partial
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import invfunc
from invfunc import kronecker
from invfunc.errors import ArgumentError
from tests.rows import PRODUCTS
from tests.strategies import Numbers

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default}
WAITS |= {aten.is_nonzero.default, aten.item.default, aten._unique2.default}
EIGH = aten._linalg_eigh.default  # which waits by itself on CUDA, to see whether it has failed


class Calls(TorchDispatchMode):
    """Counts the calls of some operations."""

    def __init__(self, wanted):
        super().__init__()
        self.wanted, self.count = wanted, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in self.wanted
        return func(*args, **(kwargs or {}))


def calls(wanted, t, *args):
    """Waits of a second call. A list of numbers is one wait; on the CPU no operation makes it."""
    t(*args)
    lists, real = [], torch.Tensor.tolist

    def listed(x):
        lists.append(real(x))
        return lists[-1]

    with mock.patch.object(torch.Tensor, "tolist", listed), Calls(wanted) as found:
        t(*args)
    return found.count + len(lists) * (wanted is WAITS)


waits = partial(calls, WAITS)


@pytest.fixture(scope="module")
def problem():
    below = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten()
    above = nn.Linear(144, 8), nn.Tanh(), nn.Linear(8, 8), nn.Linear(8, 5)
    f, params = invfunc.functional(nn.Sequential(*below, *above).double().eval())
    return f, params, (Numbers(1)(6, 1, 8, 8), torch.arange(6) % 5)


def losses(f):
    return lambda params, x, y: F.cross_entropy(f(params, x), y, reduction="none")


def drawn():
    return {"generator": torch.Generator().manual_seed(0)}


FIRST_ORDER = {
    **{name: getattr(invfunc, name) for name in ("batch_grad", "batch_l2_grad", "sum_grad_squared", "variance")},
    **{name: getattr(invfunc, name) for name in ("grad_and_variance", "noise_scale", "gram")},
    "clipped_grad": lambda loss: invfunc.clipped_grad(loss, 1.0),
    "sketched_grad": lambda loss: invfunc.sketched_grad(loss, rows=2, columns=2, **drawn()),
}
MODEL_ONLY = {name: getattr(invfunc, name) for name in ("batch_jacobian", "gram")}
OF_THE_GGN = {
    "drawn diag_ggn": lambda f, loss: invfunc.diag_ggn(f, loss, mc_samples=1, **drawn()),
    "dense diag_ggn": lambda f, loss: invfunc.diag_ggn(f, loss, method="dense"),
    "diag_ggn of one function": lambda f, loss: invfunc.diag_ggn(lambda params, x, y: loss(f(params, x), y)),
    "kfac": lambda f, loss: invfunc.kfac(f, loss, **drawn()),
    "kfoc": lambda f, loss: invfunc.kronecker.kfoc(f, loss, **drawn()),
    **{name: getattr(invfunc, name) for name in ("diag_ggn", "ggn_trace", "sqrt_ggn")},
    "diag_ggn of each": partial(invfunc.diag_ggn, per_sample=True),
    "kfac exact": lambda f, loss: invfunc.kfac(f, loss, fisher="exact"),
    "kfra": invfunc.kronecker.kfra,
}
HESSIAN = {"diag_hessian": invfunc.diag_hessian, "diag_hessian of each": partial(invfunc.diag_hessian, per_sample=True)}


@pytest.mark.quick
@pytest.mark.parametrize("name", FIRST_ORDER)
def test_first_order_never_waits(problem, name):
    f, params, batch = problem
    assert waits(FIRST_ORDER[name](losses(f)), params, *batch) == 0


@pytest.mark.parametrize("name", MODEL_ONLY)
def test_what_has_no_loss_never_waits(problem, name):
    f, params, (x, _) = problem
    assert waits(MODEL_ONLY[name](f), params, x) == 0


@pytest.mark.parametrize("name", OF_THE_GGN)
def test_all_checks_of_a_call_wait_once_at_most(problem, name):
    f, params, batch = problem
    assert waits(OF_THE_GGN[name](f, F.cross_entropy), params, *batch) <= 1


@pytest.mark.parametrize("name", HESSIAN)
def test_a_hessian_waits_once_for_all_nonlinear_calls(problem, name):
    """To leave out those whose second derivatives are all zero."""
    f, params, batch = problem
    assert waits(HESSIAN[name](f, F.cross_entropy), params, *batch) == 1


@pytest.mark.parametrize("name", ["hvp", "ggnvp", "ggnvp empirical"])
def test_products_wait_for_nothing(problem, name):
    f, params, batch = problem
    assert waits(PRODUCTS[name](f, F.cross_entropy), params, params, *batch) == 0


FACTORS = {
    "solve": lambda K, v: kronecker.solve(K, v, 0.1),
    "solve, damping split": lambda K, v: kronecker.solve(K, v, 0.1, "pi"),
    "logdet": lambda K, v: kronecker.logdet(K, 0.1),
    "eigen": lambda K, v: kronecker.eigen(K),
}


@pytest.mark.parametrize("name", FACTORS)
def test_factors_of_all_parameters_are_looked_at_together(problem, name):
    """Once for all checks."""
    f, params, batch = problem
    factors = invfunc.kfac(f, F.cross_entropy, fisher="exact")(params, *batch)
    alone = [K for K in factors.values() if name != "solve, damping split" or len(K.factors) == 1]
    shapes = {factor.shape for K in alone for factor in K.factors if factor.ndim == 2}
    call = partial(FACTORS[name], factors, params)
    assert waits(call) == 1
    assert calls({EIGH}, call) == len(shapes)


def test_an_eigenbasis_is_found_for_all_parameters_together(problem):
    f, params, batch = problem
    t = invfunc.ekfac(f, F.cross_entropy, **drawn())
    shapes = {factor.shape for K in t(params, *batch).values() for factor in K.factors if factor.ndim == 2}
    assert waits(t, params, *batch) == 1
    assert calls({EIGH}, t, params, *batch) == len(shapes)


@pytest.mark.quick
def test_the_error_is_that_of_the_first_check_that_fails(problem):
    f, params, batch = problem
    factors = invfunc.kfac(f, F.cross_entropy, fisher="exact")(params, *batch)
    name = [*factors][2]
    skewed = torch.triu(factors[name].factors[0] + 1)
    factors[name] = invfunc.kronecker.Kronecker(
        (skewed, *factors[name].factors[1:]), groups=factors[name].groups, shape=factors[name].shape
    )
    with pytest.raises(ArgumentError, match="not symmetric"):
        kronecker.solve(factors, params, 0.1)
