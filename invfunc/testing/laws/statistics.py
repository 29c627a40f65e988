"""Laws of the statistics: what they are, and in how many ways they come to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

import invfunc
from invfunc import tree
from invfunc.plan import AxisName
from invfunc.testing.laws import loops
from invfunc.testing.laws.law import Claim, law
from invfunc.testing.laws.paths import generic as generic_path
from invfunc.testing.laws.paths import in_blocks
from invfunc.testing.laws.problem import BOTH, MODEL, Problem
from invfunc.testing.laws.rows import BOTH as MODEL_AND_LOSS
from invfunc.testing.laws.rows import FACTORS, LOSS, ROWS, Row
from invfunc.testing.laws.rows import MODEL as OF_MODEL

OF_THE_MODEL = " of the model"
"""Behind the name of a statistic that is of a loss function too."""


@dataclass(frozen=True)
class Made:
    """A statistic of a problem: `make(**options)` makes it anew, and it is called with `args`."""

    called: str
    row: Row
    make: Callable
    args: tuple
    problem: Problem

    def __call__(self, **options: Any) -> Any:
        return self.make(**options)(*self.args)

    def itself(self) -> Any:
        """Its result, computed once; of an f that draws always with the same numbers."""
        known = self.problem.results
        if self.called not in known:
            known[self.called] = self.problem.steady(self)()
        return known[self.called]

    def again(self, problem: Problem) -> Made:
        """The same of another problem of the kind."""
        known = made(problem, self.called.removesuffix(OF_THE_MODEL))
        return next(one for one in known if one.called == self.called)


def made(problem: Problem, name: str, f: Callable | None = None) -> list[Made]:
    """A statistic by the name of its row, in the forms that fit the problem, which has to have samples enough; `f` in
    place of its function."""
    row, found = ROWS[name], []
    if problem.n < row.fewest:
        return []
    f = problem.f if f is None else f
    dims, inputs = problem.in_dims, (problem.params, *problem.inputs)
    if problem.kind == BOTH:
        if MODEL_AND_LOSS in row.forms:
            found.append(Made(name, row, _maker(row, dims, f, problem.loss), problem.args, problem))
        elif LOSS in row.forms:
            found.append(Made(name, row, _maker(row, dims, problem.loss_function), problem.args, problem))
        if OF_MODEL in row.forms:
            called = name if row.forms == (OF_MODEL,) else name + OF_THE_MODEL
            found.append(Made(called, row, _maker(row, dims[:-1], f), inputs, problem))
    elif (OF_MODEL if problem.kind == MODEL else LOSS) in row.forms:
        found.append(Made(name, row, _maker(row, dims, f), problem.args, problem))
    return found


def _maker(row: Row, in_dims: tuple, *functions: Any) -> Callable:
    return lambda **options: row.make(*functions, in_dims=in_dims, **options)


def every(problem: Problem) -> list[Made]:
    """All statistics of a problem."""
    return [one for name in ROWS for one in made(problem, name)]


def one(problem: Problem, name: str) -> Made:
    """The statistic of a loss."""
    return made(problem, name)[0]


def no_loss(problem: Problem) -> str:
    """Why there are no statistics of a loss, if there are none."""
    return "f is no loss function; give loss=" if problem.kind == MODEL else ""


@law("per-sample gradients sum to the gradient", when=no_loss)
def shares_sum(problem: Problem) -> Iterator[Claim]:
    """sum_n batch_grad(f)(params, *batch)[n] == grad(lambda p: f(p, *batch).sum())(params)"""

    def found(t: Made, of: Callable) -> Callable:
        return lambda: of(t())

    def summed(shares: Any) -> Any:
        return tree.map_tensors(lambda g: g.sum(0), shares)

    expected = cache(lambda: loops.gradient(problem))
    yield Claim("batch_grad", found(one(problem, "batch_grad"), summed), expected, problem.n)
    yield Claim("grad_and_variance", found(one(problem, "grad_and_variance"), lambda r: r[0]), expected, problem.n)


@law("per-sample gradients equal their loop", when=loops.no_shares)
def first_order(problem: Problem) -> Iterator[Claim]:
    """batch_grad(f)(params, *batch)[n] == grad(lambda p: f(p, *batch)[n])(params), and what is made of these"""
    shares = cache(lambda: loops.shares(problem))
    for name, row in ROWS.items():
        of_shares = row.of_shares
        if of_shares is not None:
            for of in made(problem, name)[:1]:
                yield Claim(name, of, lambda of_shares=of_shares: of_shares(shares()), problem.n)


@law("the GGN equals its loop", when=loops.no_outputs)
def ggn(problem: Problem) -> Iterator[Claim]:
    """diag_ggn(f, loss)(params, *batch)[i] == sum_n (J[n] e_i)^T H[n] (J[n] e_i)"""
    diagonals = cache(lambda: loops.ggn_entries(problem))
    for name, row in ROWS.items():
        of_each = row.of_each
        if of_each is not None and "trace" not in name:
            of = one(problem, name)

            def found(of: Made = of) -> Any:
                return loops.at_entries(problem, of())

            yield Claim(name, found, lambda of=of_each: of(diagonals()), problem.n)


@law("the Hessian equals its loop", when=no_loss)
def hessian(problem: Problem) -> Iterator[Claim]:
    """diag_hessian(f)(params, *batch)[i] == e_i^T (grad(grad(f)) e_i)"""
    of = one(problem, "diag_hessian")
    expected = cache(lambda: loops.hessian_entries(problem))
    yield Claim("diag_hessian", lambda: loops.at_entries(problem, of()), expected, problem.n)


@law("statistics agree with each other", when=no_loss)
def agreement(problem: Problem) -> Iterator[Claim]:
    """ggn_trace == diag_ggn.sum(), diag_ggn == that of each sample .sum(0), which is (sqrt_ggn ** 2).sum(0), ..."""

    def of(name: str) -> Made:
        return one(problem, name)

    def each(fn: Callable, name: str) -> Callable:
        return lambda: tree.map_tensors(fn, of(name).itself())

    def total(name: str) -> Any:
        return sum(x.sum() for x in tree.tensors(of(name).itself()))

    def diagonal() -> Any:
        return tree.map_tensors(lambda g: g.diagonal(), of("gram per parameter").itself())

    yield Claim("gram", diagonal, of("batch_l2_grad"), problem.n)
    yield Claim("sum_grad_squared", lambda: total("sum_grad_squared"), lambda: total("batch_l2_grad"), problem.n)
    yield Claim("diag_ggn of each", each(lambda d: d.sum(0), "diag_ggn of each"), of("diag_ggn").itself, problem.n)
    yield Claim("sqrt_ggn", each(lambda s: s.square().sum(0), "sqrt_ggn"), of("diag_ggn of each").itself, problem.n)
    yield Claim("diag_ggn dense", of("diag_ggn dense").itself, of("diag_ggn").itself, problem.n)
    yield Claim("ggn_trace", of("ggn_trace").itself, lambda: total("diag_ggn"), problem.n)
    yield Claim(
        "ggn_trace per parameter", of("ggn_trace per parameter").itself, each(lambda d: d.sum(), "diag_ggn"), problem.n
    )
    yield Claim(
        "diag_hessian of each", each(lambda d: d.sum(0), "diag_hessian of each"), of("diag_hessian").itself, problem.n
    )
    drawn = each(lambda s: s.square().sum((0, 1)), "sqrt_ggn drawn")
    yield Claim("diag_ggn drawn", of("diag_ggn drawn").itself, drawn, problem.n)


def _divided(of: Made) -> tuple[AxisName, ...]:
    """The axes along which chunks give what the whole does: an f that draws draws anew in each chunk of samples."""
    return tuple(axis for axis in of.row.axes if axis != "samples" or not of.problem.draws)


@law("chunks do not matter")
def chunks(problem: Problem) -> Iterator[Claim]:
    """chunked(t, n, over="samples" | "outputs" | "params")(params, *batch) == t(params, *batch), for every n"""
    for of in every(problem):
        for turn, over in enumerate(_divided(of)):
            split = {"chunk_size": 1} if turn % 2 else {"n": 2 if problem.n < 4 else 3}

            def found(of: Made = of, over: AxisName = over, split: dict = split) -> Any:
                return invfunc.chunked(of.make(), over=over, **split)(*of.args)

            yield Claim(f"{of.called} over {over}", found, of.itself, problem.n)


@law("chunks within chunks do not matter")
def nested_chunks(problem: Problem) -> Iterator[Claim]:
    """chunked(chunked(t, n, over=a), m, over=b)(params, *batch) == t(params, *batch)"""
    for of in every(problem):
        axes = _divided(of)
        for inner, outer in zip(axes, (*axes[1:], axes[0]), strict=True) if axes else ():

            def found(of: Made = of, inner: AxisName = inner, outer: AxisName = outer) -> Any:
                within = invfunc.chunked(of.make(), chunk_size=1, over=inner)
                return invfunc.chunked(within, n=2, over=outer)(*of.args)

            yield Claim(f"{of.called} over {inner}, then {outer}", found, of.itself, problem.n)


@law("blocks do not matter")
def blocks(problem: Problem) -> Iterator[Claim]:
    """t(params, *batch) is the same whatever fits the cache, and with it the samples and columns of one pass"""
    for of in every(problem):
        yield Claim(of.called, lambda of=of: in_blocks(of.make())(*of.args), of.itself, problem.n)


@law("fast equals generic")
def generic(problem: Problem) -> Iterator[Claim]:
    """t(params, *batch) is the same by rules of operations, and by the path that every operation can take"""
    for of in every(problem):
        if of.row.gives == FACTORS:  # K-factors are of operations with a rule
            continue
        yield Claim(of.called, lambda of=of: generic_path(of.make())(*of.args), of.itself, problem.n)


def _in_any_order(problem: Problem) -> str:
    if problem.draws:
        return "f draws, by the places of the samples"
    if problem.n < 2:
        return "there is one sample"
    order = list(range(problem.n))[::-1]
    with torch.no_grad():
        there, back = tree.tensors(problem.f(problem.params, *problem.inputs)), problem.part(order)
        turned = tree.tensors(problem.f(problem.params, *back.inputs))
    for a, b in zip(there, turned, strict=True):
        a = a[order] if a.ndim else a
        if not torch.allclose(a, b, 1e-3, 1e-3 * a.abs().nan_to_num().max().item(), equal_nan=True):
            return "f itself tells the places of the samples apart"
    return ""


@law("the order of the samples does not matter", when=_in_any_order)
def order(problem: Problem) -> Iterator[Claim]:
    """t(params, *(x[order] for x in batch)) == t(params, *batch), or its [order] where it has samples"""
    index = [*range(1, problem.n), 0]
    turned = problem.part(index)
    for name, row in ROWS.items():
        if not row.drawn:
            for of, again in zip(made(problem, name), made(turned, name), strict=True):

                def expected(of: Made = of) -> Any:
                    result = of.itself()
                    return result if of.row.picks is None else of.row.picks(result, torch.tensor(index))

                yield Claim(of.called, again, expected, problem.n)


@law("samples= picks", when=no_loss)
def samples(problem: Problem) -> Iterator[Claim]:
    """batch_grad(f, samples=s)(params, *batch) == batch_grad(f)(params, *batch)[s], and what is made of these"""
    n = problem.n
    chosen = [2 % n, 0, 0, n - 1]
    index = torch.tensor(chosen)

    def picked(name: str) -> Any:
        return tree.map_tensors(lambda x: x[index.to(x.device)], one(problem, name).itself())

    for of in every(problem):
        row = of.row

        def expected(of: Made = of, row: Row = row) -> Any:
            if row.of_shares is not None and OF_THE_MODEL not in of.called:
                return row.of_shares(picked("batch_grad"))
            if row.of_each is not None:
                return row.of_each(picked("diag_ggn of each"))
            if row.picks is not None:
                return row.picks(of.itself(), index)
            return tree.map_tensors(lambda d: d.sum(0), picked("diag_hessian of each"))

        known = row.of_shares or row.of_each or row.picks or row.hessian
        if known and not row.drawn:
            yield Claim(of.called, lambda of=of: of(samples=chosen), expected, n)


@law("together is the same", when=no_loss)
def several(problem: Problem) -> Iterator[Claim]:
    """together(t1, t2, ...)(params, *batch) == (t1(params, *batch), t2(params, *batch), ...)"""
    known = {of.called: of.row for of in every(problem)}
    whole = {name: row for name, row in known.items() if LOSS in row.forms and row.form != OF_MODEL}
    first = [name for name, row in whole.items() if row.of_shares is not None]
    factors = [name for name, row in whole.items() if row.gives == FACTORS and not row.drawn and name != "kfra"]
    second = [name for name, row in whole.items() if name not in first and row.gives != FACTORS and not row.drawn]
    for called, names in {"first order": first, "second order": second, "K-factors": factors}.items():
        of = [one(problem, name) for name in names]

        def found(of: list[Made] = of) -> Any:
            return invfunc.together(*(t.make() for t in of))(*of[0].args)

        yield Claim(called, found, lambda of=of: tuple(t.itself() for t in of), problem.n)
