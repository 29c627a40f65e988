"""Operations of a user's own, with rules and without, and networks of them."""

from __future__ import annotations

import torch

from invfunc import operation
from tests.networks import Network
from tests.strategies import Numbers


class Affine(torch.autograd.Function):
    """A user's kernel: no function mode and no rule of ours can see into it."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x, weight, bias):
        return x @ weight.mT + bias

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, g):
        x, weight, _ = ctx.saved_tensors
        return g @ weight, g.flatten(0, -2).mT @ x.flatten(0, -2), g.flatten(0, -2).sum(0)


def affine(x, weight, bias):
    """A layer that autograd sees as one node."""
    return Affine.apply(x, weight, bias)


def with_rules(fn):
    """Its weight and bias have rules; the positions p are summed over."""
    op = operation(fn)

    @op.share_of("weight")
    def _(delta, x, weight, bias):
        return "vnpo,npi->oi", delta, x

    @op.share_of("bias")
    def _(delta, x, weight, bias):
        return "vnpo->o", delta

    return op


def spectrum(x, weight):
    """An operation without a rule that follows the samples: a diagonal in an equation."""
    return torch.einsum("ni,nj,jj->ni", x.sin(), x, weight @ weight.mT)


def stretched(x, scale, power=2, *, shift=0.0):
    """Constants, defaults and keywords."""
    return (x * scale).tanh() ** power + shift


def of_rules(op):
    rand = Numbers()
    params = {"w": rand(4, 3), "b": rand(4), "v": rand(3, 4), "c": rand(3)}

    def f(p, x):
        return op(op(x, p["w"], p["b"]).tanh(), p["v"], p["c"]).sum(1)

    return Network("kernel", f, params, rand(3, 2, 3), 3)


def of_tied_rules(op):
    rand = Numbers()

    def f(p, x):
        z = op(x, p["w"], p["b"]).tanh()
        return op(z, 2 * p["w"], p["b"]).sum(1) * p["b"] @ p["w"]

    return Network("tied kernel", f, {"w": rand(3, 3), "b": rand(3)}, rand(4, 2, 3), 4)


def of_no_rule(op):
    rand, eigen, stretch = Numbers(), op(spectrum), op(stretched)

    def f(p, x):
        z = stretch(x, p["s"]) + stretch(x=x, scale=p["t"], power=3, shift=0.5)
        return eigen(z, p["w"])

    return Network("no rule", f, {"w": rand(3, 3), "s": rand(3), "t": rand()}, rand(4, 3), 4)
