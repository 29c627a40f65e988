"""Blocks whose calls need not be watched, and how they are called."""

from collections.abc import Callable
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad

from invfunc import (
    additive_coupling,
    affine_coupling,
    invertible_checkpoint,
    leapfrog,
    momentum,
)
from invfunc.recomputation.straight_hooks import Series
from invfunc.recomputation.straight_nodes import NodeSeries
from tests.strategies import Numbers

X = tuple(Numbers(3)(2, 4, 3))
W = tuple(0.5 * Numbers(4)(2, 3, 3))
WATCHED = 6
"""Calls of a block, after which it is known what it does."""
FACTOR = 1.5
TENSOR = torch.ones(3)


def net(x, w):
    return torch.tanh(F.linear(x, w)) * FACTOR


def softer(x, w):
    h = (x @ w.T).softmax(-1) if w is not None else x.exp()
    return h[..., :1] * x + h.mean(-1, keepdim=True)


def by_list(x, w):
    parts = [F.layer_norm(part, part.shape[-1:]) for part in (x, 2 * x)]
    return torch.cat(parts, -1).chunk(2, -1)[0] @ w


def stretched(x, p):
    return softer(net(x, p[0]), p[1])


def two(x, w):
    return x @ w, torch.sigmoid(x @ w)


def couple(x, p):
    a, b = x
    a = a + net(b, p[0])
    return a, b + net(a, p[1])


def uncouple(y, p):
    a, b = y
    b = b - net(a, p[1])
    return a - net(b, p[0]), b


def shift(x, p):
    return (x[0] + net(x[1], p[0]) * p[1].mean(), x[1])


def unshift(y, p):
    return (y[0] - net(y[1], p[0]) * p[1].mean(), y[1])


def scaled(x, p):
    return (x[0] * p[1].sum().exp(), x[1] + x[0] @ p[0])


def unscaled(y, p):
    a = y[0] / p[1].sum().exp()
    return (a, y[1] - a @ p[0])


PAIRS = {
    "additive": additive_coupling(net, softer),
    "affine": affine_coupling(two, lambda x, w: (x @ w, x.square())),
    "lists": additive_coupling(by_list, net),
    "momentum": momentum(stretched),
    "leapfrog": leapfrog(stretched, 0.3),
    "generic": (couple, uncouple),
    "one part": (shift, unshift),
    "products": (scaled, unscaled),
}
EXACT = additive_coupling(net, net, exact=True)


def block_of(pair: Any, **options: Any) -> Any:
    return (
        invertible_checkpoint(*pair, **options) if isinstance(pair, tuple) else invertible_checkpoint(pair, **options)
    )


def forward_of(pair: Any) -> Callable:
    return pair[0] if isinstance(pair, tuple) else pair


def leaves(x: Any = X, w: Any = W) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in (*x, *w)]


def loss(g: Callable, *given: Any, number: Any = 2) -> torch.Tensor:
    a, b, *w = given
    x = a * 1, b * 1
    for _ in range(number):
        x = g(x, tuple(w))
    return torch.stack(x).sin().sum()


def total(tensors: Any) -> torch.Tensor:
    return torch.cat([t.flatten() for t in tensors]).sum()


def slope(g, given=None, number=2):
    given = given or leaves()
    return torch.autograd.grad(loss(g, *given, number=number), given)


def slope_within(g, x=X, w=W, number=2):
    return grad(lambda given: loss(g, *given, number=number))((*x, *w))


@contextmanager
def straight():
    """Counts the calls that are not watched; it keeps nothing of them, as the inverse would not be evaluated."""
    found = []

    def counted(call):
        def counting(*args):
            found.append(1)
            return call(*args)

        return counting

    with (
        mock.patch.object(Series, "goes_on", counted(Series.goes_on)),
        mock.patch.object(NodeSeries, "goes_on", counted(NodeSeries.goes_on)),
    ):
        yield lambda: len(found)


def known(pair: Any, way: Callable = slope, **options: Any) -> Any:
    """A block of which it is known what it does."""
    g = block_of(pair, **options)
    for _ in range(WATCHED):
        way(g)
    return g


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


each_pair = pytest.mark.parametrize("name", PAIRS)
