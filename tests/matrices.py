"""Whole curvature matrices and their products by torch.func, and what the products of the library say they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import grad, jacrev, jvp, vjp

from invfunc import ggnvp, hvp, tree
from tests.strategies import Numbers


def flat(t: Any) -> torch.Tensor:
    """The leaves one behind the other."""
    return torch.cat([x.reshape(-1) for x in tree.leaves(t)])


def shaped(vector: torch.Tensor, like: Any) -> Any:
    """The inverse of `flat`."""
    leaves, structure = tree.flatten(like)
    parts = vector.split([x.numel() for x in leaves])
    return tree.unflatten([part.view(x.shape) for part, x in zip(parts, leaves, strict=True)], structure)


def hessian(f: Callable, params: Any, *batch: Any) -> torch.Tensor:
    """Of the sum of f: row by row, as torch's batching rules of norms have a wrong derivative."""
    return jacrev(grad(lambda p: f(shaped(p, params), *batch).sum()), chunk_size=1)(flat(params))


def jacobian(f: Callable, params: Any, *batch: Any) -> torch.Tensor:
    """Of all outputs one behind the other."""
    return jacrev(lambda p: flat(f(shaped(p, params), *batch)), chunk_size=1)(flat(params))


def ggn(f: Callable, loss: Callable, params: Any, *batch: Any) -> torch.Tensor:
    z, rows = f(params, *batch[:-1]), jacobian(f, params, *batch[:-1])
    return rows.T @ hessian(loss, z, batch[-1]) @ rows


def fisher(losses: Callable, params: Any, *batch: Any) -> torch.Tensor:
    """Of `[N]` losses."""
    rows = jacobian(losses, params, *batch)
    return rows.T @ rows


def of(product: Callable, params: Any, *batch: Any, along: torch.Tensor | None = None) -> torch.Tensor:
    """The matrix of a product, from one linearisation, or what it makes of some directions: a column for each."""
    at = product.linearize(params, *batch)
    along = torch.eye(flat(params).numel()) if along is None else along
    return torch.stack([flat(at(shaped(v, params))) for v in along.to(flat(params))], 1)


def directions(params: Any) -> torch.Tensor:
    """Three of all parameters at once, in rows: what is linear and differs, differs along a drawn one."""
    return Numbers(2)(3, flat(params).numel())


def blocks(matrix: torch.Tensor, like: Any) -> list[torch.Tensor]:
    """The diagonal blocks, one for each leaf."""
    sizes = [x.numel() for x in tree.leaves(like)]
    return [rows.split(sizes, 1)[i] for i, rows in enumerate(matrix.split(sizes))]


def assert_near(found: torch.Tensor, wanted: torch.Tensor, rtol: float, floor: float = 1e-2) -> None:
    """No entry further off than `rtol` times the largest one."""
    assert found.shape == wanted.shape, f"{tuple(found.shape)} is not {tuple(wanted.shape)}"
    found, wanted = found.detach().double().cpu(), wanted.detach().double().cpu()
    error, largest = (found - wanted).abs().max().item(), max(wanted.abs().max().item(), floor)
    assert error <= rtol * largest, f"off by {error:.1e}, where the largest entry is {largest:.1e}"


# The same products as formulas, to be composed with transforms: `formula(f, loss)(params, v, x, y)` of summed losses


def loss_of(f, loss):
    return lambda p, x, y: loss(f(p, x), y, "sum")


def of_losses(f, loss):
    def losses(p, x, y):
        found = loss(f(p, x), y, "none")
        return found if found.ndim == 1 else found.sum(1)

    return losses


def inner(a, b):
    products = [(x * y).sum() for x, y in zip(tree.leaves(a), tree.leaves(b), strict=True)]
    return sum(products[1:], products[0])


def plain_hvp(f, loss):
    return lambda p, v, x, y: grad(lambda q: inner(grad(loss_of(f, loss))(q, x, y), v))(p)


def plain_ggnvp(f, loss):
    def formula(p, v, x, y):
        z, change = jvp(lambda q: f(q, x), (p,), (v,))
        curved = grad(lambda z: (grad(lambda z: loss(z, y, "sum"))(z) * change).sum())(z)
        return vjp(lambda q: f(q, x), p)[1](curved)[0]

    return formula


def plain_empirical(f, loss):
    def formula(p, v, x, y):
        along = jvp(lambda q: of_losses(f, loss)(q, x, y), (p,), (v,))[1]
        return vjp(lambda q: of_losses(f, loss)(q, x, y), p)[1](along)[0]

    return formula


def summed(loss):
    return lambda z, y: loss(z, y, "sum")


MAKING = {
    "hvp of f": (lambda f, loss: hvp(loss_of(f, loss)), plain_hvp),
    "hvp of f and loss": (lambda f, loss: hvp(f, summed(loss)), plain_hvp),
    "ggnvp of f": (lambda f, loss: ggnvp(loss_of(f, loss)), plain_ggnvp),
    "ggnvp of f and loss": (lambda f, loss: ggnvp(f, summed(loss)), plain_ggnvp),
    "empirical of f": (lambda f, loss: ggnvp(loss_of(f, loss), fisher="empirical"), plain_empirical),
    "empirical of losses": (lambda f, loss: ggnvp(of_losses(f, loss), fisher="empirical"), plain_empirical),
    "empirical of f and loss": (lambda f, loss: ggnvp(f, summed(loss), fisher="empirical"), plain_empirical),
}
"""Each product with its formula, made of a model function and a loss."""
READING = {
    "direct": lambda product: product,
    "linearised": lambda product: lambda p, v, *batch: product.linearize(p, *batch)(v),
}
