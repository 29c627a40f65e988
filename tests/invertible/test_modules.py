"""Modules whose forward has an inverse are blocks as they are."""

import copy
import io

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad

from invfunc import additive_coupling, chain, functional, invertible_checkpoint, leapfrog
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers


class Scaled(nn.Module):
    """`forward` and `inverse`, with a further input."""

    def __init__(self):
        super().__init__()
        self.scale, self.shift = nn.Parameter(Numbers(0)(3)), nn.Linear(3, 3).double()
        for number, p in enumerate(self.shift.parameters()):
            p.data.copy_(Numbers(number)(*p.shape))

    def forward(self, x, by=1.0):
        a, b = x
        return b, a * self.scale.exp() + self.shift(b).tanh() * by

    def inverse(self, y, by=1.0):
        b, a = y
        return (a - self.shift(b).tanh() * by) * (-self.scale).exp(), b


class Net(nn.Module):
    def __init__(self, wrapped, inverse=True):
        super().__init__()
        self.first, self.second = Scaled(), Scaled()
        self.blocks = [self.first, self.second]
        if wrapped:
            inverses = [m.inverse if inverse else None for m in self.blocks]
            self.blocks = [invertible_checkpoint(m, f_inv) for m, f_inv in zip(self.blocks, inverses, strict=True)]

    def forward(self, x):
        x = (x, x.cos())
        for block in self.blocks:
            x = block(block(x), by=2.0)
        return x[0].sin() * x[1]


X = Numbers(5)(4, 3)


def backward(net):
    x = X.clone().requires_grad_()
    return torch.autograd.grad(net(x).square().sum(), [x, *net.parameters()])


def of_others(net):
    params = {name: 1.25 * p.detach() for name, p in net.named_parameters()}
    called = grad(lambda p: functional_call(net, p, (X,)).square().sum())(params)
    return called, grad(lambda p: functional(net)[0](p, X).square().sum())(params)


@pytest.mark.parametrize("inverse", [True, False])
@pytest.mark.parametrize("how", [backward, of_others, lambda net: grad(lambda x: net(x).square().sum())(X)])
def test_gradients_are_those_without(how, inverse):
    assert_trees_close(how(Net(True, inverse)), how(Net(False)), rtol=1e-9)


def test_copies_evaluate_copies():
    net = Net(True)
    file = io.BytesIO()
    torch.save(net, file)
    file.seek(0)
    for other in (copy.deepcopy(net), torch.load(file, weights_only=False)):
        with torch.no_grad():
            other.first.scale.mul_(2)
        plain = Net(False)
        plain.load_state_dict(other.state_dict())
        assert_trees_close(backward(other), backward(plain), rtol=1e-9)
        assert "Scaled, inverse" in repr(other.blocks[0])


def test_modules_without_an_inverse_are_blocks_of_chains():
    layer = nn.Sequential(nn.Linear(3, 3), nn.ReLU()).double()
    chained = chain(layer, nn.Tanh())
    x = X.clone().requires_grad_()
    inputs = [x, *layer.parameters()]
    found = torch.autograd.grad(chained(x, [None, None]).square().sum(), inputs)
    assert_trees_close(found, torch.autograd.grad(layer(x).tanh().square().sum(), inputs), rtol=1e-9)


@pytest.mark.parametrize("block", [lambda step: step, invertible_checkpoint])
def test_what_has_no_influence_has_no_gradient(block):
    """The last bias of an energy of which only the gradient matters: an optimiser is to leave it alone."""
    energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    step = block(leapfrog(lambda q: -grad(lambda q: energy(q).sum())(q), 0.1))
    state = Numbers()(6, 4), Numbers(1)(6, 4)
    for _ in range(2):
        state = step(state)
    state[0].square().sum().backward()
    assert energy[2].bias.grad is None
    assert all(p.grad is not None for p in (energy[0].weight, energy[0].bias, energy[2].weight))


@pytest.mark.parametrize("keep", [False, True, (0,), (1,)])
def test_a_tensor_may_be_both_parts_of_a_state(keep):
    """One of which is kept, and the other one is not."""

    def run(first, second):
        numbers = Numbers()
        weights = [numbers(2, 2).requires_grad_() for _ in range(4)]
        a, b = first((numbers(3, 2), numbers(3, 2)), weights[:2])
        y = second((a, a), weights[2:])
        return torch.autograd.grad(torch.cat((*y, 1 * b), 1).square().sum(), weights)

    pair = additive_coupling(lambda b, p: (b @ p).tanh(), lambda a, q: (a @ q).sin())
    found = run(invertible_checkpoint(pair), invertible_checkpoint(pair, keep=keep))
    assert_trees_close(found, run(pair, pair), rtol=1e-9)
