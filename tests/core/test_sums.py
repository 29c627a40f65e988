"""Sums over the samples, of groups and times a parameter: each sample has the share of what it adds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad

from invfunc import batch_grad, diag_ggn, variance
from invfunc.errors import SampleAxisError
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

GROUPS = 3
WEIGHTS = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def losses(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ params["w"] + params["b"], y, reduction="none")


def zeros(like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(GROUPS)


def mean_of_means(z: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    counts = torch.bincount(group, minlength=GROUPS).clamp(min=1)
    return (zeros(z).index_add(0, group, z) / counts).mean()


def counted(z: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    counts = zeros(z).index_add(0, group, torch.ones_like(group, dtype=z.dtype))
    return (zeros(z).index_add(0, group, z) / counts.clamp(min=1)).sum()


ADDED: dict[str, Callable] = {
    "index_add": lambda z, g: WEIGHTS @ zeros(z).index_add(0, g, z),
    "in place": lambda z, g: WEIGHTS @ zeros(z).index_add_(0, g, z, alpha=2),
    "scatter_add": lambda z, g: WEIGHTS @ zeros(z).scatter_add(0, g, z),
    "scatter_add_": lambda z, g: (zeros(z).scatter_add_(0, g, z) * WEIGHTS).sum() / len(z),
    "rows": lambda z, g: (z.new_zeros(GROUPS, 2).index_add(0, g, torch.stack([z, 3 * z], 1)) * WEIGHTS[:, None]).sum(),
    "means": mean_of_means,
    "counted by index_add": counted,
}


def drawn(rand: Numbers, group: list[int]) -> tuple:
    n = len(group)
    params = {"w": rand(3, 2), "b": rand(2)}
    return params, rand(n, 3), torch.arange(n) % 2, torch.tensor(group)


@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
@given(group=st.lists(st.integers(0, GROUPS - 1), min_size=2, max_size=6), seed=st.integers(0, 99))
def test_shares_are_those_of_the_weights(added, group, seed):
    params, x, y, group = drawn(Numbers(seed), group)

    def loss(params, x, y, group):
        return added(losses(params, x, y), group)

    weights = grad(added)(losses(params, x, y), group)  # as the loss is linear in the losses
    wanted = batch_grad(losses)(params, x, y)
    wanted = {name: torch.einsum("n,n...->n...", weights, share) for name, share in wanted.items()}
    found = batch_grad(loss)(params, x, y, group)
    assert_trees_close(found, wanted, 1e-12)
    spread = {name: share.var(0, correction=0) for name, share in wanted.items()}
    assert_trees_close(variance(loss)(params, x, y, group), spread, 1e-10, 1e-12)
    weighted = diag_ggn(lambda params, x, y, w: losses(params, x, y) @ w)(params, x, y, weights)
    assert_trees_close(diag_ggn(loss)(params, x, y, group), weighted, 1e-12)


@pytest.mark.parametrize(
    ("mixed", "at"),
    [
        (lambda z, g: zeros(z).index_add(0, g, z).square().sum(), "square"),
        (lambda z, g: (z - zeros(z).index_add(0, g, z)[g]).square().sum(), "getitem"),
        (lambda z, g: (z * zeros(z).scatter_add(0, g, z)[g]).sum(), "getitem"),
    ],
)
def test_what_is_not_linear_in_the_sums_is_named(mixed, at):
    params, x, y, group = drawn(Numbers(0), [0, 1, 0, 2, 1])
    with pytest.raises(SampleAxisError, match=f"`{at}`"):
        batch_grad(lambda params, x, y, group: mixed(losses(params, x, y), group))(params, x, y, group)


# A parameter that multiplies a sum over the samples, as a task's weight does: each has the share of what it adds

N, EXACT = 5, 1e-9
X, Y, C = Numbers(1)(N, 6), Numbers(2)(N, 3), torch.tensor([0, 2, 1, -100, 2])
P = {"w": Numbers(3)(6, 3), "s": Numbers(4)(2), "v": Numbers(5)(3, 3)}
WEIGHT = torch.tensor([1.0, 2.0, 0.5], dtype=X.dtype)
COUNTED = WEIGHT[C.clamp(min=0)] * (C >= 0)


def model(p, x):
    return torch.tanh(x @ p["w"])


def in_a_loop(z, n):
    total = 0
    for i in range(n):
        total = total + (z[i] - Y[i].sum()).square().sum() / n
    return total


SUMS = {
    "mse": (lambda z, y, c: F.mse_loss(z, y), lambda z: (z - Y).square().mean(1) / N),
    "mse sum": (lambda z, y, c: F.mse_loss(z, y, reduction="sum"), lambda z: (z - Y).square().sum(1)),
    "mean": (lambda z, y, c: (z - y).abs().mean(), lambda z: (z - Y).abs().mean(1) / N),
    "of means": (lambda z, y, c: (z * y).mean(0).sum() / 2 + 3, lambda z: (z * Y).sum(1) / 2 / N + 3 / N),
    "loop": (lambda z, y, c: in_a_loop(z, len(z)), lambda z: (z - Y.sum(1, True)).square().sum(1) / N),
    "huber": (
        lambda z, y, c: F.huber_loss(z, y, delta=0.3),
        lambda z: F.huber_loss(z, Y, delta=0.3, reduction="none").mean(1) / N,
    ),
    "kl_div": (
        lambda z, y, c: F.kl_div(z.log_softmax(1), y.softmax(1), reduction="batchmean"),
        lambda z: F.kl_div(z.log_softmax(1), Y.softmax(1), reduction="none").sum(1) / N,
    ),
    "cross_entropy": (
        lambda z, y, c: F.cross_entropy(z, c),
        lambda z: F.cross_entropy(z, C, reduction="none") / 4,
    ),
    "weighted": (
        lambda z, y, c: F.cross_entropy(z, c, weight=WEIGHT, label_smoothing=0.1),
        lambda z: F.cross_entropy(z, C, weight=WEIGHT, label_smoothing=0.1, reduction="none") / COUNTED.sum(),
    ),
    "soft targets": (
        lambda z, y, c: F.cross_entropy(z, y.softmax(1)),
        lambda z: F.cross_entropy(z, Y.softmax(1), reduction="none") / N,
    ),
    "nll_loss": (
        lambda z, y, c: F.nll_loss(z.log_softmax(1), c, weight=WEIGHT),
        lambda z: F.nll_loss(z.log_softmax(1), C, weight=WEIGHT, reduction="none") / COUNTED.sum(),
    ),
    "gaussian_nll_loss": (
        lambda z, y, c: F.gaussian_nll_loss(z, y, z.exp()),
        lambda z: F.gaussian_nll_loss(z, Y, z.exp(), reduction="none").mean(1) / N,
    ),
}
PRODUCTS = {
    "task weight": lambda a, b, p: a * (-p["s"][0]).exp() + p["s"][0] + b * (-p["s"][1]).exp() + p["s"][1],
    "deviation": lambda a, b, p: a / (2 * p["s"][0] ** 2) + p["s"][0].abs().log() - b,
    "stacked": lambda a, b, p: torch.stack([a, b], -1) @ p["s"].softmax(0),
    "twice": lambda a, b, p: (a * p["s"][0] + b * 2).unsqueeze(-1).mul(p["v"][0]).sum(-1) * 3,
    "matrix": lambda a, b, p: (torch.stack([a, b, a], -1) @ p["v"]).sum(-1),
    "einsum": lambda a, b, p: torch.einsum("...i,ij->...", torch.stack([a, b, a], -1), p["v"]),
}


def programs(combine, a, b):
    """A loss, and by hand what each sample adds to it; what is added once is everybody's."""

    def f(p, x, y, c):
        z = model(p, x)
        return combine(SUMS[a][0](z, y, c), SUMS[b][0](z, y, c), p)

    def each(p):
        z, none = model(p, X), X.new_zeros(())
        return combine(SUMS[a][1](z), SUMS[b][1](z), p) - combine(none, none, p) * (1 - 1 / N)

    return f, each


@pytest.mark.parametrize("product", PRODUCTS)
@pytest.mark.parametrize("name", SUMS)
def test_shares_are_what_samples_add(name, product):
    f, each = programs(PRODUCTS[product], name, "mse")
    try:
        found = batch_grad(f)(P, X, Y, C)
    except SampleAxisError:  # a sum beside a mean, which samples alone do not tell
        assert name not in ("mse", "mean", "huber", "kl_div", "soft targets", "gaussian_nll_loss")
        return
    assert_trees_close(found, torch.func.jacrev(each)(P), EXACT)


@pytest.mark.parametrize(
    "bent",
    [
        lambda a, p: (a * p["s"][0]) * (a * p["s"][1]),
        lambda a, p: a ** p["s"][0].exp(),
        lambda a, p: p["s"][0] / a,
    ],
)
def test_what_is_not_linear_in_the_sum_is_refused(bent):
    with pytest.raises(SampleAxisError):
        batch_grad(lambda p, x, y: bent(F.mse_loss(model(p, x), y), p))(P, X, Y)
