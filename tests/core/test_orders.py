"""Samples that are picked, permuted, repeated, or computed one by one are followed, and are right."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import batch_grad, diag_ggn, diag_hessian, kfac
from invfunc._ways import known_way
from invfunc.core.order import Order
from invfunc.core.uses import back, front
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

N, EXACT = 5, 1e-9
W, X, Y = Numbers()(3, 3), Numbers(1)(N, 3), Numbers(2)(N, 3)
ORDER, BAG = torch.tensor([3, 1, 4, 0, 2]), torch.tensor([0, 0, 1, 3, 3, 3, 2])
MODELS = {
    "permuted": lambda w, x: (x[ORDER] @ w).sin()[ORDER.argsort()],
    "chunks": lambda w, x: torch.cat([(part @ w).sin() for part in x.split(2)]),
    "one by one": lambda w, x: torch.stack([(x[i] @ w).sin() for i in range(len(x))]),
    "by a mask": lambda w, x: torch.zeros_like(x).index_put(((x[:, 0] > 0),), (x[x[:, 0] > 0] @ w).sin()),
    "sums of a bag": lambda w, x: torch.zeros_like(x).index_add(0, BAG, (x[BAG] @ w).sin()),
    "entries": lambda w, x: (x[ORDER] * w[0] + w[1]).sin()[ORDER.argsort()],
    "sorted by data": lambda w, x: (x[x[:, 0].argsort()] @ w).sin()[x[:, 0].argsort().argsort()],
}


@pytest.mark.parametrize("rows", [ORDER, BAG, torch.tensor([2])], ids=["order", "bag", "one"])
def test_what_is_in_front_goes_back(rows):
    order, x = Order(rows, N), Numbers(3)(2, len(rows), 3)
    exposed = front(x, (-2, order, 0), N, 1)
    assert exposed.shape == (2, N, order.width, 3)
    assert torch.equal(back(exposed.flatten(2), x.shape[1:], (-2, order, 0), N), x)
    for n in range(N):
        assert torch.equal(exposed[:, n].sum(1), x[:, rows == n].sum(1))


@pytest.mark.parametrize("name", MODELS)
def test_statistics_are_those_of_the_jacobian(name):
    f = MODELS[name]
    jacobian = torch.func.jacrev(f)(W, X)  # [N, 3, *w]

    def loss(w, x, y):
        return F.mse_loss(f(w, x), y)

    t = batch_grad(loss)
    shares = torch.einsum("nc,nc...->n...", 2 * (f(W, X) - Y) / Y.numel(), jacobian)
    assert_trees_close(t(W, X, Y), shares, EXACT)
    assert known_way(loss, t.called) == 0  # no single samples are needed
    each = 2 * jacobian.square().sum(1) / Y.numel()
    assert_trees_close(diag_ggn(loss, per_sample=True)(W, X, Y), each, EXACT)
    hessian = torch.func.hessian(loss)(W, X, Y).flatten(0, 1).flatten(1).diagonal().view(3, 3)
    assert_trees_close(diag_hessian(loss)(W, X, Y), hessian, EXACT)
    found = torch.func.grad(lambda w: t(w, X, Y).square().sum())(W)
    wanted = torch.func.grad(
        lambda w: torch.func.jacrev(lambda w: (f(w, X) - Y).square().sum(1) / Y.numel())(w).square().sum()
    )(W)
    assert_trees_close(found, wanted, EXACT)


def test_k_factors_of_permuted_samples():
    found = kfac(lambda w, x, y: F.mse_loss((x[ORDER] @ w).sin(), y[ORDER]), fisher="exact")(W, X, Y)
    assert_trees_close(
        found.dense(), kfac(lambda w, x, y: F.mse_loss((x @ w).sin(), y), fisher="exact")(W, X, Y).dense(), EXACT
    )
