"""What torch.compile made, in f: it runs as it was written, whether it has been called before or not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from invfunc import batch_grad, diag_ggn, diag_hessian, functional, kfac, variance
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

X, Y = Numbers()(4, 5), Numbers(1)(4, 3)
P = {"w": Numbers(2)(6, 5), "a": Numbers(3)(6), "v": Numbers(4)(3, 6)}


def gated(h, a):
    return torch.tanh(h) * a


def in_place(h, a):
    h[:, 1:].mul_(a[1:])
    return torch.tanh(h)


def whole(make):
    return lambda f: make(lambda p, x, y: F.mse_loss(f(p, x), y))


STATISTICS = {
    "batch_grad": whole(batch_grad),
    "variance": whole(variance),
    "diag_ggn": lambda f: diag_ggn(f, F.mse_loss),
    "diag_hessian": lambda f: diag_hessian(f, F.mse_loss),
    "exact kfac": lambda f: lambda *args: {k: v.dense() for k, v in kfac(f, F.mse_loss, fisher="exact")(*args).items()},
}


@pytest.mark.parametrize("make", STATISTICS.values(), ids=STATISTICS)
class TestCompiled:
    @pytest.mark.parametrize("called", [False, True], ids=["first", "later"])
    @pytest.mark.parametrize("activation", [gated, in_place])
    def test_functions(self, make, activation, called):
        torch.compiler.reset()
        compiled = torch.compile(activation, backend="eager")

        def model(p, x, activation):
            return F.linear(activation(F.linear(x, p["w"]), p["a"]), p["v"])

        if called:
            model(P, X, compiled)
        came = make(lambda p, x: model(p, x, compiled))(P, X, Y)
        assert_trees_close(came, make(lambda p, x: model(p, x, activation))(P, X, Y), rtol=1e-10)

    @pytest.mark.parametrize("called", [False, True], ids=["first", "later"])
    def test_modules(self, make, called):
        torch.compiler.reset()
        net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        compiled = torch.compile(net, backend="eager")
        if called:
            compiled(X)
        f, params = functional(compiled)
        plain, weights = functional(net)
        came, wanted = make(f)(params, X, Y), make(plain)(weights, X, Y)
        assert_trees_close({k.removeprefix("_orig_mod."): v for k, v in came.items()}, wanted, rtol=1e-10)
