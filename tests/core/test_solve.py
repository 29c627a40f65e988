"""Implicit layers: systems whose matrix is a parameter, with samples as right-hand sides."""

import pytest
import torch
from torch.func import grad, hessian, jacrev, vmap

import invfunc
from invfunc import tree
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

EXACT = 1e-9


def matrix(p):
    return torch.eye(4).to(p["w"]) * 3 - p["w"]


def symmetric(p):
    return matrix(p) @ matrix(p).T


LAYERS = {
    "batched": (matrix, lambda a, b: torch.linalg.solve(a, b[:, :, None])[:, :, 0]),
    "columns": (matrix, lambda a, b: torch.linalg.solve(a, b.T).T),
    "rows": (matrix, lambda a, b: torch.linalg.solve(a.T, b, left=False)),
    "triangle": (
        lambda p: matrix(p).tril(),
        lambda a, b: torch.linalg.solve_triangular(a, b.T, upper=False).T,
    ),
    "triangle of rows": (
        lambda p: matrix(p).tril(),
        lambda a, b: torch.linalg.solve_triangular(a.T, b, upper=True, left=False),
    ),
    "Cholesky": (symmetric, lambda a, b: torch.cholesky_solve(b.T, torch.linalg.cholesky(a)).T),
}


def loss(z, y):
    return (z - y).square().mean()


def each(f):
    return lambda p, x, y: (f(p, x) - y).square().sum(1) / 4 / len(x)


def oracles(f):
    """Of a function that multiplies with the inverse."""

    def one(p, x, y, n):
        return (f(p, x[None])[0] - y).square().sum() / 4 / n

    def shares(p, x, y):
        return vmap(lambda x, y: grad(lambda p: one(p, x, y, n))(p))(*(x, y)) if (n := len(x)) else None

    def jacobian(p, x, y):
        return vmap(lambda x: jacrev(lambda p: f(p, x[None])[0])(p))(x)

    def ggn(p, x, y):
        return tree.map_leaves(lambda j: 2 * j.square().sum((0, 1)) / 4 / len(x), jacobian(p, x, y))

    def curved(p, x, y):
        h = hessian(lambda p: loss(f(p, x), y))(p)
        sizes = {k: v.numel() for k, v in p.items()}
        return {k: h[k][k].reshape(sizes[k], sizes[k]).diagonal().reshape(p[k].shape) for k in p}

    return shares, jacobian, ggn, curved


@pytest.mark.quick
@pytest.mark.parametrize("n", [1, 2, 5])
@pytest.mark.parametrize("called", LAYERS)
def test_systems_with_samples_as_right_hand_sides(called, n):
    make, solve = LAYERS[called]
    rand = Numbers()
    p, x, y = {"w": rand(4, 4), "u": rand(3, 4)}, rand(n, 3), rand(n, 4)

    def f(p, x):
        return solve(make(p), x @ p["u"])

    shares, jacobian, ggn, curved = oracles(lambda p, x: x @ p["u"] @ torch.linalg.inv(make(p)).T)
    assert_trees_close(invfunc.batch_grad(each(f))(p, x, y), shares(p, x, y), EXACT)
    assert_trees_close(invfunc.batch_grad(lambda *args: each(f)(*args).sum())(p, x, y), shares(p, x, y), EXACT)
    assert_trees_close(invfunc.batch_jacobian(f)(p, x), jacobian(p, x, y), EXACT)
    assert_trees_close(invfunc.diag_ggn(f, torch.nn.functional.mse_loss)(p, x, y), ggn(p, x, y), EXACT)
    assert_trees_close(invfunc.diag_hessian(f, torch.nn.functional.mse_loss)(p, x, y), curved(p, x, y), EXACT)

    def size(of):
        return lambda p: sum(v.square().sum() for v in of(p, x, y).values())

    ours = invfunc.diag_ggn(f, torch.nn.functional.mse_loss)
    assert_trees_close(grad(size(ours))(p), grad(size(ggn))(p), EXACT)
