"""Laws of products with matrices, of Jacobians, and of K-factors."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any

import torch

import invfunc
from invfunc import tree
from invfunc.testing.laws import loops
from invfunc.testing.laws.compare import directions, fixed
from invfunc.testing.laws.law import Claim, Inapplicable, law
from invfunc.testing.laws.problem import BOTH, LOSSES, MODEL, Problem
from invfunc.testing.laws.statistics import made, no_loss, one

VECTORS = 2
"""How many vectors are multiplied: numbers in all entries, and a one at one of the entries."""


def vectors(problem: Problem) -> list[Any]:
    """Trees like the parameters."""
    products = loops.Products(problem)
    leaf = max(range(len(products.leaves)), key=lambda i: products.leaves[i].numel())
    unit = products.unit(leaf, int(problem.entries[leaf][-1]))
    return [directions(problem.params), products.form.join(unit)]


def _of_product(problem: Problem, called: str, product: Any, expected: Any) -> Iterator[Claim]:
    """By itself, and by its linearisation."""
    for turn, v in enumerate(vectors(problem)):
        dense = cache(lambda v=v: expected(v))
        more = ", of a column" if turn else ""
        yield Claim(f"{called}{more}", lambda v=v: product(problem.params, v, *problem.batch), dense, problem.n)
        yield Claim(f"{called}.linearize{more}", lambda v=v: product.linearize(*problem.args)(v), dense, problem.n)


@law("products equal those of the matrix", when=no_loss)
def of_matrices(problem: Problem) -> Iterator[Claim]:
    """hvp(f)(params, v, *batch) == H v, ggnvp(f, loss) is J^T H (J v), with fisher="empirical" sum_n G[n] (G[n] . v)"""
    products = loops.Products(problem)
    given = (problem.f,) if problem.loss is None else (problem.f, problem.loss)

    def hessian(v: Any) -> Any:
        return products.form.join(products.hessian(tree.tensors(v)))

    def ggn(v: Any) -> Any:
        return products.transposed(products.ggn(tree.tensors(v))[1])

    def fisher(v: Any) -> Any:
        shares = loops.shares(problem)
        along = [torch.tensordot(g, d, d.ndim) for g, d in zip(tree.tensors(shares), tree.tensors(v), strict=True)]
        return tree.map_tensors(lambda g: torch.tensordot(sum(along[1:], along[0]), g, 1), shares)

    yield from _of_product(problem, "hvp", invfunc.hvp(*given), hessian)
    if problem.kind == BOTH:
        yield from _of_product(problem, "ggnvp", invfunc.ggnvp(*given, in_dims=problem.in_dims), ggn)
    if not loops.no_shares(problem):
        empirical = invfunc.ggnvp(*given, fisher="empirical", in_dims=problem.in_dims)
        yield from _of_product(problem, "ggnvp empirical", empirical, fisher)


def _no_model(problem: Problem) -> str:
    return "" if problem.kind in (MODEL, BOTH, LOSSES) else "f returns one number"


@law("Jacobians equal their loop", when=_no_model)
def jacobians(problem: Problem) -> Iterator[Claim]:
    """linearize(f)(params, *inputs) == f, v -> J v, c -> J^T c; batch_jacobian(f) times v is J v, its gram J J^T c"""
    products = loops.Products(problem)
    inputs, v = (problem.params, *problem.inputs), directions(problem.params)
    forth = cache(lambda: products.jacobian(tree.tensors(v)))

    def cotangents() -> list[torch.Tensor]:
        return [fixed(z.shape, z, 0.2) for z in products.outputs(*products.leaves)]

    def like_outputs(tensors: list[torch.Tensor]) -> Any:
        return tree.separate(problem.f(*inputs))[1].join(tensors)

    @cache
    def linearized() -> Any:
        return invfunc.linearize(problem.f)(*inputs)

    back = cache(lambda: products.transposed(cotangents()))
    yield Claim(
        "linearize, values", lambda: tree.tensors(linearized()[0]), lambda: list(products.outputs(*products.leaves))
    )
    yield Claim("linearize, J v", lambda: tree.tensors(linearized()[1](v)), forth, problem.n)
    yield Claim("linearize, J^T c", lambda: linearized()[2](like_outputs(cotangents())), back, problem.n)
    for of in made(problem, "batch_jacobian"):

        def along(of: Any = of) -> list[torch.Tensor]:
            """J v, of each output."""
            return [_times(rows, v) for rows in _of_each_output(of(), len(forth()))]

        yield Claim("batch_jacobian, J v", along, forth, problem.n)


def _of_each_output(jacobian: Any, count: int) -> list[Any]:
    """Several outputs have a tree each; of one it is the tree itself."""
    leaves, size = tree.tensors(jacobian), len(tree.tensors(jacobian)) // count
    return [leaves[i * size : (i + 1) * size] for i in range(count)]


def _times(rows: list[torch.Tensor], v: Any) -> torch.Tensor:
    parts = [torch.tensordot(j, d, d.ndim) for j, d in zip(rows, tree.tensors(v), strict=True)]
    return sum(parts[1:], parts[0])


@law("K-factors of one sample are its block", when=no_loss)
def factors(problem: Problem) -> Iterator[Claim]:
    """kfac(f, fisher="empirical")(params, *one) @ v == G (G . v), where G is read at one position of the sample"""
    alone = problem.part([0])
    every = [(path, p) for path, p in tree.named_leaves(problem.params) if p is not None]

    @cache
    def factored(weight_sharing: str) -> list[invfunc.kronecker.Kronecker]:
        return _kroneckers(one(alone, "kfac empirical")(weight_sharing=weight_sharing))

    def at_one_position(at: int) -> bool:
        """The factors of a sum over positions are those of their means and sums."""
        pairs = zip(factored("expand")[at].factors, factored("reduce")[at].factors, strict=True)
        return all(torch.allclose(a, b, 1e-6, 1e-6 * a.abs().max().item()) for a, b in pairs)

    for at, (path, p) in enumerate(every):
        v = fixed(p.shape, p)

        def block(at: int = at, v: torch.Tensor = v) -> torch.Tensor:
            if not at_one_position(at):
                raise Inapplicable("it is read at several positions of a sample")
            g = tree.tensors(one(alone, "batch_grad").itself())[at][0]
            return g * (g * v).sum()

        yield Claim(f"kfac of params{path}", lambda at=at, v=v: factored("expand")[at] @ v, block)


def _kroneckers(result: Any) -> list[invfunc.kronecker.Kronecker]:
    found: list[Any] = []
    tree.map_leaves(found.append, result, is_leaf=lambda x: isinstance(x, invfunc.kronecker.Kronecker))
    return [x for x in found if x is not None]
