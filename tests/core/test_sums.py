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


def model(p, x):
    return torch.tanh(x @ p["w"])


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
