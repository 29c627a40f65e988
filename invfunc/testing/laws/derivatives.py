"""Laws of derivatives of statistics: those of their plain loops, by every means that torch has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any

import torch
from torch.func import jvp

import invfunc
from invfunc import tree
from invfunc.plan import AxisName
from invfunc.testing.laws import loops
from invfunc.testing.laws.around import (
    ALONG,
    loop_rows,
    loop_slope_along,
    loop_slopes,
    rows,
    slope_along,
    slopes,
    total,
)
from invfunc.testing.laws.compare import directions, fixed, zipped
from invfunc.testing.laws.formulas import Formula, floats, formulas, in_float64, moved, no_formulas, value
from invfunc.testing.laws.law import Claim, law
from invfunc.testing.laws.problem import Problem
from invfunc.testing.laws.statistics import Made, no_loss, one

STEP, FAR = 1e-4, 1e-3
"""How far parameters are moved for a difference, and for one of differences."""
WEIGHTS = 0.3
"""Where the numbers begin that slopes are weighed with."""
Way = Callable[[Callable], Callable]


def _of_parameters(problem: Problem, ways: dict[str, Way], loop: Way) -> Iterator[Claim]:
    """All statistics, each in some ways that one loop is expected of."""
    possible = cache(lambda: [way(slopes(value(problem)))(problem.params, *problem.batch) for way in ways.values()])
    for of, formula in formulas(problem):
        rest = of.args[1:]

        @cache
        def expected(formula: Formula = formula, rest: tuple = rest) -> Any:
            possible()
            return loop(formula)(problem.params, *rest)

        def nearby(formula: Formula = formula, rest: tuple = rest) -> Any:
            return loop(formula)(moved(problem).params, *rest)

        for called, way in ways.items():

            def found(of: Made = of, way: Way = way) -> Any:
                return way(of.make())(*of.args)

            yield Claim(f"{of.called}{called}", found, expected, problem.n, nearby=nearby)


@law("grad of a statistic is that of its loop", when=no_formulas)
def differentiated(problem: Problem) -> Iterator[Claim]:
    """grad(lambda p: total(t(p, *batch)))(params) == the same of the loop, by torch.autograd; so of t by autograd"""
    yield from _of_parameters(problem, {"": slopes, " by autograd": loop_slopes}, loop_slopes)


@law("jacrev of a statistic is that of its loop", when=no_formulas)
def jacobian(problem: Problem) -> Iterator[Claim]:
    """jacrev(lambda p: stack([total(t(p, *batch)), other(t(p, *batch))]))(params) == the rows of the loop"""
    yield from _of_parameters(problem, {"": rows}, loop_rows)


@law("jvp of a statistic is that of its loop", when=no_formulas)
def forward(problem: Problem) -> Iterator[Claim]:
    """total(jvp(t, (params,), (v,))[1]) == grad(total(loop))(params) . v"""
    yield from _of_parameters(problem, {"": slope_along}, loop_slope_along)


@law("grad of chunks of some samples is that of its loop", when=no_formulas)
def of_chunks(problem: Problem) -> Iterator[Claim]:
    """grad(lambda p: total(chunked(t(samples=s), 2, over=axis)(p, *batch)))(params) == the same of the loop"""
    n = problem.n
    chosen, ways = [2 % n, 0, 0], (slopes, loop_slopes)
    possible = cache(lambda: slopes(slopes(value(problem)))(problem.params, *problem.batch))
    for turn, (of, formula) in enumerate(formulas(problem, chosen)):
        over, way = of.row.axes[(turn + n) % len(of.row.axes)], ways[turn % 2]

        def found(of: Made = of, over: AxisName = over, way: Way = way) -> Any:
            return way(invfunc.chunked(of.make(samples=chosen), 2, over=over))(*of.args)

        def expected(of: Made = of, formula: Formula = formula) -> Any:
            possible()
            return loop_slopes(formula)(*of.args)

        def nearby(of: Made = of, formula: Formula = formula) -> Any:
            return loop_slopes(formula)(moved(problem).params, *of.args[1:])

        yield Claim(f"{of.called} over {over}", found, expected, n, nearby=nearby)


def _no_hessian(problem: Problem) -> str:
    return no_loss(problem) or ("f draws" if problem.draws else "")


@law("derivatives of the Hessian are those of its loop", when=_no_hessian)
def of_hessian(problem: Problem) -> Iterator[Claim]:
    """c . grad(total of diag_hessian(f))(params) == (total(params + h c) - total(params - h c)) / 2h of the loop, and
    the second derivative along c; by differences in float64, as third derivatives of torch itself are wrong for some
    norms"""
    problem = in_float64(problem)
    of = one(problem, "diag_hessian")
    leaves, form = tree.separate(problem.params)
    c = [fixed(p.shape, p, WEIGHTS) for p in leaves]

    def diagonal(own: list[torch.Tensor]) -> list[torch.Tensor]:
        return tree.tensors(loops.at_entries(problem, of.make()(form.join(own), *of.args[1:])))

    def along(found: Any) -> torch.Tensor:
        return total(found, WEIGHTS)

    def changes(t: Callable) -> Any:
        return jvp(t, (leaves,), (c,))[1]

    def loop(at: Problem, h: float) -> torch.Tensor:
        return total(loops.hessian_entries(moved(at, h, WEIGHTS)))

    def first(at: Problem) -> torch.Tensor:
        return (loop(at, STEP) - loop(at, -STEP)) / (2 * STEP)

    def second(at: Problem) -> torch.Tensor:
        return (loop(at, FAR) - 2 * loop(at, 0.0) + loop(at, -FAR)) / FAR**2

    ways: list[tuple[str, Callable, Callable]] = [
        ("", lambda t: along(slopes(t)(leaves)), first),
        (" by autograd", lambda t: along(loop_slopes(t)(leaves)), first),
        (" by jvp", lambda t: total(changes(t)), first),
        (", twice", lambda t: along(slopes(slopes(t), WEIGHTS)(leaves)), second),
        (", jvp of grad", lambda t: along(changes(slopes(t))), second),
    ]
    gradient = slopes(lambda own: value(problem)(form.join(own), *problem.batch))
    known = cache(lambda by_differences: by_differences(problem))
    for called, way, by_differences in ways:

        def expected(way: Callable = way, by_differences: Callable = by_differences) -> Any:
            way(gradient)  # torch has to be able to do this
            return known(by_differences)

        nearby = partial(by_differences, moved(problem))
        yield Claim(f"diag_hessian{called}", partial(way, diagonal), expected, problem.n, torch.float32, nearby)


def _no_data(problem: Problem) -> str:
    return no_formulas(problem) or ("" if floats(problem)[0] else "there are no floats among the inputs")


@law("grad of a statistic in the data is that of its loop", when=_no_data)
def differentiated_in_data(problem: Problem) -> Iterator[Claim]:
    """grad(lambda x: total(t(params, x, *rest)))(x) == the same of the loop, by torch.autograd; so by
    autograd, and jvp"""
    own, batch = floats(problem)

    def of_data(t: Callable, params: Any, count: int) -> Callable:
        return lambda own: t(params, *batch(own)[:count])

    @cache
    def possible(way: Way) -> None:
        way(slopes(of_data(value(problem), problem.params, len(problem.batch))))(own)

    for of, formula in formulas(problem):
        count = len(of.args) - 1

        @cache
        def loop(formula: Formula = formula, count: int = count) -> Any:
            return loop_slopes(of_data(formula, problem.params, count))(own)

        def expected(way: Way, loop: Callable = loop) -> Any:
            possible(way)
            return loop()

        def nearby(formula: Formula = formula, count: int = count) -> Any:
            return loop_slopes(of_data(formula, moved(problem).params, count))(own)

        def found(way: Way, of: Made = of, count: int = count) -> Any:
            return way(of_data(of.make(), problem.params, count))(own)

        for called, way in {"": slopes, " by autograd": loop_slopes}.items():
            yield Claim(f"{of.called}{called}", partial(found, way), partial(expected, way), problem.n, nearby=nearby)

        def along(slope: Callable) -> torch.Tensor:
            pairs = zip(slope(), directions(own, ALONG), strict=True)
            return torch.stack([(g * v).sum() for g, v in pairs]).sum()

        yield Claim(
            f"{of.called}, jvp",
            partial(found, slope_along),
            partial(along, partial(expected, slope_along)),
            problem.n,
            nearby=partial(along, nearby),
        )


@law("grad of grad of a statistic is that of its loop", when=no_formulas)
def differentiated_twice(problem: Problem) -> Iterator[Claim]:
    """grad(c . grad(total of t))(params, data) == (slope(params + h c) - slope(params - h c)) / 2h of the loop; so
    jvp of grad along c, and autograd twice

    By differences, in float64: third derivatives of torch itself are wrong for some norms.
    """
    problem = in_float64(problem)
    data, batch = floats(problem)
    weights = [fixed(p.shape, p, WEIGHTS) for p in tree.tensors(problem.params)]
    along = [*weights, *map(torch.zeros_like, data)]
    leaves, form = tree.separate(problem.params)

    def whole(t: Callable, count: int) -> Callable:
        """Of the tensors of parameters and data together."""
        return lambda own: t(form.join(own[: len(leaves)]), *batch(own[len(leaves) :])[:count])

    def by_func(t: Callable) -> Any:
        return slopes(lambda own: own_part(slopes(t)(own)), WEIGHTS)([*leaves, *data])

    def by_jvp(t: Callable) -> Any:
        return jvp(slopes(t), ([*leaves, *data],), (along,))[1]

    def by_autograd(t: Callable) -> Any:
        return loop_slopes(lambda own: own_part(loop_slopes(t)(own)), WEIGHTS)([*leaves, *data])

    def own_part(found: list[torch.Tensor]) -> list[torch.Tensor]:
        return found[: len(leaves)]

    def changes(formula: Formula, count: int, at: Problem) -> Any:
        def beside(h: float) -> Any:
            return loop_slopes(whole(formula, count))([*tree.tensors(moved(at, h, WEIGHTS).params), *data])

        return zipped(lambda x: (x[0] - x[1]) / (2 * STEP), [beside(STEP), beside(-STEP)])

    @cache
    def possible(way: Way) -> None:
        """Torch has to be able to do this of f, right or not."""
        way(slopes(whole(value(problem), len(problem.batch))))

    ways = {"": by_func, ", jvp of grad": by_jvp, " by autograd": by_autograd}
    for of, formula in formulas(problem):
        count = len(of.args) - 1

        @cache
        def loop(formula: Formula = formula, count: int = count) -> Any:
            return changes(formula, count, problem)

        def expected(way: Way, loop: Callable = loop) -> Any:
            possible(way)
            return loop()

        def nearby(formula: Formula = formula, count: int = count) -> Any:
            return changes(formula, count, moved(problem))

        for called, way in ways.items():

            def found(of: Made = of, way: Way = way, count: int = count) -> Any:
                return way(whole(of.make(), count))

            yield Claim(f"{of.called}{called}", found, partial(expected, way), problem.n, torch.float32, nearby)
