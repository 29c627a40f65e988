"""A parameter that multiplies a sum over the samples, as a task's weight does: each has the share of what it adds."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import batch_grad
from invfunc.errors import SampleAxisError
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

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
