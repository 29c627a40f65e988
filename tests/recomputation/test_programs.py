"""Ordinary programs that were wrong once: dtypes, strides, losses on the side, the same tensor in several places."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import grad, vmap

from invfunc import (
    Invertible,
    additive_coupling,
    chain,
    invertible_checkpoint,
    layers,
    with_log_det,
)
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

X = Numbers(0)(3, 4)
EXACT = 1e-9


def as_it_is(pair):
    return pair


def test_parts_of_a_narrower_dtype_than_they_become():
    """The inverse gives them in the wider one; shared functions get them in the dtype that they had."""

    def wide(b):
        return b.sin() + torch.ones(4, dtype=torch.float64)

    found = []
    for wrap in (invertible_checkpoint, as_it_is):
        x, w = X.float().requires_grad_(), torch.ones(4, requires_grad=True)
        block = wrap(additive_coupling(lambda b, w=w: (b * w).tanh(), wide))
        a, b = block((x, x * 2))
        found.append(torch.autograd.grad((a * b).sum(), [x, w]))
    assert_trees_close(*found, 1e-5)


def test_what_all_of_a_batch_share_is_compared_as_such():
    """Statistics of an x that is the same for all of a vmap are those of each, however often they are computed."""
    x = Numbers(2)(6, 3)
    weights = Numbers(3)(2, 3).exp()

    def loss(check):
        block = invertible_checkpoint(layers.batch_norm(), check=check)
        return lambda w: (block(x, (w, w)) * x.sin()).sum()

    found, wanted = (vmap(grad(loss(check)))(weights) for check in (True, "off"))
    assert_trees_close(found, wanted, EXACT)


@pytest.mark.parametrize("form", ["custom", "coupling"])
@pytest.mark.parametrize("inplace", [False, True])
def test_what_an_operation_saves_before_it_fills_it_is_filled(form, inplace):
    """`rrelu` saves its noise, and draws it then; nothing comes behind it in the block that autograd saves."""
    matrix = Numbers(4)(4, 4)

    def part(b):
        return nn.functional.rrelu(b @ matrix, training=True, inplace=inplace)

    pairs = {
        "custom": Invertible(lambda x: (x[0] + part(x[1]), x[1]), lambda y: (y[0] - part(y[1]), y[1])),
        "coupling": additive_coupling(part, torch.sin),
    }
    found = []
    for wrap in (invertible_checkpoint, as_it_is):
        torch.manual_seed(0)
        x = X.clone().requires_grad_()
        a, b = wrap(pairs[form])((x, x.cos()))
        found.append(torch.autograd.grad((a.sin() * b).sum(), x))
    assert_trees_close(*found, EXACT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_log_determinant_that_is_nothing_but_rounding_comes_back(dtype):
    """That of a rotation is some 1e-16 beside a state of size 1."""
    Q = torch.linalg.qr(Numbers(5)(4, 4))[0].to(dtype)
    flow = with_log_det(chain(*[p for _ in range(3) for p in (layers.linear(), layers.leaky_relu(0.9))]))
    x = X.to(dtype, copy=True).requires_grad_()
    params = [p for _ in range(3) for p in (Q, None)]
    y, s = invertible_checkpoint(flow, check="error")((x, torch.full((3,), 1e-17, dtype=dtype)), params)
    found = torch.autograd.grad(y.square().sum() + s.sum(), x)
    z = x
    for _ in range(3):
        z = nn.functional.leaky_relu(z @ Q.mT, 0.9)
    assert_trees_close(found, torch.autograd.grad(z.square().sum(), x), EXACT if dtype == torch.float64 else 1e-4)


@pytest.mark.parametrize("draws", [False, True])
def test_an_expanded_input_is_expanded_when_it_is_computed_again(draws):
    """Kernels and what they save, and the order in which `rand_like` draws, are those of its strides."""
    found = []
    for wrap in (invertible_checkpoint, as_it_is):
        torch.manual_seed(0)
        base = Numbers(6)(1, 5, 8).requires_grad_()
        F, G = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        block = wrap(
            additive_coupling(lambda b, F=F: F(b) * (torch.rand_like(b) if draws else b), lambda a, G=G: G(a).tanh())
        )
        a, b = block(tuple((base.expand(3, 5, 8)).chunk(2, -1)))
        found.append(torch.autograd.grad((a.sin() * b).sum(), [base, *F.parameters(), *G.parameters()]))
    assert_trees_close(*found, EXACT)


class Expert(nn.Module):
    """A layer that leaves a loss in an attribute, as experts do for their balance."""

    def __init__(self):
        super().__init__()
        self.lin = nn.Linear(3, 3).double()

    def forward(self, x):
        y = self.lin(x)
        self.balance = y.square().mean()
        return y.tanh()


WAYS = {
    "a coupling": lambda F, G, block: block(additive_coupling(F, G, split_dim=1)),
    "a function": lambda F, G, block: block(
        lambda x: torch.cat([x[:, :3] + F(x[:, 3:]), x[:, 3:]], 1),
        lambda y: torch.cat([y[:, :3] - F(y[:, 3:]), y[:, 3:]], 1),
    ),
    "a checkpoint": lambda F, G, block: block(lambda x: x + torch.cat([F(x[:, :3]), G(x[:, 3:])], 1), None),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_loss_in_an_attribute_has_its_gradient_beside_that_of_the_net(way):
    def gradients(block):
        torch.manual_seed(0)
        F, G = Expert(), Expert()
        x = torch.randn(5, 6, dtype=torch.float64)
        loss = WAYS[way](F, G, block)(x).square().mean() + F.balance
        return torch.autograd.grad(loss, list(F.parameters()))

    assert_trees_close(gradients(invertible_checkpoint), gradients(lambda f, f_inv=None: f), EXACT)


def test_a_loss_that_is_returned_beside_y():
    def returned(x, _):
        a, b = x
        return (a + b.sin(), b), b.sin().square().mean()

    def back(y, _):
        return (y[0][0] - y[0][1].sin(), y[0][1])

    def loss(x, g):
        (a, b), extra = g((x, x.cos()), None)
        return (a * b).sum() + extra

    assert_trees_close(grad(loss)(X, invertible_checkpoint(returned, back)), grad(loss)(X, returned), EXACT)


@pytest.mark.parametrize("given", [lambda a: (a, a), lambda a: (a, a * 1)], ids=["once", "twice"])
def test_the_same_tensor_in_several_places(given):
    """When it is computed again each is a tensor of its own; a part may give back what it is given."""
    pair = additive_coupling(lambda b, p: b, lambda a, p: (a * p[0]).sin() * p[1])

    def run(block):
        x, w = (Numbers(k)(3, 3).requires_grad_() for k in range(2))
        y = torch.stack(block(given(x * 1), (given(w), given(w))))
        return torch.autograd.grad(y.square().sum(), (x, w))

    assert_trees_close(run(invertible_checkpoint(pair)), run(pair), EXACT)


@pytest.mark.parametrize("number", [lambda x: x.std().item(), lambda x: x.abs().mean(0).tolist()[0]])
def test_numbers_of_data_may_have_rounding_errors(number):
    """They come from an x that the inverse gives back."""
    pair = additive_coupling(lambda x: (x * number(x.detach())).sin() * number(x.detach().cos()), torch.cos)

    def run(block):
        x = (10 * X).requires_grad_()
        return torch.autograd.grad(torch.stack(block(block((x * 1, x.cos())))).sin().sum(), x)

    block = invertible_checkpoint(pair)
    assert_trees_close((run(block), run(block)), (run(pair), run(pair)), 1e-7)


def test_an_array_of_numpy_stays_as_it_is():
    mask, order = np.arange(4) % 2 == 0, np.array([2, 0, 1, 3])

    def f(x):
        return x.tanh()[..., order] * torch.as_tensor(mask)

    def run(f):
        x = X.clone().requires_grad_()
        return torch.autograd.grad(f(x).square().sum(), x), grad(lambda x: f(x).square().sum())(X)

    assert_trees_close(run(invertible_checkpoint(f, None)), run(f), 0)


def test_what_f_saved_and_then_wrote_is_refused_as_by_torch():
    def f(x, w):
        h = x.tanh()
        h.mul_(2)
        return h @ w

    x, w = (torch.randn(3, 3, dtype=torch.float64, requires_grad=True) for _ in "xw")
    for call in (f, invertible_checkpoint(f, None)):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            call(x, w).sum().backward()
