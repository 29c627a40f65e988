"""Parts without a gradient, backward passes in inference mode, and parameters that data initialises."""

import pytest
import torch
from torch.func import grad_and_value, vmap

from invfunc import additive_coupling, invertible_checkpoint
from invfunc.pairs import momentum
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

START = Numbers()(2, 3), Numbers(1)(2, 3)
W = Numbers(2)(3, 3)


def hard(z, w):
    """A part without a gradient, as those of quantisers."""
    with torch.no_grad():
        rounded = (z @ w).round()
    return rounded + 0.3 * z @ w


def value(step, w, frozen=False):
    """Of blocks one after the other, of which one may need nothing that is saved."""
    q = w.detach() if frozen else w
    a, b = step(step(step(START, w), q), w)
    return (a * b).sin().sum()


PAIRS = {
    "coupling": lambda f: additive_coupling(f, f),
    "momentum": lambda f: momentum(f, 0.9),
}
each_pair = pytest.mark.parametrize("pair", PAIRS)


def made(pair, f):
    """A step of both parts with one weight."""
    step = PAIRS[pair](f)
    blocks = [step, invertible_checkpoint(step), invertible_checkpoint(step, keep=True)]
    return [lambda x, w, g=g: g(x, (w, w) if pair == "coupling" else w) for g in blocks]


@each_pair
def test_parts_without_a_gradient(pair):
    def found(step):
        w = W.clone().requires_grad_()
        plain = [torch.autograd.grad(value(step, w, frozen), w)[0] for frozen in (False, True)]
        of = grad_and_value(lambda w: value(step, w))
        return plain, of(W), vmap(of)(W[None])

    plain, *blocks = (found(step) for step in made(pair, hard))
    for block in blocks:
        assert_trees_close(block, plain, 1e-9)


@each_pair
def test_the_backward_pass_may_be_in_inference_mode(pair):
    """As that of torch."""

    def found(step, mode):
        w = W.clone().requires_grad_()
        loss = value(step, w)
        with mode():
            torch.autograd.grad(loss, w, retain_graph=True)
            return torch.autograd.grad(loss, w)[0].clone()

    plain, *blocks = made(pair, lambda z, w: (z @ w).tanh())
    for block in blocks:
        assert_trees_close(found(block, torch.inference_mode), found(plain, torch.enable_grad), 1e-9)


class ActNorm(torch.nn.Module):
    """Glow's, whose first batch gives it its scale."""

    def __init__(self):
        super().__init__()
        self.scale = torch.nn.Parameter(torch.ones(3, dtype=W.dtype))
        self.register_buffer("done", torch.tensor(False))

    def forward(self, x):
        if not self.done:
            with torch.no_grad():
                self.scale.copy_(1 / x.std(0))
                self.done.fill_(True)
        return x * self.scale

    def inverse(self, y):
        return y / self.scale


@pytest.mark.parametrize("before", [False, True], ids=["at once", "by a call without gradients"])
def test_parameters_that_are_initialised_by_data_are_so_once(before):
    plain, norm = ActNorm(), ActNorm()
    (wanted,) = torch.autograd.grad(plain(START[0]).sin().sum(), plain.scale)
    block = invertible_checkpoint(norm, norm.inverse)
    if before:
        with torch.no_grad():
            block(START[0])
    x = START[0].clone().requires_grad_()
    (found,) = torch.autograd.grad(block(x * 1).sin().sum(), norm.scale)
    assert_trees_close(found, wanted, 1e-12)
    assert norm.done and torch.allclose(norm.scale, plain.scale)
