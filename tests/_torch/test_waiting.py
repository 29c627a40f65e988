"""How often the host asks a tensor for its numbers, for which it has to wait for an accelerator."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import invfunc
from invfunc import ArgumentError, kronecker
from tests.strategies import Numbers

aten = torch.ops.aten
WAITS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.equal.default, aten.masked_select.default}
WAITS |= {aten.is_nonzero.default, aten.item.default, aten._unique2.default}


class Waits(TorchDispatchMode):
    """Counts the calls that wait."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func in WAITS
        return func(*args, **(kwargs or {}))


def waits(t, *args):
    """Those of a call, after a first one."""
    t(*args)
    with Waits() as found:
        t(*args)
    return found.count


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
OF_THE_GGN = {
    "drawn diag_ggn": lambda f, loss: invfunc.diag_ggn(f, loss, mc_samples=1, **drawn()),
    "diag_ggn": lambda f, loss: invfunc.diag_ggn(f, loss, method="dense"),
    "kfac": lambda f, loss: invfunc.kfac(f, loss, **drawn()),
    "kflr": lambda f, loss: invfunc.kflr(f, loss, method="dense"),
}
PRODUCTS = {name: getattr(invfunc, name) for name in ("hvp", "ggnvp", "fvp")}


@pytest.mark.quick
@pytest.mark.parametrize("name", FIRST_ORDER)
def test_first_order_never_waits(problem, name):
    f, params, batch = problem
    assert waits(FIRST_ORDER[name](losses(f)), params, *batch) == 0


@pytest.mark.parametrize("name", OF_THE_GGN)
def test_all_checks_of_a_call_wait_once(problem, name):
    """And `diag_ggn` once more, to see whether f reads anything by its place in the batch."""
    f, params, batch = problem
    assert waits(OF_THE_GGN[name](f, F.cross_entropy), params, *batch) <= 1 + (name == "diag_ggn")


@pytest.mark.parametrize("name", PRODUCTS)
def test_products_wait_once(problem, name):
    f, params, batch = problem
    assert waits(PRODUCTS[name](f, F.cross_entropy), params, params, *batch) <= 1


@pytest.mark.parametrize("split", [None, "pi"])
def test_solving_does_not_wait_for_each_parameter(problem, split):
    """Without a split once for each shape, as eigenvectors may have to be found in float64."""
    f, params, batch = problem
    factors = invfunc.kflr(f, F.cross_entropy)(params, *batch)
    alone = [K for K in factors.values() if split is None or len(K.factors) == 1]
    decomposed = [factor.shape for K in alone for factor in K.factors if factor.ndim == 2]
    found = waits(lambda: kronecker.solve(factors, params, 0.1, split))
    assert found <= 1 + len({*decomposed} if split is None else decomposed)


@pytest.mark.quick
def test_the_error_is_that_of_the_first_check_that_fails(problem):
    f, params, batch = problem
    factors = invfunc.kflr(f, F.cross_entropy)(params, *batch)
    name = [*factors][2]
    skewed = torch.triu(factors[name].factors[0] + 1)
    factors[name] = invfunc.Kronecker(
        (skewed, *factors[name].factors[1:]), groups=factors[name].groups, shape=factors[name].shape
    )
    with pytest.raises(ArgumentError, match="not symmetric"):
        kronecker.solve(factors, params, 0.1)
