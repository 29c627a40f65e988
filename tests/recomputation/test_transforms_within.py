"""The parts of a block may use torch.func and forward mode themselves, and it is the net without blocks."""

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, grad, hessian, jacfwd, jvp, linearize, vjp, vmap

from invfunc import additive_coupling, affine_coupling, chain, invertible_checkpoint, variance
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


def dual_level(part, x):
    with forward_ad.dual_level():
        return forward_ad.unpack_dual(part.layer(forward_ad.make_dual(x, x.cos()))).tangent


PLAIN = nn.Linear(4, 4, bias=False)

WAYS = {
    "none": lambda part, x: part.layer(x),
    "jvp": lambda part, x: jvp(part.layer, (x,), (torch.ones_like(x),))[1],
    "value and jvp": lambda part, x: torch.mul(*jvp(part.layer, (x,), (x.sin(),))),
    "jvp of jvp": lambda part, x: jvp(lambda z: jvp(part.layer, (z,), (z.cos(),))[1], (x,), (x.sin(),))[1],
    "jvp of grad": lambda part, x: jvp(grad(lambda z: part.layer(z).sum()), (x,), (x.sin(),))[1],
    "jvp in a parameter": lambda part, x: jvp(
        lambda w: torch.tanh(functional_call(PLAIN, {"weight": w}, (x,))), (part.weight,), (part.weight.sin(),)
    )[1],
    "jacfwd": lambda part, x: jacfwd(lambda scale: part.layer(scale * x))(torch.tensor(1.3, dtype=x.dtype)),
    "vmap": lambda part, x: vmap(part.layer)(x),
    "vmap of jvp": lambda part, x: vmap(lambda v: jvp(part.layer, (x,), (v,))[1])(torch.stack([x, x.sin()])).sum(0),
    "linearize": lambda part, x: linearize(part.layer, x)[1](x.sin()),
    "dual_level": dual_level,
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

    @pytest.mark.parametrize("way", ["jvp", "vmap of jvp", "dual_level"])
    def test_may_use_them_after_the_first_calls(self, way):
        part = Part(way)
        block = POSITIONS["both"](part, invertible_checkpoint)
        for _ in range(6):
            block(Numbers()(3, 8).double())
            found = derivatives(block, part, True)
        assert_trees_close(found, derivatives(POSITIONS["both"](part, without), part, True), 1e-8)

    @pytest.mark.parametrize("way", ["jvp", "jacfwd", "vmap of jvp", "linearize"])
    def test_may_use_them_beside_a_statistic(self, way):
        part = Part(way)

        def spread(block):
            def loss(weight, x):
                net = POSITIONS["f"](lambda z: functional_call(part, {"weight": weight}, (z,)), block)
                return net(x).square().sum(1)

            return variance(loss)(Numbers(2)(4, 4).double(), Numbers()(5, 8).double())

        assert_trees_close(spread(invertible_checkpoint), spread(without), 1e-8)

    def test_may_write_a_state_beside_them(self):
        """Memory that a transform has freed may be that of the state's copy later."""

        def run(block, i):
            torch.manual_seed(i)
            weight = torch.randn(6, 6, dtype=torch.float64).requires_grad_()
            net = nn.utils.spectral_norm(nn.Linear(6, 6).double())
            force = grad(lambda z: (z @ weight).cos().sum())
            step = affine_coupling(lambda b: (force(b), b), lambda a: (0.5 * net(a), a))
            step = invertible_checkpoint(step) if block else step
            state = torch.randn(2, 5, 6, dtype=torch.float64).requires_grad_().unbind(0)
            for _ in range(2):
                state = step(state)
            return [
                *torch.autograd.grad(state[0].sin().sum() + state[1].sum(), [weight, *net.parameters()]),
                net.weight_u,
            ]

        for i in range(20):
            assert_trees_close(run(True, i), run(False, i), 1e-8)

    @pytest.mark.parametrize("way", ["jvp", "vmap", "vmap of jvp"])
    def test_may_use_them_where_gradients_are_batched(self, way):
        """`is_grads_batched` runs a backward pass within a vmap, which is none of those that begin in the part."""

        def rows(block):
            part = Part(way)
            x = Numbers()(3, 8).double().requires_grad_()
            y = POSITIONS["f"](part, block)(x)
            return torch.autograd.grad(y, (x, part.weight), Numbers(2)(2, 3, 8).double(), is_grads_batched=True)

        assert_trees_close(rows(invertible_checkpoint), rows(without), 1e-8)
