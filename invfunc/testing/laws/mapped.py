"""Laws of statistics under `vmap`: over parameters, over data sets, and with derivatives."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch

from invfunc import tree
from invfunc.testing.laws.around import POINTS, at_points, loop_at_points, loop_slopes, mapped_over, scaled, slopes
from invfunc.testing.laws.compare import difference, plain, tolerance, zipped
from invfunc.testing.laws.formulas import formulas, moved, no_formulas, value
from invfunc.testing.laws.law import Claim, Inapplicable, law
from invfunc.testing.laws.problem import Problem
from invfunc.testing.laws.statistics import Made, every


@law("vmap over parameters is the loop")
def batched(problem: Problem) -> Iterator[Claim]:
    """vmap(t, (0, None, ...))(stack(points), *batch) == stack([t(p, *batch) for p in points])"""

    @cache
    def possible() -> None:
        """Torch has to be able to do this of f, with the random numbers of the loop."""
        f, args = problem.steady(problem.f), (problem.params, *problem.inputs)
        found = at_points(f)(*args)
        if problem.draws and difference(found, loop_at_points(f)(*args)).error > tolerance(problem.dtype):
            raise Inapplicable("f draws other random numbers under vmap")

    for of in every(problem):
        if of.row.drawn:
            continue

        def expected(of: Made = of) -> Any:
            possible()
            return loop_at_points(problem.steady(of.make()))(*of.args)

        yield Claim(of.called, lambda of=of: at_points(of.make())(*of.args), expected, problem.n)


def _draws(problem: Problem) -> str:
    if problem.draws:
        return "f draws"
    return "" if any(dim is not None for dim in problem.in_dims) else "all samples share the batch"


class _Sets:
    """The batch, and another one of the same samples, some of them twice."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.both = problem, [problem, problem.part([max(0, i - 1) for i in range(problem.n)])]
        self.places = [i for i, dim in enumerate(problem.in_dims) if dim is not None]
        self.leaves, forms = zip(
            *(tree.separate([one.batch[i] for i in self.places]) for one in self.both), strict=True
        )
        self.form = forms[0]

    def stacked(self, dim: int) -> list[torch.Tensor]:
        return [torch.stack(leaves, dim) for leaves in zip(*self.leaves, strict=True)]

    def batch(self, own: list[torch.Tensor]) -> list[Any]:
        """That of the problem with these in place of what has samples."""
        given = dict(zip(self.places, self.form.join(own), strict=True))
        return [given.get(i, x) for i, x in enumerate(self.problem.batch)]


Call = Callable[..., Any]


def _over_sets(t: Call, params: Any, sets: _Sets, dim: int = 0) -> Any:
    return mapped_over(lambda own: t(params, *sets.batch(own)), sets.stacked(dim), dim)


def _loop_over_sets(t: Call, params: Any, sets: _Sets) -> Any:
    return zipped(torch.stack, [plain(t(params, *one.batch)) for one in sets.both])


def _with_points(t: Call, params: Any, sets: _Sets) -> Any:
    """Parameters and data sets at once."""
    leaves, form = tree.separate(params)
    points = [torch.stack([POINTS[0] * p, POINTS[1] * p]) for p in leaves]
    count = len(leaves)
    return mapped_over(lambda own: t(form.join(own[:count]), *sets.batch(own[count:])), [*points, *sets.stacked(0)])


def _loop_with_points(t: Call, params: Any, sets: _Sets) -> Any:
    pairs = zip(POINTS, sets.both, strict=True)
    return zipped(torch.stack, [plain(t(scaled(params, c), *one.batch)) for c, one in pairs])


WAYS: list[tuple[str, Callable, Callable]] = [
    (" over data sets", _over_sets, _loop_over_sets),
    (" over data sets along the last axis", partial(_over_sets, dim=-1), _loop_over_sets),
    (" over data sets with parameters", _with_points, _loop_with_points),
    (
        " over data sets in vmap over parameters",
        lambda t, params, sets: at_points(lambda p: _over_sets(t, p, sets))(params),
        lambda t, params, sets: loop_at_points(lambda p: _loop_over_sets(t, p, sets))(params),
    ),
]
"""By turns of the statistics."""


@law("vmap over data sets is the loop", when=_draws)
def batched_in_data(problem: Problem) -> Iterator[Claim]:
    """vmap(t, (None, 0, ...))(params, *stack(sets)) == stack([t(params, *one) for one in sets]); of some statistics
    along the last axis, of others with parameters, or in vmap over these"""
    sets = _Sets(problem)

    @cache
    def possible(way: Callable) -> None:
        """Torch has to be able to do this of second derivatives of f."""
        way(slopes(slopes(value(problem))), problem.params, sets)

    for turn, of in enumerate(every(problem)):
        if of.row.drawn:
            continue
        called, way, loop = WAYS[(turn + problem.n) % len(WAYS)]
        count = len(of.args) - 1

        def statistic(params: Any, *batch: Any, of: Made = of, count: int = count) -> Any:
            return of.make()(params, *batch[:count])

        def expected(way: Callable = way, loop: Callable = loop, t: Call = statistic) -> Any:
            possible(way)
            return loop(t, problem.params, sets)

        yield Claim(f"{of.called}{called}", partial(way, statistic, problem.params, sets), expected, problem.n)


def _no_formulas(problem: Problem) -> str:
    return no_formulas(problem) or ("f draws" if problem.draws else "")


@law("vmap of grad of a statistic is that of its loop", when=_no_formulas)
def batched_slopes(problem: Problem) -> Iterator[Claim]:
    """vmap(grad(total of t))(points) == that of the loop at each; grad(total of vmap(t))(params) == the sum of these"""
    orders = [
        (", vmap of grad", lambda t: at_points(slopes(t)), lambda t: loop_at_points(loop_slopes(t))),
        (", grad of vmap", lambda t: slopes(at_points(t)), lambda t: loop_slopes(loop_at_points(t))),
        (", autograd of vmap", lambda t: loop_slopes(at_points(t)), lambda t: loop_slopes(loop_at_points(t))),
    ]

    @cache
    def possible() -> None:
        """Torch has to be able to do this of the gradient of f."""
        at_points(slopes(slopes(value(problem))))(problem.params, *problem.batch)

    for turn, (of, formula) in enumerate(formulas(problem)):
        for called, way, loop in (orders[0], orders[1 + turn % 2]):

            def expected(loop: Callable = loop, formula: Call = formula, of: Made = of) -> Any:
                possible()
                return loop(formula)(*of.args)

            def nearby(loop: Callable = loop, formula: Call = formula, of: Made = of) -> Any:
                return loop(formula)(moved(problem).params, *of.args[1:])

            def found(way: Callable = way, of: Made = of) -> Any:
                return way(of.make())(*of.args)

            yield Claim(f"{of.called}{called}", found, expected, problem.n, nearby=nearby)
