"""What comes out of a vmap within a part elsewhere than in front is of the part, though no call of torch tells."""

import pytest
import torch
from torch.func import grad, jacfwd, jacrev, jvp, vmap

from invfunc import additive_coupling, invertible_checkpoint
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

W, X = Numbers()(4, 4), Numbers(1)(4, 4)


def slope(b):
    return grad(lambda b: b.sin().sum())(b)


PARTS = {
    "computed": lambda b: vmap(lambda r: (r @ W).tanh(), out_dims=1)(b).sin(),
    "last": lambda b: vmap(lambda r: (r @ W).tanh(), out_dims=-1)(b) * b,
    "another in front": lambda b: vmap(lambda r: (r @ W).tanh(), in_dims=1, out_dims=1)(b).sin() * slope(b),
    "as it is": lambda b: vmap(lambda r: r, out_dims=1)(b).sin() * slope(b),
    "a view": lambda b: vmap(lambda r: r[None], out_dims=1)(b)[0].sin() * slope(b),
    "the same for all": lambda b: vmap(lambda r: b[0].sin())(b).cos() * slope(b),
    "two": lambda b: torch.mul(*vmap(lambda r: (r.sin(), (r @ W).cos()), out_dims=(1, 0))(b)).sin(),
    "in chunks": lambda b: vmap(lambda r: (r @ W).sin(), out_dims=1, chunk_size=2)(b).cos() * slope(b),
    "nested": lambda b: vmap(vmap(torch.sin), in_dims=1, out_dims=1)(b).cos() * slope(b),
    "gradients": lambda b: vmap(grad(lambda r: (r @ W).tanh().sum()), out_dims=1)(b).sin(),
    "jacrev": lambda b: vmap(jacrev(lambda r: (r @ W).sin()), out_dims=2)(b).sum(0).cos(),
    "jacfwd": lambda b: vmap(jacfwd(lambda r: (r @ W).sin()), out_dims=1)(b).sum(0).cos(),
    "within jvp": lambda b: jvp(lambda b: vmap(lambda r: (r @ W).sin(), out_dims=1)(b).sin(), (b,), (b,))[1],
}


@pytest.mark.filterwarnings("ignore:.*leaves a tensor")
@pytest.mark.parametrize("part", PARTS.values(), ids=PARTS)
def test_is_of_the_part(part):
    pair = additive_coupling(part, torch.sin)

    def loss(g, x):
        return g(g((x.sin(), x.cos())))[0].sin().sum()

    x = X.clone().requires_grad_()
    (wanted,) = torch.autograd.grad(loss(pair, x), x)
    block = invertible_checkpoint(pair)
    for _ in range(2):
        assert_trees_close(torch.autograd.grad(loss(block, x), x)[0], wanted, 1e-9)
    assert_trees_close(grad(lambda x: loss(block, x))(X), wanted, 1e-9)


def test_what_is_mapped_over_may_be_an_argument():
    """Where the block closes over it, it is an error."""

    def part(b, w):
        return vmap(lambda c: b @ c, in_dims=1, out_dims=1)(w).sin() * slope(b)

    pair = additive_coupling(part, lambda a, w: a.sin())

    def loss(g, x, w):
        y = (x.sin(), x.cos())
        for _ in range(2):
            y = g(y, (w, None))
        return y[0].sin().sum()

    block, x, w = invertible_checkpoint(pair), X.clone().requires_grad_(), W.clone().requires_grad_()
    wanted = torch.autograd.grad(loss(pair, x, w), (x, w))
    assert_trees_close(torch.autograd.grad(loss(block, x, w), (x, w)), wanted, 1e-9)
    assert_trees_close(grad(lambda x, w: loss(block, x, w), (0, 1))(X, W), wanted, 1e-9)
