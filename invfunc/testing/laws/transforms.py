"""Laws of a statistic, which are of each one of this library, or of one of one's own: it is its plain loop."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch

from invfunc import tree
from invfunc.arguments.problem import InDims
from invfunc.callables import check_callable, describe
from invfunc.testing import models
from invfunc.testing.laws import loops
from invfunc.testing.laws.compare import (
    at_points,
    difference,
    loop_at_points,
    loop_slopes,
    slopes,
    tolerance,
    total,
)
from invfunc.testing.laws.problem import BOTH, MODEL, LawProblem, options, problem
from invfunc.testing.laws.rows import Made, every, made, one
from invfunc.testing.laws.run import (
    FUNCTION,
    TRANSFORM,
    Claim,
    Inapplicable,
    Law,
    Outcome,
    Table,
    call,
    chosen,
    judged,
    law,
    tried,
)
from invfunc.testing.oracles import dense_diag_ggn

Formula = Callable[..., Any]
"""The loop of a statistic, with its arguments."""
DENSE = 4096
"""Numbers in a Jacobian up to which what is made of the whole of it is differentiated."""


def no_formulas(problem: LawProblem) -> str:
    """The reason why there are none, if there are none."""
    if problem.t is not None:
        return ""
    if problem.kind == MODEL:
        return f"its Jacobian has more than {DENSE} numbers" if _large(problem) else ""
    return loops.no_shares(problem)


def _large(problem: LawProblem) -> bool:
    return sum(p.numel() for p in tree.tensors(problem.params)) * problem.n > DENSE


def formulas(problem: LawProblem) -> Iterator[tuple[Made, Formula]]:
    """The statistics that have a loop."""
    if problem.oracle is not None:
        yield every(problem)[0], problem.oracle(*problem.functions)
        return
    if not loops.no_shares(problem):
        for of in every(problem):
            reduce = of.row.of_shares
            if reduce is not None and len(of.args) == len(problem.args):
                yield of, lambda p, *batch, reduce=reduce: reduce(loops.shares(replace(problem, batch=batch), p))
    if _large(problem):
        return
    if problem.kind in (MODEL, BOTH):
        for name in ("batch_jacobian", "gram", "gram per parameter"):
            of = made(problem, name)[-1]
            if of.row.loop is not None and (name == "batch_jacobian" or _one_output(problem)):
                yield of, of.row.loop(problem.steady(problem.f))
    if problem.loss is not None:
        yield one(problem, "diag_ggn"), dense_diag_ggn(problem.steady(problem.f), problem.steady(problem.loss))


def _one_output(problem: LawProblem) -> bool:
    with torch.no_grad():
        return len(tree.tensors(problem.f(problem.params, *problem.inputs))) == 1


@law("it equals its oracle", TRANSFORM)
def equals(problem: LawProblem) -> Iterator[Claim]:
    """t(f)(params, *batch) == oracle(f)(params, *batch)"""
    for of, formula in formulas(problem):

        def expected(of: Made = of, formula: Formula = formula) -> Any:
            try:
                return formula(*of.args)
            except Exception as error:
                of()  # what this refuses needs no oracle
                raise AssertionError(f"the oracle of {of.called} raises {type(error).__name__}: {error}") from error

        yield Claim(of.called, of, expected, problem.n)


@law("grad of a statistic is that of its loop", FUNCTION, TRANSFORM, when=no_formulas)
def differentiated(problem: LawProblem) -> Iterator[Claim]:
    """grad(lambda p: total(t(p, *batch)))(params) == the same of the loop, by torch.autograd; so of t by autograd"""

    def value(params: Any, *batch: Any) -> torch.Tensor:
        return total(problem.f(params, *batch)) if problem.kind == MODEL else problem.losses(params, *batch).sum()

    @cache
    def possible() -> None:
        """Torch has to be able to do this of f."""
        for way in (slopes, loop_slopes):
            way(slopes(value))(*problem.args)

    for of, formula in formulas(problem):

        @cache
        def expected(of: Made = of, formula: Formula = formula) -> Any:
            possible()
            return loop_slopes(formula, needed=problem.oracle is not None)(*of.args)

        for called, way in {"": slopes, " by autograd": loop_slopes}.items():
            yield Claim(of.called + called, lambda of=of, way=way: way(of.make())(*of.args), expected, problem.n)


@law("vmap over parameters is the loop", FUNCTION, TRANSFORM)
def batched(problem: LawProblem) -> Iterator[Claim]:
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


CALL = "laws.check_transform"


def check_transform(
    t: Callable,
    oracle: Callable,
    f: Callable | None = None,
    params: Any = None,
    *batch: Any,
    loss: Callable | None = None,
    in_dims: InDims = 0,
    seconds: float = 30,
    only: Iterable[str] | str | None = None,
    samples: Iterable[int] | None = None,
    seed: int = 0,
) -> Table:
    """Assert the laws of a statistic of your own, against its plain loop.

        t(f)(params, *batch) == oracle(f)(params, *batch)        # with loss=: t(f, loss) and oracle(f, loss)

    also under `grad` and `vmap`.

    Args:
        t: makes the statistic of a function, `t(f)` or `t(f, loss)`, as `functools.partial(invfunc.diag_ggn)` does.
        oracle: makes its plain loop. If its result can be differentiated at all, then it has to be right there.
        f, params, batch, loss, in_dims, seconds, only, samples, seed: as in `check`. Without f, one function
            of each family of `invfunc.testing.models` is taken: `[N]` losses, or a model and its loss if oracle takes
            two functions.

    Returns:
        A `Table`, which prints as a line for each law.

    Raises:
        AssertionError: a law does not hold. It tells the smallest case, as that of `check` does.
        ArgumentError, ArgumentTypeError: t or oracle is no function, a name is that of no law, t refuses every f.

    Example:
        >>> import torch, invfunc
        >>> from invfunc import testing
        >>> def halves(f):
        ...     return lambda *args: invfunc.batch_l2_grad(f)(*args) / 2
        >>> def loop(f):
        ...     return lambda *args: testing.loop_batch_l2_grad(f)(*args) / 2
        >>> f, w, x = lambda w, x: (x @ w).square(), torch.ones(2).double(), torch.eye(3, 2).double()
        >>> len(testing.laws.check_transform(halves, loop, f, w, x).failed)
        0
    """
    check_callable(CALL, t)
    check_callable(CALL, oracle)
    laws = chosen(CALL, TRANSFORM, only)
    if f is None:
        return _of_families(t, oracle, laws, seconds, seed)
    given = problem(CALL, f, params, batch, loss, in_dims, samples, seed)
    given = replace(given, t=t, oracle=oracle, called=describe(f))
    outcomes = tried(laws, given, seconds)
    again = call(CALL, f"t, oracle, {describe(f)}, params, *batch", options(given, in_dims), seed)
    return judged(Table(f"{describe(t)} of {given!r}", tuple(outcomes)), given, again, seconds)


def _of_families(t: Callable, oracle: Callable, laws: list[Law], seconds: float, seed: int) -> Table:
    """The laws on one function of each family."""
    deadline, outcomes, two = time.perf_counter() + seconds, [Outcome(law) for law in laws], _takes_two(oracle)
    form = "p.model.f, p.model.params, *p.batch, loss=p.loss" if two else "p.f, p.model.params, *p.batch"
    for name in models.FAMILIES:
        p = models.Problem(models.Model(name), models.Loss("mse_loss", "mean" if two else "none"))
        f, loss = (p.model.f, p.loss) if two else (p.f, None)
        given = problem(CALL, f, p.model.params, p.batch, loss, 0, None, seed)
        given = replace(given, t=t, oracle=oracle, called=name)
        found = tried(laws, given, max(0, deadline - time.perf_counter()))
        for whole, outcome in zip(outcomes, found, strict=True):
            whole.add(outcome)
        judged(Table(f"p = {p!r}", tuple(found)), given, call(CALL, f"t, oracle, {form}", {}, seed), seconds)
    return Table(f"{describe(t)} of one function of each of {len(models.FAMILIES)} families", tuple(outcomes))


def _takes_two(oracle: Callable) -> bool:
    """True if it is made of a model and its loss."""
    found = inspect.signature(oracle).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in found) > 1
