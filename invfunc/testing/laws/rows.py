"""The public statistics, a row for each: laws that hold for all of them go over these rows.

A new statistic has all laws as soon as it has its row.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

import invfunc
from invfunc import tree
from invfunc.plan import AxisName
from invfunc.testing.laws.problem import MODEL as A_MODEL
from invfunc.testing.laws.problem import LawProblem
from invfunc.testing.oracles import (
    clipped,
    dense_diag_ggn,
    loop_batch_jacobian,
    loop_gram,
    noise_of,
    norms,
    of_shares,
    projected,
    squares,
    summed,
    variances,
)

LOSS, MODEL, BOTH = "of a loss", "of a model", "of a model and its loss"
"""The functions that a statistic is made of: `(f)` of a loss function, `(f)` of a model function, `(f, loss)`."""
LEAVES, TREES, WHOLE, FACTORS = "leaves", "trees", "whole", "factors"
"""The results: a tensor for each parameter, a tuple of results, one tensor for all parameters, K-factors."""


@dataclass(frozen=True)
class Row:
    """A statistic, made as `make(*functions, **options)`, and what the laws have to know of it."""

    make: Callable
    forms: tuple[str, ...]
    gives: str = LEAVES
    loop: Callable | None = None
    """Its oracle `loop(*functions, samples=...)`, of the first form and of the last."""
    of_shares: Callable | None = None
    """The statistic, if it is first-order, as a function of a tree of per-sample gradients `[N, *p]`."""
    of_each: Callable | None = None
    """The statistic, if it is of a GGN, as a function of the diagonals of each sample, a tree of `[N, *p]`."""
    drawn: bool = False
    """True if its columns are drawn, for which the loss has to have a sampler."""
    fewest: int = 1
    """The fewest samples that it may be of."""

    @property
    def form(self) -> str:
        """The form that says most: of a model and its loss, where it takes them."""
        return self.forms[-1]

    @property
    def axes(self) -> tuple[AxisName, ...]:
        """The axes that `chunked` divides, the default first."""
        return self.make(F.mse_loss).axes


def first_order(make: Callable, of: Callable, gives: str = LEAVES, **more: Any) -> Row:
    """The row of a statistic that is made of per-sample gradients."""
    more = {"forms": (LOSS,), "loop": partial(of_shares, of)} | more
    return Row(make, gives=gives, of_shares=of, **more)


def clipping(max_norm: float, **options: Any) -> Row:
    """The row of `clipped_grad` for a norm, with groups and a weight."""
    make, of = (partial(fn, max_norm=max_norm, **options) for fn in (invfunc.clipped_grad, clipped))
    return first_order(make, of, TREES)


def noise(groups: Callable | None = None) -> Row:
    """The row of `noise_scale` for groups of parameters."""
    make = partial(invfunc.noise_scale, groups=groups)
    return first_order(make, lambda shares: (summed(shares), noise_of(shares, groups)), TREES, fewest=2)


def sketching(rows: int, columns: int, projection: str = "signs") -> Row:
    """The row of `sketched_grad` for matrices of a size, which are those of a seed."""

    def make(*functions: Any, **options: Any) -> Any:
        generator = torch.Generator().manual_seed(0)
        sizes = {"rows": rows, "columns": columns, "projection": projection}
        return invfunc.sketched_grad(*functions, **sizes, generator=generator, **options)

    def sides(i: int, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        found = make(torch.sum).reduction.sides(i, p)
        return found.first, found.rest

    return first_order(make, partial(projected, sides=sides))


def grams(shares: Any) -> Any:
    """The inner products of the per-sample gradients in each parameter."""
    rows = tree.map_tensors(lambda g: g.reshape(len(g), -1), shares)
    return tree.map_tensors(lambda g: g @ g.T, rows)


def added(parts: Iterable[torch.Tensor]) -> torch.Tensor:
    """The sum of tensors."""
    return torch.stack(list(parts)).sum(0)


GGN = partial(Row, forms=(LOSS, BOTH))
GRAM = partial(first_order, forms=(LOSS, MODEL))
ROWS = {
    "batch_grad": first_order(invfunc.batch_grad, lambda shares: shares),
    "batch_l2_grad": first_order(invfunc.batch_l2_grad, norms),
    "sum_grad_squared": first_order(invfunc.sum_grad_squared, squares),
    "variance": first_order(invfunc.variance, variances),
    "grad_and_variance": first_order(invfunc.grad_and_variance, lambda g: (summed(g), variances(g)), TREES),
    "clipped_grad": clipping(1.0),
    "noise_scale": noise(),
    "sketched_grad": sketching(3, 2),
    "gram": GRAM(invfunc.gram, lambda shares: added(tree.tensors(grams(shares))), WHOLE, loop=loop_gram),
    "gram per parameter": GRAM(
        partial(invfunc.gram, per_parameter=True), grams, loop=partial(loop_gram, per_parameter=True)
    ),
    "batch_jacobian": Row(invfunc.batch_jacobian, (MODEL,), loop=loop_batch_jacobian),
    "predictive_covariance": Row(partial(invfunc.predictive_covariance, covariance=0.5), (MODEL,), WHOLE),
    "diag_ggn": GGN(invfunc.diag_ggn, loop=dense_diag_ggn, of_each=summed),
    "diag_ggn of each": GGN(partial(invfunc.diag_ggn, per_sample=True), of_each=lambda diagonals: diagonals),
    "sqrt_ggn": GGN(invfunc.sqrt_ggn),
    "ggn_trace": GGN(
        invfunc.ggn_trace,
        gives=WHOLE,
        of_each=lambda diagonals: added(d.sum() for d in tree.tensors(diagonals)),
    ),
    "diag_hessian": GGN(invfunc.diag_hessian),
    "kfac empirical": GGN(partial(invfunc.kfac, fisher="empirical"), gives=FACTORS),
    "kfoc of one sweep": GGN(partial(invfunc.kronecker.kfoc, fisher="exact", sweeps=1), gives=FACTORS),
    "kfra": GGN(invfunc.kronecker.kfra, gives=FACTORS),
    "ekfac exact": GGN(partial(invfunc.ekfac, fisher="exact"), gives=FACTORS),
}
"""By the public name, and what makes it another one of that name."""


# Statistics of a problem

OF_THE_MODEL = " of the model"
"""Behind the name of a statistic that is of a loss function too."""


@dataclass(frozen=True)
class Made:
    """A statistic of a problem: `make(**options)` makes it anew, and it is called with `args`."""

    called: str
    row: Row
    make: Callable
    args: tuple
    problem: LawProblem

    def __call__(self, **options: Any) -> Any:
        return self.make(**options)(*self.args)

    def itself(self) -> Any:
        """Its result, computed once; of an f that draws always with the same numbers."""
        known = self.problem.results
        if self.called not in known:
            known[self.called] = self.problem.steady(self)()
        return known[self.called]


def made(problem: LawProblem, name: str) -> list[Made]:
    """A statistic by the name of its row, in the forms that fit the problem, which has to have samples enough."""
    row, found = ROWS[name], []
    if problem.n < row.fewest:
        return []
    f, dims, inputs = problem.f, problem.in_dims, (problem.params, *problem.inputs)
    if problem.loss is not None:
        if BOTH in row.forms:
            found.append(Made(name, row, _maker(row, dims, f, problem.loss), problem.args, problem))
        elif LOSS in row.forms:
            found.append(Made(name, row, _maker(row, dims, problem.loss_function), problem.args, problem))
        if MODEL in row.forms:
            called = name if row.forms == (MODEL,) else name + OF_THE_MODEL
            found.append(Made(called, row, _maker(row, dims[:-1], f), inputs, problem))
    elif (MODEL if problem.kind == A_MODEL else LOSS) in row.forms:
        found.append(Made(name, row, _maker(row, dims, f), problem.args, problem))
    return found


def _maker(row: Row, in_dims: tuple, *functions: Any) -> Callable:
    return lambda **options: row.make(*functions, in_dims=in_dims, **options)


def every(problem: LawProblem) -> list[Made]:
    """The statistic that the problem is about, or all of them."""
    if problem.t is None:
        return [of for name in ROWS for of in made(problem, name)]
    row = Row(problem.t, (), loop=problem.oracle)
    return [Made(problem.called, row, lambda: row.make(*problem.functions), problem.args, problem)]


def one(problem: LawProblem, name: str) -> Made:
    """The statistic of a loss."""
    return made(problem, name)[0]


def no_loss(problem: LawProblem) -> str:
    """The reason why there are no statistics of a loss, if there are none."""
    return "f is no loss function; give loss=" if problem.kind == A_MODEL else ""
