"""Losses and outputs that cannot be joined over batches are refused, in statistics of a model and its loss, too."""

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import streamed
from invfunc.errors import SampleAxisError
from tests.strategies import Numbers

PARAMS = {"w": torch.eye(3) + 0.1}
BATCHES = [(Numbers(i)(8, 3).float().index_fill(0, torch.tensor([0]), 3.0 + i), torch.arange(8) % 3) for i in range(2)]


def total(z, y):
    return F.cross_entropy(z, y, reduction="sum")


@pytest.mark.parametrize("make", [invfunc.diag_ggn, invfunc.diag_hessian, invfunc.ggnvp])
@pytest.mark.parametrize(
    "f",
    [
        lambda p, x: x @ p["w"] / len(x),
        lambda p, x: x / x.abs().max() @ p["w"],
        lambda p, x: (x - x.mean(0)) @ p["w"],
    ],
    ids=["divided by the number", "divided by the largest", "mixed"],
)
def test_outputs_of_a_model_that_depend_on_the_batch(make, f):
    t = streamed(make(f, total))
    with pytest.raises(SampleAxisError, match="in a smaller batch"):
        t(PARAMS, PARAMS, BATCHES) if make is invfunc.ggnvp else t(PARAMS, BATCHES)


@pytest.mark.parametrize("largest", [0, 7])
def test_losses_that_are_divided_by_the_largest(largest):
    """Beside which all stay as they are."""

    def f(p, x, y):
        losses = F.cross_entropy(x @ p["w"], y, reduction="none")
        return losses / losses.detach().max()

    x, y = Numbers(1)(8, 3).float(), torch.arange(8) % 3
    x[largest] = -9.0 * F.one_hot(y[largest], 3)
    with pytest.raises(SampleAxisError, match="in a smaller batch"):
        streamed(invfunc.variance(f))(PARAMS, [(x, y)])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_what_is_learnt_by_heart_is_taken(dtype):
    """Of which all losses are nothing but rounding."""
    q, x = torch.linalg.qr(Numbers(0)(64, 64))[0].to(dtype), Numbers(1)(66, 64).to(dtype)

    def f(p, x):
        return F.mse_loss(x @ p @ p.T, x, reduction="none").mean(1)

    batches = [(x[:33],), (x[33:],)]
    streamed(invfunc.variance(f))(q, batches)
    streamed(invfunc.hvp(f))(q, q, batches)


def test_outputs_without_entries():
    t = streamed(invfunc.ggnvp(lambda p, x: (x @ p["w"], x[:, :0]), lambda z, y: total(z[0], y)))
    t(PARAMS, PARAMS, BATCHES)
