"""The parts of a block may use torch.func and forward mode themselves, and it is the net without blocks."""

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, hessian, jacfwd, jvp, vjp, vmap

from invfunc import additive_coupling, affine_coupling, chain, invertible_checkpoint
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers


class Part(nn.Module):
    """A derivative of a layer, by one of the ways to take it."""

    def __init__(self, way):
        super().__init__()
        self.way = way
        self.weight = nn.Parameter(Numbers(1)(4, 4).double())

    def layer(self, x):
        return torch.tanh(x @ self.weight)

    def forward(self, x):
        return WAYS[self.way](self, x)


PLAIN = nn.Linear(4, 4, bias=False)

WAYS = {
    "none": lambda part, x: part.layer(x),
    "jvp": lambda part, x: jvp(part.layer, (x,), (torch.ones_like(x),))[1],
    "jvp of grad": lambda part, x: jvp(grad(lambda z: part.layer(z).sum()), (x,), (x.sin(),))[1],
    "jvp in a parameter": lambda part, x: jvp(
        lambda w: torch.tanh(functional_call(PLAIN, {"weight": w}, (x,))), (part.weight,), (part.weight.sin(),)
    )[1],
    "jacfwd": lambda part, x: jacfwd(lambda scale: part.layer(scale * x))(torch.tensor(1.3, dtype=x.dtype)),
    "vmap": lambda part, x: vmap(part.layer)(x),
    "vmap of jvp": lambda part, x: vmap(lambda v: jvp(part.layer, (x,), (v,))[1])(torch.stack([x, x.sin()])).sum(0),
    "hessian": lambda part, x: vmap(lambda row: hessian(lambda z: part.layer(z).sum())(row).sum(0))(x),
    "vjp": lambda part, x: vjp(part.layer, x)[1](x.sin())[0],
    "grad": lambda part, x: grad(lambda z: part.layer(z).sum())(x),
}
each_way = pytest.mark.parametrize("way", WAYS)


def beside(part):
    """A function with an inverse in which the part is outside of shared functions."""

    def forth(x):
        return torch.cat([x[:, :4] + part(x[:, 4:]), x[:, 4:]], 1)

    def back(y):
        return torch.cat([y[:, :4] - part(y[:, 4:]), y[:, 4:]], 1)

    return forth, back


def additive(part, other):
    return additive_coupling(part, other, split_dim=1)


POSITIONS = {
    "F": lambda part, block: block(additive(part, Part("none"))),
    "G": lambda part, block: block(additive(Part("none"), part)),
    "both": lambda part, block: block(affine_coupling(*2 * [lambda x: (part(x).sin(), part(x))], split_dim=1)),
    "chain": lambda part, block: block(chain(additive(part, part), additive(Part("none"), part))),
    "f": lambda part, block: block(*beside(part)),
    "a checkpoint": lambda part, block: block(beside(part)[0], None),
}
each_position = pytest.mark.parametrize("position", POSITIONS)


def without(f, f_inv=None):
    return f


def derivatives(net, part, second):
    x = Numbers()(3, 8).double().requires_grad_()
    y = net(x)
    options = {"allow_unused": True, "materialize_grads": True}  # for linearize a parameter is a constant
    found = torch.autograd.grad(y.square().sum(), (x, part.weight), create_graph=second, **options)
    if second:
        found += torch.autograd.grad(sum(g.square().sum() for g in found), (x, part.weight), **options)
    return y.detach(), [g.detach() for g in found]


class TestParts:
    @each_way
    @each_position
    def test_may_use_transforms(self, way, position):
        part = Part(way)
        nets = [POSITIONS[position](part, without)]
        for check in [True] if way == "linearize" else ["warn", "off", True]:  # linearize traces, slowly
            nets.append(POSITIONS[position](part, lambda *f, check=check: invertible_checkpoint(*f, check=check)))
        for second in (False, True):
            plain, *blocks = (derivatives(net, part, second) for net in nets)
            for found in blocks:
                assert_trees_close(found, plain, 1e-8)

    @pytest.mark.parametrize("way", ["jvp", "vmap", "vmap of jvp"])
    def test_may_use_them_where_gradients_are_batched(self, way):
        """`is_grads_batched` runs a backward pass within a vmap, which is none of those that begin in the part."""

        def rows(block):
            part = Part(way)
            x = Numbers()(3, 8).double().requires_grad_()
            y = POSITIONS["f"](part, block)(x)
            return torch.autograd.grad(y, (x, part.weight), Numbers(2)(2, 3, 8).double(), is_grads_batched=True)

        assert_trees_close(rows(invertible_checkpoint), rows(without), 1e-8)
