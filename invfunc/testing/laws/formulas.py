"""Statistics with plain loops that can be differentiated, for laws of what is around them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch

from invfunc import tree
from invfunc.testing.laws import loops
from invfunc.testing.laws.around import total
from invfunc.testing.laws.compare import fixed
from invfunc.testing.laws.law import Inapplicable
from invfunc.testing.laws.problem import BOTH, MODEL, Problem, seeded
from invfunc.testing.laws.rows import ROWS
from invfunc.testing.laws.statistics import Made, made, one
from invfunc.testing.oracles import dense_diag_ggn

DENSE = 4096
"""Numbers in a Jacobian up to which what is made of the whole of it is differentiated."""
Formula = Callable[..., Any]
"""`(params, *batch)`, of the batch that the statistic takes."""


def no_formulas(problem: Problem) -> str:
    """Why there are none, if there are none."""
    if problem.kind == MODEL:
        return f"its Jacobian has more than {DENSE} numbers" if _large(problem) else ""
    return loops.no_shares(problem)


def _large(problem: Problem) -> bool:
    return sum(p.numel() for p in tree.tensors(problem.params)) * problem.n > DENSE


def formulas(problem: Problem, samples: list[int] | None = None) -> Iterator[tuple[Made, Formula]]:
    """All that there are, of some samples."""

    def shares(params: Any, *batch: Any) -> Any:
        found = loops.shares(replace(problem, batch=batch), params)
        return found if samples is None else tree.map_tensors(lambda g: g[samples], found)

    if not loops.no_shares(problem):
        for name, row in ROWS.items():
            of_shares = row.of_shares
            if of_shares is not None:
                for of in made(problem, name)[:1]:
                    yield of, lambda *args, of_shares=of_shares: of_shares(shares(*args))
    if _large(problem):
        return
    if problem.kind in (MODEL, BOTH):
        for name in ("batch_jacobian", "gram", "gram per parameter"):
            loop, of = ROWS[name].loop, made(problem, name)[-1]
            if loop is not None and (name == "batch_jacobian" or _one_output(problem)):
                yield of, loop(problem.steady(problem.f), samples=samples)
    if problem.loss is not None:
        yield (
            one(problem, "diag_ggn"),
            dense_diag_ggn(problem.steady(problem.f), problem.steady(problem.loss), samples=samples),
        )


def _one_output(problem: Problem) -> bool:
    with torch.no_grad():
        return len(tree.tensors(problem.f(problem.params, *problem.inputs))) == 1


def value(problem: Problem) -> Callable:
    """One number of what f gives, as a function of `(params, *batch)`."""
    if problem.kind == MODEL:
        return lambda params, *batch: total(problem.f(params, *batch))
    return lambda params, *batch: problem.losses(params, *batch).sum()


def in_float64(problem: Problem) -> Problem:
    """The same in float64, if f takes it."""
    found = problem.double()
    try:
        with torch.no_grad(), seeded(problem.seed):
            value(found)(*found.args)
    except Exception as error:  # of the user's f, with constants of its own
        raise Inapplicable(f"it is tried in float64, where f raises {type(error).__name__}: {error}") from error
    return found


def moved(problem: Problem, by: float = 0.1, at: float = 0.0) -> Problem:
    """At other parameters: at those that training starts from a derivative may be zero, and its rounding is not."""
    return replace(problem, params=tree.map_tensors(lambda p: p + by * fixed(p.shape, p, at), problem.params))


def floats(problem: Problem) -> tuple[list[torch.Tensor], Callable]:
    """Those of the inputs, and the batch with others in their place."""
    tensors, form = tree.separate(problem.inputs)
    places = [i for i, x in enumerate(tensors) if x.is_floating_point()]
    target = problem.batch[len(problem.inputs) :]

    def batch(own: list[torch.Tensor]) -> tuple:
        given = dict(zip(places, own, strict=True))
        return (*form.join([given.get(i, x) for i, x in enumerate(tensors)]), *target)

    return [tensors[i] for i in places], batch
