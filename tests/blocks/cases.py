"""Pairs of several kinds on a state of two tensors, and how they are called."""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from invfunc import additive_coupling, affine_coupling, invertible_checkpoint
from invfunc.pairs import leapfrog, momentum
from tests.strategies import Numbers

X = tuple(Numbers(3)(2, 4, 3))
W = tuple(0.5 * Numbers(4)(2, 3, 3))
CALLS = 4
"""Calls of a block before the one that is looked at."""


def net(x, w):
    return torch.tanh(F.linear(x, w)) * 1.5


def softer(x, w):
    h = (x @ w.T).softmax(-1)
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


def draws(x, p):
    return x[0] + F.dropout(net(x[1], p[0]), 0.5), x[1]


def undraws(y, p):
    return y[0] - F.dropout(net(y[1], p[0]), 0.5), y[1]


def passes(x, p):
    return x[1], x[0] + net(x[1], p[0])


def passes_back(y, p):
    return y[1] - net(y[0], p[0]), y[0]


PAIRS = {
    "additive": additive_coupling(net, softer),
    "affine": affine_coupling(two, lambda x, w: (x @ w, x.square())),
    "lists": additive_coupling(by_list, net),
    "momentum": momentum(stretched),
    "leapfrog": leapfrog(stretched, 0.3),
    "generic": (couple, uncouple),
    "one part": (shift, unshift),
    "draws": (draws, undraws),
    "gives a part of x": (passes, passes_back),
    "reads a number": additive_coupling(lambda x, w: x @ w * float(w.detach().sum()), net),
}


def block_of(pair: Any, **options: Any) -> Any:
    return (
        invertible_checkpoint(*pair, **options) if isinstance(pair, tuple) else invertible_checkpoint(pair, **options)
    )


def forward_of(pair: Any) -> Callable:
    return pair[0] if isinstance(pair, tuple) else pair


def leaves(x: Any = X, w: Any = W) -> list[torch.Tensor]:
    return [t.detach().clone().requires_grad_() for t in (*x, *w)]


def total(tensors: Any) -> torch.Tensor:
    return torch.cat([t.sin().flatten() for t in tensors]).sum()


def loss(g: Callable, a: Any, b: Any, *w: Any, number: int = 2) -> torch.Tensor:
    x = a * 1, b * 1
    for _ in range(number):
        x = g(x, tuple(w))
    return total(x)


def slope(g: Callable, given: Any = None, **options: Any) -> Any:
    given = given or leaves()
    torch.manual_seed(3)
    return torch.autograd.grad(loss(g, *given, **options), given)


def slope_within(g: Callable, x: Any = X, w: Any = W) -> Any:
    torch.manual_seed(3)
    return torch.func.grad(lambda given: loss(g, *given))((*x, *w))


def assert_close(found: Any, wanted: Any) -> None:
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)
