"""Laws of statistics inside of other transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch.func import grad, jacrev, jvp, vmap

from invfunc import tree
from invfunc.testing.laws import loops
from invfunc.testing.laws.compare import difference, directions, fixed, plain, tolerance, zipped
from invfunc.testing.laws.law import Claim, Inapplicable, law
from invfunc.testing.laws.problem import Problem
from invfunc.testing.laws.rows import ROWS
from invfunc.testing.laws.statistics import every, one
from invfunc.testing.oracles import dense_diag_ggn

POINTS = (1.0, -0.5)
"""What the parameters are multiplied by, for several of them."""
STEP, WEIGHTS = 1e-4, 0.3
"""How far parameters are moved for differences, and where the numbers begin that these are weighed with."""
DENSE = 4096
"""Numbers in the Jacobian up to which the dense GGN is differentiated."""


def total(result: Any, at: float = 0.0) -> torch.Tensor:
    """A fixed linear function of a result."""
    return torch.stack([(x * fixed(x.shape, x, at)).sum() for x in tree.tensors(result)]).sum()


def mapped_over(call: Callable, leaves: list[torch.Tensor]) -> Any:
    """`vmap`, also where None is in a result."""
    forms: list[Any] = []

    def tensors(own: list[torch.Tensor]) -> list[torch.Tensor]:
        found, form = tree.separate(call(own))
        forms.append(form)
        return found

    found = vmap(tensors, randomness="same")(leaves)
    return forms[-1].join(found)


@law("vmap over parameters is the loop")
def batched(problem: Problem) -> Iterator[Claim]:
    """vmap(t, (0, None, ...))(stack(points), *batch) == stack([t(p, *batch) for p in points])"""
    points = [tree.map_tensors(lambda p, c=c: c * p, problem.params) for c in POINTS]
    leaves, form = tree.separate(zipped(torch.stack, points))

    def mapped(call: Callable, args: tuple) -> Any:
        return mapped_over(lambda own: call(form.join(own), *args[1:]), leaves)

    @cache
    def possible() -> None:
        """Torch has to be able to do this of f, with the random numbers of the loop."""
        args = (problem.params, *problem.inputs)
        found = mapped(problem.steady(problem.f), args)
        if problem.draws:
            each = zipped(torch.stack, [problem.steady(problem.f)(p, *problem.inputs) for p in points])
            if difference(found, each).error > tolerance(problem.dtype):
                raise Inapplicable("f draws other random numbers under vmap")

    for of in every(problem):
        if of.row.drawn:
            continue

        def expected(of: Any = of) -> Any:
            possible()
            found = [plain(problem.steady(of.make())(p, *of.args[1:])) for p in points]
            return zipped(torch.stack, found)

        def found(of: Any = of) -> Any:
            return mapped(lambda *args: plain(of.make()(*args)), of.args)

        yield Claim(of.called, found, expected, problem.n)


def _no_loops(problem: Problem) -> str:
    return "f draws" if problem.draws else loops.no_shares(problem)


def _formulas(problem: Problem) -> Iterator[tuple[Any, Callable]]:
    """Statistics with their plain loops, which can be differentiated."""
    for name, row in ROWS.items():
        of_shares = row.of_shares
        if of_shares is not None and "clipped" not in name:
            yield (
                one(problem, name),
                lambda p, *batch, of=of_shares: of(loops.shares(replace(problem, batch=batch or problem.batch), p)),
            )
    numbers = sum(p.numel() for p in tree.tensors(problem.params))
    if problem.loss is not None and numbers * problem.n <= DENSE:
        formula = dense_diag_ggn(problem.f, problem.loss)
        yield one(problem, "diag_ggn"), lambda p, *batch: formula(p, *(batch or problem.batch))


def _by_torch(problem: Problem) -> Callable[[], Any]:
    """What torch has to be able to do of f itself, once."""
    return cache(lambda: grad(_value(problem))(_leaves(problem)))


def _leaves(problem: Problem) -> list[torch.Tensor]:
    """The tensors of the parameters: torch.func takes no None."""
    return tree.tensors(problem.params)


def _of_leaves(problem: Problem, fn: Callable) -> Callable:
    """A function of the tensors of the parameters, from one of these."""
    form = tree.separate(problem.params)[1]
    return lambda leaves: fn(form.join(leaves))


def _value(problem: Problem) -> Callable:
    """The loss, of the tensors of the parameters."""
    return _of_leaves(problem, lambda p: problem.losses(p, *problem.batch).sum())


def _slope(problem: Problem, formula: Callable, at: float = 0.0) -> Any:
    """The gradient of the total of a formula in the parameters, by torch.autograd."""
    form = tree.separate(problem.params)[1]
    return form.join(_slopes(lambda own: formula(form.join(own)), _leaves(problem), at))


def _slopes(formula: Callable, leaves: list[torch.Tensor], at: float = 0.0) -> list[torch.Tensor]:
    """The gradient of the total of a formula of some leaves."""
    own = [x.detach().clone().requires_grad_() for x in leaves]
    value = total(formula(own), at)
    if not value.requires_grad:
        return [torch.zeros_like(x) for x in leaves]
    return list(torch.autograd.grad(value, own, materialize_grads=True))


def _moved(problem: Problem) -> Problem:
    """At other parameters: at those that training starts from a derivative may be zero, and its rounding is not."""
    return replace(problem, params=tree.map_tensors(lambda p: p + 0.1 * fixed(p.shape, p), problem.params))


def _nearby(problem: Problem, formula: Callable) -> Callable[[], Any]:
    """The slope at other parameters."""
    return lambda: _slope(_moved(problem), formula)


@law("grad of a statistic is that of its loop", when=_no_loops)
def differentiated(problem: Problem) -> Iterator[Claim]:
    """grad(lambda p: total(t(p, *batch)))(params) == the same of the loop, by torch.autograd"""
    possible, form = _by_torch(problem), tree.separate(problem.params)[1]
    for of, formula in _formulas(problem):

        def found(of: Any = of) -> Any:
            slopes = grad(_of_leaves(problem, lambda p: total(of.make()(p, *of.args[1:]))))
            return form.join(slopes(_leaves(problem)))

        def expected(formula: Callable = formula) -> Any:
            possible()
            return _slope(problem, formula)

        yield Claim(of.called, found, expected, problem.n, nearby=_nearby(problem, formula))


@law("jacrev of a statistic is that of its loop", when=_no_loops)
def jacobian(problem: Problem) -> Iterator[Claim]:
    """jacrev(lambda p: stack([total(t(p, *batch)), other(t(p, *batch))]))(params) == the rows of the loop"""
    possible, form = _by_torch(problem), tree.separate(problem.params)[1]
    for of, formula in _formulas(problem):

        def found(of: Any = of) -> Any:
            def both(p: Any) -> torch.Tensor:
                result = of.make()(p, *of.args[1:])
                return torch.stack([total(result), total(result, 0.7)])

            return form.join(jacrev(_of_leaves(problem, both))(_leaves(problem)))

        def expected(formula: Callable = formula) -> Any:
            possible()
            return zipped(torch.stack, [_slope(problem, formula), _slope(problem, formula, 0.7)])

        yield Claim(of.called, found, expected, problem.n, nearby=_nearby(problem, formula))


@law("jvp of a statistic is that of its loop", when=_no_loops)
def forward(problem: Problem) -> Iterator[Claim]:
    """total(jvp(t, (params,), (v,))[1]) == grad(total(loop))(params) . v"""
    v = tree.tensors(directions(problem.params, 0.4))

    @cache
    def possible() -> Any:
        """Torch has to be able to do this of the gradient of f."""
        return jvp(grad(_value(problem)), (_leaves(problem),), (v,))

    for of, formula in _formulas(problem):

        def found(of: Any = of) -> Any:
            along = _of_leaves(problem, lambda p: tree.tensors(of.make()(p, *of.args[1:])))
            return total(jvp(along, (_leaves(problem),), (v,))[1])

        def expected(formula: Callable = formula) -> Any:
            possible()
            pairs = zip(tree.tensors(_slope(problem, formula)), v, strict=True)
            return torch.stack([(g * d).sum() for g, d in pairs]).sum()

        yield Claim(of.called, found, expected, problem.n, nearby=_nearby(problem, formula))


@law("grad of grad of a statistic is that of its loop", when=_no_loops)
def differentiated_twice(problem: Problem) -> Iterator[Claim]:
    """grad(lambda p: c . grad(total of t)(p))(params) == (slope(params + h c) - slope(params - h c)) / 2h of the loop

    By differences, in float64: third derivatives of torch itself are wrong for some norms.
    """
    problem = problem.double()
    form = tree.separate(problem.params)[1]

    @cache
    def possible() -> None:
        """Torch has to be able to do this of f, right or not."""
        slopes = grad(_value(problem))
        twice = grad(lambda own: total(grad(lambda own: total(slopes(own)))(own)))
        twice(_leaves(problem))

    def changes(formula: Callable, at: Problem) -> Any:
        def beside(h: float) -> Any:
            params = tree.map_tensors(lambda p: p + h * fixed(p.shape, p, WEIGHTS), at.params)
            return _slope(replace(at, params=params), lambda p: formula(p, *at.batch))

        return zipped(lambda x: (x[0] - x[1]) / (2 * STEP), [beside(STEP), beside(-STEP)])

    for of, formula in _formulas(problem):

        def found(of: Any = of) -> Any:
            slopes = grad(_of_leaves(problem, lambda p: total(of.make()(p, *of.args[1:]))))
            return form.join(grad(lambda own: total(slopes(own), WEIGHTS))(_leaves(problem)))

        def expected(formula: Callable = formula) -> Any:
            possible()
            return changes(formula, problem)

        def nearby(formula: Callable = formula) -> Any:
            return changes(formula, _moved(problem))

        yield Claim(of.called, found, expected, problem.n, torch.float32, nearby)


def _no_data(problem: Problem) -> str:
    floats = any(x.is_floating_point() for x in tree.tensors(problem.inputs))
    return _no_loops(problem) or ("" if floats else "there are no floats among the inputs")


@law("grad of a statistic in the data is that of its loop", when=_no_data)
def differentiated_in_data(problem: Problem) -> Iterator[Claim]:
    """grad(lambda x: total(t(params, x, *rest)))(x) == the same of the loop, by torch.autograd"""
    tensors, form = tree.separate(problem.inputs)
    places = [i for i, x in enumerate(tensors) if x.is_floating_point()]
    own, rest = [tensors[i] for i in places], problem.batch[len(problem.inputs) :]

    def batch(own: list[torch.Tensor]) -> tuple:
        given = dict(zip(places, own, strict=True))
        return (*form.join([given.get(i, x) for i, x in enumerate(tensors)]), *rest)

    possible = cache(lambda: grad(lambda own: problem.losses(problem.params, *batch(own)).sum())(own))
    for of, formula in _formulas(problem):

        def found(of: Any = of) -> Any:
            return grad(lambda own: total(of.make()(problem.params, *batch(own))))(own)

        def expected(formula: Callable = formula) -> Any:
            possible()
            return _slopes(lambda own: formula(problem.params, *batch(own)), own)

        def nearby(formula: Callable = formula) -> Any:
            return _slopes(lambda own: formula(_moved(problem).params, *batch(own)), own)

        yield Claim(of.called, found, expected, problem.n, nearby=nearby)
