"""Blocks within blocks that close over modules and tensors, differentiated in every order."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, jacrev, vjp, vmap

from invfunc import additive_coupling, functional, invertible_checkpoint
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers


class Layer(nn.Module):
    def __init__(self, w):
        super().__init__()
        self.w = nn.Parameter(w.clone())

    def forward(self, x):
        return torch.tanh(x @ self.w)


def within_a_checkpoint(block, pair, first, second):
    inner = block(pair)
    return block(lambda x: 1.1 * inner(x), None)


def within_a_part(block, pair, first, second):
    return block(additive_coupling(block(lambda b: first(second(b)), None), second, split_dim=-1))


def thrice(block, pair, first, second):
    inner = block(pair)
    middle = block(lambda x: 1.1 * inner(x), None)
    return block(lambda x: 0.9 * middle(x) + 0.1 * inner(x), None)


NESTS = (within_a_checkpoint, within_a_part, thrice)


W, V, H = Numbers(1)(2, 2), Numbers(2)(2, 2), Numbers(3)(4)


class Net(nn.Module):
    def __init__(self, nest, wrapped, tied=False):
        super().__init__()
        self.first, self.second = Layer(W), Layer(V)
        if tied:
            self.second = nn.Sequential(self.second, self.first)
        self.hyper = nn.Parameter(H.clone())
        block = invertible_checkpoint if wrapped else lambda f, *inverse: f
        self.body = nest(block, additive_coupling(self.first, self.second, split_dim=-1), self.first, self.second)

    def forward(self, x):
        return self.body(x).square().sum()


def put_in(nest, wrapped):
    net = Net(nest, wrapped)
    return lambda p, x: functional_call(net, p, (x,))


def put_in_where_layers_are_tied(nest, wrapped):
    """Afterwards torch leaves the tensor of the transform in the tied layer."""
    net = Net(nest, wrapped, tied=True)
    own = {"first.w": "first.w", "second.0.w": "second.w", "hyper": "hyper"}
    return lambda p, x: functional_call(net, {name: p[key] for name, key in own.items()}, (x,))


def of_functional(nest, wrapped):
    f, _ = functional(Net(nest, wrapped))
    return lambda p, x: f(p, x)


def of_a_module_made_within(nest, wrapped):
    return lambda p, x: functional_call(Net(nest, wrapped), p, (x,))


def closed_over(nest, wrapped):
    block = invertible_checkpoint if wrapped else lambda f, *inverse: f

    def energy(p, x):
        w, v = p["first.w"].sin(), p["second.w"]
        first, second = lambda b: torch.tanh(b @ w), lambda b: torch.tanh(b @ v)
        return nest(block, additive_coupling(first, second, split_dim=-1), first, second)(x).square().sum()

    return energy


WAYS = (
    put_in,
    put_in_where_layers_are_tied,
    of_functional,
    of_a_module_made_within,
    closed_over,
)


def total(tensors):
    return sum(t.sin().sum() for t in tensors.values()) if isinstance(tensors, dict) else tensors.sin().sum()


def then(first, second, e):
    """The gradient, in one argument, of a sum of that in another one."""
    return lambda p, x: grad(lambda *at: total(grad(e, first)(*at)), second)(p, x)


def pulled(e):
    """Both pullbacks are called when what they belong to has returned."""
    return lambda p, x: vjp(lambda p: vjp(lambda x: e(p, x), x)[1](torch.ones_like(x.sum()))[0], p)[1](x.cos())


def plainly(e):
    def found(p, x):
        own = {name: t.clone().requires_grad_() for name, t in p.items()}
        gradients = torch.autograd.grad(grad(e, 1)(own, x).sin().sum(), list(own.values()), allow_unused=True)
        return [torch.zeros_like(t) if g is None else g for g, t in zip(gradients, own.values(), strict=True)]

    return found


def each(t):
    return torch.stack([t, 0.5 * t])


ORDERS = {
    "grad": lambda e: grad(e, (0, 1)),
    "grad of grad, mixed": lambda e: then(1, 0, e),
    "grad of grad, mixed the other way": lambda e: then(0, 1, e),
    "vjp of vjp": pulled,
    "jacrev of grad": lambda e: jacrev(grad(e, 1)),
    "vmap of grad over weights": lambda e: (
        lambda p, x: vmap(grad(e, (0, 1)), (0, None))({name: each(t) for name, t in p.items()}, x)
    ),
    "vmap of grad of grad": lambda e: lambda p, x: vmap(then(1, 0, e), (None, 0))(p, each(x)),
    "grad of vmap of grad": lambda e: lambda p, x: grad(lambda p: total(vmap(grad(e, 1), (None, 0))(p, each(x))))(p),
    "third": lambda e: then(1, 0, lambda p, x: total(grad(e, 1)(p, x))),
    "backward of grad": plainly,
}
P = {"first.w": Numbers(6)(2, 2), "second.w": Numbers(7)(2, 2), "hyper": Numbers(8)(4)}
X = Numbers(9)(3, 4)


class TestBlocksWithinBlocks:
    @pytest.mark.parametrize("order", ORDERS)
    @pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
    def test_gradients_of_every_order_are_those_without_blocks(self, way, order):
        """For one nest, which is another one for the next way and the next order: any two of the three meet."""
        nest = NESTS[(WAYS.index(way) + list(ORDERS).index(order)) % len(NESTS)]
        found, expected = (ORDERS[order](way(nest, wrapped))(P, X) for wrapped in (True, False))
        assert_trees_close(found, expected, rtol=1e-8)
