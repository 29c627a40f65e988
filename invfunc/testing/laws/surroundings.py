"""Laws of what is around a call: what f closes over, and the modes of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch

from invfunc import tree
from invfunc.testing.laws.around import (
    at_points,
    loop_at_points,
    loop_slope_along,
    loop_slopes,
    scaled,
    slope_along,
    slopes,
)
from invfunc.testing.laws.compare import plain
from invfunc.testing.laws.formulas import Formula, formulas, no_formulas, value
from invfunc.testing.laws.law import Claim, law
from invfunc.testing.laws.problem import Problem
from invfunc.testing.laws.statistics import Made, every

Way = Callable[[Callable], Callable]


def _closing(problem: Problem, c: torch.Tensor) -> Problem:
    """The same of an f with a scale of the parameters and a shift of the data that it closes over."""
    by, shift = c.to(problem.dtype).unbind()

    def f(params: Any, *inputs: Any) -> Any:
        tensors, form = tree.separate(inputs)
        inputs = form.join([x + shift.to(x.dtype) if x.is_floating_point() else x for x in tensors])
        return problem.f(scaled(params, by), *inputs)

    return replace(problem, f=f)


@law("what f closes over is differentiated", when=no_formulas)
def closed_over(problem: Problem) -> Iterator[Claim]:
    """grad(lambda c: total(t(lambda p, x: f(c[0] * p, x + c[1]))(params, *batch)))(c) == the same of the loop; of some
    statistics by autograd, of others jvp and vmap"""
    c = torch.tensor([1.0, 0.0], dtype=problem.dtype, device=tree.tensors(problem.params)[0].device)

    def gradient(c: torch.Tensor) -> Any:
        return slopes(value(_closing(problem, c)))(problem.params, *problem.batch)

    @cache
    def possible(way: Way) -> None:
        way(gradient)(c)

    ways = [
        ("", slopes, loop_slopes),
        (" by autograd", loop_slopes, loop_slopes),
        (", jvp", slope_along, loop_slope_along),
        (", vmap", at_points, loop_at_points),
    ]
    ways = ways[:3] if problem.draws else ways  # torch does not say which numbers a point gets
    for turn, (of, _) in enumerate(formulas(problem)):
        called, way, loop = ways[(turn + problem.n) % len(ways)]

        def statistic(c: torch.Tensor, of: Made = of) -> Any:
            return of.again(_closing(problem, c))()

        def formula(c: torch.Tensor, of: Made = of) -> Any:
            own = tree.map_tensors(lambda p: p + 0 * c.sum(), problem.params)  # loops look at what is given to them
            own_formula = next(f for one, f in formulas(_closing(problem, c)) if one.called == of.called)
            return own_formula(own, *of.args[1:])

        def expected(way: Way = way, loop: Way = loop, formula: Formula = formula) -> Any:
            possible(way)
            return loop(formula)(c)

        yield Claim(f"{of.called}{called}", partial(way(statistic), c), expected, problem.n)


def _recorded(result: Any) -> bool:
    return any(x.requires_grad for x in tree.tensors(plain(result)))


def _wanting(args: tuple) -> tuple:
    """With parameters that require grad."""
    return tree.map_tensors(lambda p: p.detach().clone().requires_grad_(), args[0]), *args[1:]


def _of_inference_tensors(call: Callable, args: tuple) -> Any:
    with torch.inference_mode():
        return call(*tree.map_tensors(torch.clone, args))


MODES: list[tuple[str, Callable[[Callable, tuple], Any]]] = [
    ("", lambda call, args: call(*tree.map_tensors(torch.detach, args))),
    (", in inference_mode", lambda call, args: torch.inference_mode()(call)(*args)),
    (", of inference tensors", _of_inference_tensors),
    (", in no_grad", lambda call, args: torch.no_grad()(call)(*_wanting(args))),
]
"""By turns of the statistics."""


@law("modes do not matter")
def modes(problem: Problem) -> Iterator[Claim]:
    """t(params, *batch) is the same in no_grad and inference_mode, and requires grad where something of f does only"""

    @cache
    def possible(way: Callable) -> bool:
        """Torch has to be able to do this of f; whether what f gives requires grad."""
        return _recorded(way(problem.f, (problem.params, *problem.inputs)))

    for turn, of in enumerate(every(problem)):
        called, way = MODES[(turn + problem.n) % len(MODES)]

        def expected(of: Made = of, way: Callable = way) -> tuple[Any, bool]:
            possible(way)
            return plain(of.itself()), False

        def found(of: Made = of, way: Callable = way) -> tuple[Any, bool]:
            result = plain(way(of.make(), of.args))
            return result, _recorded(result) and not possible(way)

        yield Claim(f"{of.called}{called}", found, expected, problem.n)
