"""Ordinary programs: the core follows them itself, and gives what the loop over the samples gives."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import invfunc
import invfunc.core.ways as ways
from invfunc import diag_ggn, tree, variance
from invfunc.testing import assert_trees_close, dense_diag_ggn, loop_batch_grad
from tests.core.programs import MODULES, losses, mlp, of_module
from tests.rows import FIRST_ORDER

EXACT = {torch.float64: 1e-8, torch.float32: 1e-3}
FLOOR = 1e-2


@pytest.fixture(autouse=True)
def alone(monkeypatch):
    """There is no last resort: f is followed as it is."""
    monkeypatch.setattr(ways, "WAYS", ways.WAYS[:1])


REDUCTIONS = {"none": lambda z: z, "sum": torch.sum, "mean": torch.mean}


@pytest.mark.parametrize("dtype", EXACT, ids=["float64", "float32"])
@pytest.mark.parametrize("name", MODULES)
def test_first_order_statistics_are_those_of_the_loop(name, dtype):
    """All statistics, of losses that are `[N]`, a sum and a mean by turns."""
    f, *args = of_module(name)
    shares = loop_batch_grad(losses(f))(*args)
    f, *args = of_module(name, dtype=dtype)
    for i, row in enumerate(FIRST_ORDER.values()):
        reduction = [*REDUCTIONS][i % 3]
        each = tree.map_tensors(lambda g: g / len(args[1]), shares) if reduction == "mean" else shares
        found = row.make(lambda *a, r=reduction: REDUCTIONS[r](losses(f)(*a)))(*args)
        assert_trees_close(found, row.of_shares(each), EXACT[dtype], FLOOR)


@pytest.mark.parametrize("name", [name for name in MODULES if "GPT" not in name])
def test_the_diagonal_of_the_ggn_is_the_dense_one(name):
    f, *args = of_module(name)
    targets = F.one_hot(args[2], 3).to(args[0][next(iter(args[0]))])
    for loss in (
        F.cross_entropy,
        lambda z, y: F.mse_loss(z, targets),
        lambda z, y: F.binary_cross_entropy_with_logits(z, targets, reduction="sum"),
    ):
        wanted = dense_diag_ggn(f, loss)(*args)
        assert_trees_close(diag_ggn(f, loss)(*args), wanted, EXACT[torch.float64], FLOOR)
        assert_trees_close(diag_ggn(lambda p, x, y, loss=loss: loss(f(p, x), y))(*args), wanted, 1e-8, FLOOR)


WAYS = {
    "parameters that require grad": lambda t, params, x, y: t(
        {k: p.clone().requires_grad_() for k, p in params.items()}, x, y
    ),
    "parameters of the module": lambda t, params, x, y: t({k: nn.Parameter(p) for k, p in params.items()}, x, y),
    "no grad": lambda t, params, x, y: torch.no_grad()(t)(params, x, y),
    "samples that require grad": lambda t, params, x, y: t(params, x.clone().requires_grad_(), y),
    "vmap over one": lambda t, params, x, y: tree.map_tensors(
        lambda g: g[0], vmap(t, (None, 0, 0))(params, x[None], y[None])
    ),
    "vmap over models": lambda t, params, x, y: tree.map_tensors(
        lambda g: g[1], vmap(t, (0, None, None))({k: torch.stack([p.cos(), p]) for k, p in params.items()}, x, y)
    ),
}


@pytest.mark.parametrize("name", ["MLP", "ResNet", "encoder with a mask", "norms and residuals"])
@pytest.mark.parametrize("way", WAYS)
def test_around_a_statistic_it_is_the_same(way, name):
    f, *args = of_module(name)
    for t in (variance(losses(f)), diag_ggn(f, F.cross_entropy)):
        assert_trees_close(WAYS[way](t, *args), t(*args), 1e-10)


def total(result) -> torch.Tensor:
    """A number that all entries of a result have a part in."""
    return sum(x.cos().sum() for x in tree.tensors(result))


@pytest.mark.parametrize("name", ["MLP", "CNN", "encoder with a mask", "norms and residuals"])
def test_derivatives_of_a_statistic_are_those_of_the_loop(name):
    """By autograd, torch.func.grad, and vmap of it over batches."""
    f, params, x, y = of_module(name)
    row = FIRST_ORDER["variance"]
    given = {k: p.clone().requires_grad_() for k, p in params.items()}
    t = variance(losses(f))
    found = torch.autograd.grad(total(t(given, x, y)), [*given.values()])
    with sdpa_kernel(SDPBackend.MATH):  # the other kernels of torch have no second derivative
        each = loop_batch_grad(losses(f))(given, x, y)
    wanted = dict(zip(given, torch.autograd.grad(total(row.of_shares(each)), [*given.values()]), strict=True))
    assert_trees_close(dict(zip(given, found, strict=True)), wanted, 1e-8, FLOOR)
    assert_trees_close(grad(lambda p: total(t(p, x, y)))(params), wanted, 1e-8, FLOOR)
    both = vmap(grad(lambda p, x, y: total(t(p, x, y))), (None, 0, 0))(
        params, torch.stack([x.roll(1, 0), x]), torch.stack([y.roll(1, 0), y])
    )
    assert_trees_close(tree.map_tensors(lambda g: g[1], both), wanted, 1e-8, FLOOR)


def test_a_module_is_called_with_its_own_parameters_or_some_of_them():
    """`functional_call`, by hand and with buffers; what is not given is a constant, though it requires grad."""
    torch.manual_seed(0)
    module, (_, _, x, y) = mlp().double(), of_module("MLP")

    def f(params, x, y):
        return F.cross_entropy(functional_call(module, params, (x,)), y, reduction="none")

    params = dict(module.named_parameters())
    for given in (params, {k: p for k, p in params.items() if k != "0.weight"}):
        shares = loop_batch_grad(f)({k: p.detach() for k, p in given.items()}, x, y)
        assert_trees_close(variance(f)(given, x, y), FIRST_ORDER["variance"].of_shares(shares), 1e-8)


def test_dropout_in_train_mode_draws_once():
    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(4, 50), nn.Dropout(0.5), nn.Linear(50, 1, bias=False)).double()
    f, params = invfunc.functional(module)
    x = torch.randn(6, 4).double()
    found = invfunc.batch_grad(lambda p, x: f(p, x)[:, 0])(params, x)["2.weight"]
    hidden = (x @ params["0.weight"].T + params["0.bias"]) * 2
    dropped = found[:, 0] == 0
    assert_trees_close(found[:, 0], hidden.masked_fill(dropped, 0), 1e-10)
    assert 0.3 < dropped.double().mean() < 0.7


@pytest.mark.parametrize("n", [1, 2, 3, 4, 8])
def test_the_number_of_samples_may_be_any_other_size(n):
    """It may be the number of tokens, classes, channels or heads, or the width of a layer."""
    for name in ("MLP", "CNN", "encoder with a mask", "vision transformer", "LSTM", "norms and residuals"):
        f, *args = of_module(name, n)
        shares = loop_batch_grad(losses(f))(*args)
        for row in (FIRST_ORDER["sum_grad_squared"], FIRST_ORDER["batch_l2_grad"]):
            assert_trees_close(row.make(losses(f))(*args), row.of_shares(shares), 1e-8, FLOOR)


def test_a_variance_beside_a_large_mean_keeps_its_digits():
    """In float32 squares of the mean are a million times as large as the variance."""
    params, x = torch.ones(4, 1), 1e3 + torch.rand(50, 4)
    wanted = x.double().var(0, correction=0)[:, None]
    assert_trees_close(variance(lambda p, x: (x @ p)[:, 0])(params, x), wanted, 1e-4)
