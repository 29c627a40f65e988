"""A composition of transforms beside the same composition of a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.func import grad, jvp, vjp, vmap
from torch.utils._pytree import tree_map

from invfunc import Kronecker, tree
from tests.networks import total


@dataclass(frozen=True, repr=False)
class Built:
    """`make()` is a function of `(params, x, y)[:arguments]`, and `oracle()` another one that should give the same.

    Both are made anew for each call, so that what is drawn starts from the same seed.
    """

    text: str
    make: Callable[[], Callable]
    oracle: Callable[[], Callable]
    arguments: int = 3
    least: int = 1
    """The fewest samples that it takes."""
    axes: tuple[str, ...] = ()
    """What it can be chunked over; none unless it is a statistic."""
    drawn: bool = False
    by_parameter: bool = False
    """Whether the result is a tree like the parameters."""
    within_func: bool = True
    """Whether torch.func may be around it; torch refuses its checkpoint, `torch.autograd` and broken graphs there."""
    smooth: bool = True
    """Whether it has derivatives."""
    batched: bool = False
    """Whether there is a vmap in it; of several, torch's own losses fail."""
    depth: int = 0
    """Derivatives and vmaps in it."""

    def __repr__(self) -> str:
        return self.text

    def around(self, text: str, transform: Callable) -> Built:
        """What should not change the result."""
        return replace(self, text=text, make=lambda: transform(self.make()))

    def mapped(self, text: str, transform: Callable, loop: Callable, **changed: Any) -> Built:
        """What changes the result as a loop changes the oracle's."""
        made = {"make": lambda: transform(self.make()), "oracle": lambda: loop(self.oracle())}
        return replace(self, text=text, **made, **changed)


def shown(result: Any) -> Any:
    """A result with the matrices that K-factors stand for: their eigenvectors have signs of their own."""
    return tree_map(
        lambda x: x.dense() if isinstance(x, Kronecker) else x, result, is_leaf=lambda x: isinstance(x, Kronecker)
    )


def number(t: Callable) -> Callable:
    """One number of what a function gives."""
    return lambda *args: total(shown(t(*args)))


def tangent(like: Any) -> Any:
    return tree.map_leaves(lambda p: torch.arange(1, p.numel() + 1).to(p).sin().reshape(p.shape), like)


def scaled(params: Any, by: Any) -> Any:
    return tree.map_leaves(lambda p: by * p, params)


def slopes(t: Callable) -> Callable:
    """The gradient of its number, by torch.func."""
    return lambda p, *batch: grad(lambda p: number(t)(p, *batch))(p)


def loop_slopes(t: Callable) -> Callable:
    """The same by plain autograd, of what is differentiable in what requires grad."""

    def call(params: Any, *batch: Any) -> Any:
        deep = any(p.requires_grad for p in tree.leaves(params))
        given = params if deep else tree.map_leaves(lambda p: p.detach().requires_grad_(), params)
        leaves, structure = tree.flatten(given)
        with torch.enable_grad():
            value = number(t)(given, *batch) + 0 * total(leaves)  # a result may be constant
        found = torch.autograd.grad(value, leaves, create_graph=deep, materialize_grads=True)
        return tree.unflatten(list(found), structure)

    return call


def slope_along(t: Callable) -> Callable:
    """The derivative of its number along a tangent, in forward mode."""
    return lambda p, *batch: jvp(lambda p: number(t)(p, *batch), (p,), (tangent(p),))[1]


def loop_slope_along(t: Callable) -> Callable:
    def call(params: Any, *batch: Any) -> torch.Tensor:
        found = loop_slopes(t)(params, *batch)
        pairs = zip(tree.leaves(found), tree.leaves(tangent(params)), strict=True)
        return sum((g * v).sum() for g, v in pairs)

    return call


def compiled(t: Callable) -> Callable:
    """Seen through by dynamo; the backend would only compile what is not ours."""
    torch._dynamo.reset()
    return torch.compile(lambda *args: t(*args), backend="eager")


POINTS = (1.0, 0.7)
"""Multiples of the parameters."""


def at_points(t: Callable) -> Callable:
    """Its results at several points at once."""

    def call(params: Any, *batch: Any) -> Any:
        by = tree.leaves(params)[0].new_tensor(POINTS)
        return vmap(lambda c: shown(t(scaled(params, c), *batch)))(by)

    return call


def loop_at_points(t: Callable) -> Callable:
    def call(params: Any, *batch: Any) -> Any:
        results = [shown(t(scaled(params, c), *batch)) for c in POINTS]
        return tree.map_leaves(lambda *xs: torch.stack(xs), *results)

    return call


def loop_hvp(f: Callable, loss: Callable) -> Callable:
    """The Hessian times v, by torch.func."""

    def call(params: Any, v: Any, x: Any, y: torch.Tensor) -> Any:
        return vjp(grad(lambda p: loss(f(p, x), y)), params)[1](v)[0]

    return call


def loop_ggnvp(f: Callable, loss: Callable) -> Callable:
    """The GGN times v, by torch.func."""

    def call(params: Any, v: Any, x: Any, y: torch.Tensor) -> Any:
        z, along = jvp(lambda p: f(p, x), (params,), (v,))
        curved = vjp(grad(lambda z: loss(z, y)), z)[1](along)[0]
        return vjp(lambda p: f(p, x), params)[1](curved)[0]

    return call
