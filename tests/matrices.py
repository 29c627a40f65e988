"""Whole curvature matrices and their products by torch.func, and what the products of the library say they are."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.func import grad, jacfwd, jacrev, jvp, vjp, vmap

from invfunc import ggnvp, hvp, tree
from tests.networks import NETWORKS, total
from tests.strategies import Numbers


def steps(n, like):
    """n points around a tree."""
    rand = Numbers(5)
    return tree.map_leaves(lambda x: x + 0.3 * rand(n, *x.shape), like)


def sets(n, *batch):
    """n data sets: the samples of each in another order, shifted."""
    shifts = [0.1 * i for i in range(n)]
    moved = [[x.roll(i, 0) + (d if x.is_floating_point() else 0) for i, d in enumerate(shifts)] for x in batch]
    return [torch.stack(x) for x in moved]


def over_sets(t):
    return lambda p, *batch: vmap(t, (None, 0, 0))(p, *sets(2, *batch))


def last(batch):
    return [x.movedim(0, -1) for x in batch]


def tangent(like):
    return tree.map_leaves(lambda x: Numbers(6)(*x.shape), like)


def differentiated(t, args, wanted, twice=False):
    """By torch.autograd."""
    args = list(args)
    for i in wanted:
        args[i] = tree.map_leaves(lambda x: x.clone().requires_grad_(), args[i])
    leaves = [x for i in wanted for x in tree.leaves(args[i])]
    nothing = 0 * total(leaves)  # a result may be constant
    found = torch.autograd.grad(total(t(*args)) + nothing, leaves, create_graph=True, materialize_grads=True)
    if twice:
        found = torch.autograd.grad(total(found, 8) + nothing, leaves, materialize_grads=True)
    assert all(x.grad is None for x in leaves)
    return list(found)


def slope(t):
    return grad(lambda p, x, y: total(t(p, x, y)))


COMPOSITIONS = {
    "itself": lambda t, p, x, y: t(p, x, y),
    "grad": lambda t, p, x, y: slope(t)(p, x, y),
    "grad in the inputs": lambda t, p, x, y: grad(lambda x: total(t(p, x, y)))(x),
    "jvp": lambda t, p, x, y: jvp(lambda p: t(p, x, y), (p,), (tangent(p),)),
    "jvp in the inputs": lambda t, p, x, y: jvp(lambda x: t(p, x, y), (x,), (tangent(x),)),
    "vjp": lambda t, p, x, y: vjp(lambda p: total(t(p, x, y)), p)[1](torch.tensor(2.0).double()),
    "vmap over params": lambda t, p, x, y: vmap(t, in_dims=(0, None, None))(steps(2, p), x, y),
    "vmap over data sets": lambda t, p, x, y: over_sets(t)(p, x, y),
    "vmap over both": lambda t, p, x, y: vmap(t)(steps(2, p), *sets(2, x, y)),
    "vmap of vmap": lambda t, p, x, y: vmap(vmap(t, (0, None, None)), (None, 0, 0))(steps(3, p), *sets(2, x, y)),
    "vmap over the last axis": lambda t, p, x, y: vmap(t, (None, -1, -1), 1)(p, *last(sets(2, x, y))),
    "vmap of grad": lambda t, p, x, y: vmap(slope(t), (0, None, None))(steps(2, p), x, y),
    "grad of vmap": lambda t, p, x, y: grad(lambda p: total(vmap(t, (0, None, None))(p, x, y)))(steps(2, p)),
    "grad of vmap over data sets": lambda t, p, x, y: slope(lambda p, *b: vmap(t, (None, 0, 0))(p, *sets(2, *b)))(
        p, x, y
    ),
    "grad of grad": lambda t, p, x, y: grad(lambda p: total(slope(t)(p, x, y), 8))(p),
    "jvp of grad": lambda t, p, x, y: jvp(lambda p: slope(t)(p, x, y), (p,), (tangent(p),)),
    "jacrev": lambda t, p, x, y: jacrev(lambda p: total(t(p, x, y)).reshape(1, 1))(p),
    "jacfwd": lambda t, p, x, y: jacfwd(lambda c: total(t(p, c * x, y)))(torch.ones(2, 1).double().mean()),
    "autograd": lambda t, p, x, y: differentiated(t, (p, x, y), [0]),
    "autograd in the inputs": lambda t, p, x, y: differentiated(t, (p, x, y), [1]),
    "autograd in both": lambda t, p, x, y: differentiated(t, (p, x, y), [0, 1]),
    "autograd twice": lambda t, p, x, y: differentiated(t, (p, x, y), [0], twice=True),
    "autograd of vmap": lambda t, p, x, y: differentiated(vmap(t, (0, None, None)), (steps(2, p), x, y), [0]),
    "no_grad": lambda t, p, x, y: torch.no_grad()(t)(p, x, y),
    "grad in no_grad": lambda t, p, x, y: torch.no_grad()(slope(t))(p, x, y),
    "inference_mode": lambda t, p, x, y: torch.inference_mode()(t)(p, x, y),
    "inference tensors": lambda t, p, x, y: inferring(t, p, x, y),
}
SMOOTH = [name for name in NETWORKS if name != "generic"]  # the inputs of that one are a tree with integers


def inferring(t, *args):
    with torch.inference_mode():
        return t(*tree.map_leaves(torch.clone, args))


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
