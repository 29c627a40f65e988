"""What torch puts around a function `t(first, *rest)` of trees, and beside each the plain loop that this stands for.

The loops take derivatives by `torch.autograd.grad` and go from point to point. Both kinds nest, to the same depth.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import grad, jacrev, jvp, vmap

from invfunc import tree
from invfunc.testing.laws.compare import directions, fixed, plain, zipped

POINTS = (1.0, -0.5)
"""What the first argument is multiplied by, for several of it."""
ALONG = 0.4
"""Where the numbers of a tangent begin."""


def total(result: Any, at: float = 0.0) -> torch.Tensor:
    """A fixed linear function of a result."""
    return torch.stack([(x * fixed(x.shape, x, at)).sum() for x in tree.tensors(plain(result))]).sum()


def scaled(first: Any, by: Any) -> Any:
    """A tree times a number."""
    return tree.map_tensors(lambda x: by * x, first)


def _of_tensors(t: Callable, first: Any, rest: tuple) -> tuple[Callable, list[torch.Tensor], Callable]:
    """t as a function of the tensors of its first argument, these, and how to put such tensors together again."""
    leaves, form = tree.separate(first)  # torch.func takes no None
    return lambda own: t(form.join(own), *rest), leaves, form.join


def slopes(t: Callable, at: float = 0.0) -> Callable:
    """The gradient of its total in the first argument, by torch.func."""

    def call(first: Any, *rest: Any) -> Any:
        of, leaves, join = _of_tensors(t, first, rest)
        return join(grad(lambda own: total(of(own), at))(leaves))

    return call


def loop_slopes(t: Callable, at: float = 0.0) -> Callable:
    """The same by torch.autograd; differentiable where an argument requires grad."""

    def call(first: Any, *rest: Any) -> Any:
        of, leaves, join = _of_tensors(t, first, rest)
        deep = any(x.requires_grad for x in tree.tensors((first, rest)))
        own = [x.view_as(x) if x.requires_grad else x.detach().requires_grad_() for x in leaves]
        with torch.enable_grad():
            value = total(of(own), at)
        if not value.requires_grad:  # a result may be constant
            return join([torch.zeros_like(x) for x in leaves])
        return join(list(torch.autograd.grad(value, own, create_graph=deep, materialize_grads=True)))

    return call


def rows(t: Callable) -> Callable:
    """The gradients of two totals at once, by torch.func."""

    def call(first: Any, *rest: Any) -> Any:
        of, leaves, join = _of_tensors(lambda *args: both(t(*args)), first, rest)
        return join(jacrev(of)(leaves))

    def both(result: Any) -> torch.Tensor:
        return torch.stack([total(result), total(result, 0.7)])

    return call


def loop_rows(t: Callable) -> Callable:
    """The same one by one, by torch.autograd."""
    return lambda *args: zipped(torch.stack, [loop_slopes(t)(*args), loop_slopes(t, 0.7)(*args)])


def slope_along(t: Callable, at: float = 0.0) -> Callable:
    """The derivative of its total along a fixed tangent of the first argument, in forward mode."""

    def call(first: Any, *rest: Any) -> torch.Tensor:
        of, leaves, _ = _of_tensors(lambda *args: tree.tensors(plain(t(*args))), first, rest)
        return total(jvp(of, (leaves,), (tree.tensors(directions(first, ALONG)),))[1], at)

    return call


def loop_slope_along(t: Callable, at: float = 0.0) -> Callable:
    """The same as the product of the gradient with the tangent, by torch.autograd."""

    def call(first: Any, *rest: Any) -> torch.Tensor:
        found = tree.tensors(loop_slopes(t, at)(first, *rest))
        pairs = zip(found, tree.tensors(directions(first, ALONG)), strict=True)
        return torch.stack([(g * v).sum() for g, v in pairs]).sum()

    return call


def mapped_over(call: Callable, leaves: list[torch.Tensor], dim: int = 0) -> Any:
    """`vmap` along an axis, also where None is in a result."""
    forms: list[Any] = []

    def tensors(own: list[torch.Tensor]) -> list[torch.Tensor]:
        found, form = tree.separate(plain(call(own)))
        forms.append(form)
        return found

    found = vmap(tensors, in_dims=dim, randomness="same")(leaves)
    return forms[-1].join(found)


def at_points(t: Callable) -> Callable:
    """Its results at several multiples of the first argument at once."""

    def call(first: Any, *rest: Any) -> Any:
        of, leaves, _ = _of_tensors(t, zipped(torch.stack, [scaled(first, c) for c in POINTS]), rest)
        return mapped_over(of, leaves)

    return call


def loop_at_points(t: Callable) -> Callable:
    """The same point by point."""
    return lambda first, *rest: zipped(torch.stack, [plain(t(scaled(first, c), *rest)) for c in POINTS])
