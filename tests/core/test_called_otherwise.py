"""Operations called by the names of all their arguments, and parts that torch.compile made: statistics are the same."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from invfunc import batch_grad, diag_ggn, diag_hessian, functional, kfac, variance
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

N, T, D = 5, 3, 4
P = {"w": Numbers()(D, D), "b": Numbers(1)(D)}
X, Y = Numbers(2)(N, T, D), Numbers(3).below(2, N)

OPERATIONS = {
    "linear": (
        lambda p, x: F.linear(x, p["w"], p["b"]),
        lambda p, x: F.linear(weight=p["w"], bias=p["b"], input=x),
    ),
    "matmul": (lambda p, x: torch.matmul(x, p["w"]), lambda p, x: torch.matmul(input=x, other=p["w"])),
    "conv1d": (
        lambda p, x: F.conv1d(x.mT, p["w"][..., None], p["b"]),
        lambda p, x: F.conv1d(input=x.mT, weight=p["w"][..., None], bias=p["b"]),
    ),
    "layer_norm": (
        lambda p, x: F.layer_norm(x @ p["w"], (D,), p["b"]),
        lambda p, x: F.layer_norm(input=x @ p["w"], normalized_shape=(D,), weight=p["b"]),
    ),
    "cat": (
        lambda p, x: torch.cat([x @ p["w"], x], -1),
        lambda p, x: torch.cat(tensors=[x @ p["w"], x], dim=-1),
    ),
    "where": (
        lambda p, x: torch.where(x > 0, x @ p["w"], x * p["b"]),
        lambda p, x: torch.where(condition=x > 0, input=x @ p["w"], other=x * p["b"]),
    ),
    "attention": (
        lambda p, x: F.scaled_dot_product_attention(x @ p["w"], x, x * p["b"]),
        lambda p, x: F.scaled_dot_product_attention(query=x @ p["w"], key=x, value=x * p["b"]),
    ),
    "max_pool1d": (
        lambda p, x: F.max_pool1d(x @ p["w"], 2),
        lambda p, x: F.max_pool1d(input=x @ p["w"], kernel_size=2),
    ),
}
STATISTICS = {
    "batch_grad": batch_grad,
    "diag_ggn": diag_ggn,
    "diag_hessian": diag_hessian,
    "kfac": lambda f: kfac(f, fisher="exact", unsupported="diagonal"),
}


@pytest.mark.parametrize("statistic", STATISTICS)
@pytest.mark.parametrize("operation", OPERATIONS)
def test_statistics_are_those_of_calls_by_place(operation, statistic):
    found, wanted = (
        STATISTICS[statistic](lambda p, x, y, g=g: F.cross_entropy(input=g(p, x).flatten(1), target=y))(P, X, Y)
        for g in reversed(OPERATIONS[operation])
    )
    if statistic == "kfac":
        assert repr(found) == repr(wanted)
        found, wanted = ({k: v.dense() for k, v in each.items()} for each in (found, wanted))
    assert_trees_close(found, wanted, 1e-10)


# What torch.compile made, in f: it runs as it was written, whether it has been called before or not

X_COMPILED, Y_COMPILED = Numbers()(4, 5), Numbers(1)(4, 3)


def whole(make):
    return lambda f: make(lambda p, x, y: F.mse_loss(f(p, x), y))


STATISTICS_COMPILED = {
    "batch_grad": whole(batch_grad),
    "variance": whole(variance),
    "diag_ggn": lambda f: diag_ggn(f, F.mse_loss),
    "diag_hessian": lambda f: diag_hessian(f, F.mse_loss),
    "exact kfac": lambda f: lambda *args: {k: v.dense() for k, v in kfac(f, F.mse_loss, fisher="exact")(*args).items()},
}


@pytest.mark.parametrize("make", STATISTICS_COMPILED.values(), ids=STATISTICS_COMPILED)
class TestCompiled:
    @pytest.mark.parametrize("called", [False, True], ids=["first", "later"])
    def test_modules(self, make, called):
        torch.compiler.reset()
        net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 3)).double()
        compiled = torch.compile(net, backend="eager")
        if called:
            compiled(X_COMPILED)
        f, params = functional(compiled)
        plain, weights = functional(net)
        came, wanted = make(f)(params, X_COMPILED, Y_COMPILED), make(plain)(weights, X_COMPILED, Y_COMPILED)
        assert_trees_close({k.removeprefix("_orig_mod."): v for k, v in came.items()}, wanted, rtol=1e-10)
