"""Programs that once gave wrong numbers of second order without a word: each is right now, or an error."""

from contextlib import suppress
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import jacrev

from invfunc import (
    InvFuncError,
    batch_grad,
    chunked,
    diag_ggn,
    diag_hessian,
    estimate_trace,
    functional,
    ggnvp,
    gram,
    kfac,
    together,
)
from invfunc.errors import SampleAxisError
from invfunc.kronecker import kfra
from invfunc.testing import assert_trees_close, dense_diag_ggn, dense_diag_hessian
from tests.strategies import Numbers

W, X = Numbers(1)(3, 4), Numbers(2)(5, 3)
CLASSES, WEIGHTS = torch.tensor([0, 1, 2, 3, 0]), Numbers(3)(5).abs()


def linear(w, x):
    return x @ w


def squares(z, y):
    return (z - y).square().sum()


def multiplied(z, y):
    return F.cross_entropy(z, y, reduction="none").mul_(WEIGHTS).sum()


def masked(z, y):
    losses = F.cross_entropy(z, y, reduction="none")
    losses[y == 0] = 0
    return losses.sum()


@pytest.mark.parametrize("loss", [multiplied, masked])
def test_a_loss_that_is_written_to_before_it_is_summed(loss):
    wanted = dense_diag_ggn(linear, loss)(W, X, CLASSES)
    for t in (diag_ggn(linear, loss), diag_hessian(linear, loss), diag_ggn(lambda w, x, y: loss(linear(w, x), y))):
        assert_trees_close(t(W, X, CLASSES), wanted, 1e-10)


@pytest.mark.parametrize("write", [lambda h: h[:, 1:3].exp_(), lambda h: h.T.sigmoid_()], ids=["slice", "transpose"])
def test_a_view_that_is_bent_in_place(write):
    def f(w, x):
        h = x @ w
        write(h)
        return h

    target = torch.zeros(5, 4).double()
    wanted = dense_diag_hessian(lambda w, x: F.mse_loss(f(w, x), target))(W, X)
    assert_trees_close(diag_hessian(f, F.mse_loss)(W, X, target), wanted, 1e-10)


def test_a_loss_of_a_loss():
    def f(w, x, t):
        return F.mse_loss(F.mse_loss(x @ w, x, reduction="none").sum(1), t)

    square, t = Numbers(4)(3, 3), Numbers(5)(5)
    found = diag_ggn(f)(square.clone().requires_grad_(), X, t)
    assert_trees_close(found.detach(), diag_ggn(f)(square, X, t), 1e-12)


@pytest.mark.parametrize("make", [diag_hessian, partial(diag_hessian, per_sample=True)])
@pytest.mark.parametrize(
    "f",
    [
        lambda p, x: (x * p).sin() * p,
        lambda p, x: (x + p).sin() * p,
        lambda p, x: torch.einsum("ni,ni->n", (x * p).cos(), p)[:, None] * x,
    ],
    ids=["mul", "add", "einsum"],
)
def test_a_parameter_with_an_entry_for_each_sample_that_is_read_again(f, make):
    p = Numbers(9)(5, 3)
    wanted = dense_diag_hessian(f, squares)(p, X, torch.zeros(5, 3).double())
    with suppress(SampleAxisError):
        found = make(f, squares)(p, X, torch.zeros(5, 3).double())
        assert_trees_close(found if make is diag_hessian else found.sum(0), wanted, 1e-10)


def test_a_product_through_logcumsumexp():
    def f(w, x):
        return (x @ w).logcumsumexp(1)

    J = jacrev(f)(W, X).reshape(-1, W.numel())
    found = ggnvp(f, squares)(W, W.cos(), X, torch.zeros(5, 4).double())
    assert_trees_close(found, (2 * J.T @ J @ W.cos().flatten()).reshape(W.shape), 1e-10)


IGNORED = {
    "a generator without draws": (lambda: diag_ggn(linear, squares, generator=torch.Generator()), "generator"),
    "no number of draws": (lambda: kfac(linear, squares, mc_samples=None, generator=torch.Generator()), "mc_samples"),
    "a fold of a statistic": (lambda: chunked(diag_ggn(linear, squares), 2, fold="sum"), "fold"),
    "parts of a recursion": (lambda: chunked(kfra(linear, squares), 2), "parts"),
    "a statistic for a product": (
        lambda: estimate_trace(diag_ggn(linear, squares), probes=2, generator=torch.Generator()),
        "statistic",
    ),
    "gram beside others": (lambda: together(batch_grad(squares), gram(squares)), "gram"),
}


@pytest.mark.parametrize("case", IGNORED)
def test_options_that_would_be_ignored(case):
    make, named = IGNORED[case]
    with pytest.raises(InvFuncError, match=named):
        make()


def test_a_chain_with_indexing_and_squeezing():
    def f(p, x):
        return (x.unsqueeze(1) @ p[0]).squeeze(1).sin()[:, :3] @ p[1]

    args = [Numbers(1)(3, 4), Numbers(2)(3, 2)], X[:1], Numbers(4)(1, 2)
    found, wanted = kfra(f, F.mse_loss)(*args), kfac(f, F.mse_loss, fisher="exact")(*args)
    assert_trees_close([k.dense() for k in found], [k.dense() for k in wanted], 1e-10)


@pytest.mark.parametrize("order", [1, -1])
def test_a_chain_beside_a_hessian(order):
    f, params = functional(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)).double())
    made, y = [diag_hessian(f, F.mse_loss), kfra(f, F.mse_loss)][::order], Numbers(8)(5, 2)
    found = together(*made)(params, X, y)[::order]
    assert_trees_close(found[0], dense_diag_hessian(f, F.mse_loss)(params, X, y), 1e-10)
