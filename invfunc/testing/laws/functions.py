"""Laws of a function, and of a statistic of one's own: what statistics are, alone and within grad and vmap.

Plain loops and double backward passes know nothing of this library.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch

import invfunc
from invfunc import tree
from invfunc.callables import check_callable, describe
from invfunc.errors import SampleAxisError
from invfunc.problem import InDims
from invfunc.testing import models
from invfunc.testing.laws import loops
from invfunc.testing.laws.compare import (
    at_points,
    difference,
    directions,
    fixed,
    generators,
    loop_at_points,
    loop_slopes,
    slopes,
    tolerance,
    total,
    zipped,
)
from invfunc.testing.laws.problem import BOTH, LOSSES, MODEL, SCALAR, LawProblem, options, problem
from invfunc.testing.laws.rows import OF_THE_MODEL, ROWS, Made, every, made, no_loss, one
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


@law("per-sample gradients sum to the gradient", when=no_loss)
def shares_sum(problem: LawProblem) -> Iterator[Claim]:
    """sum_n batch_grad(f)(params, *batch)[n] == grad(lambda p: f(p, *batch).sum())(params)"""

    def found(t: Made, of: Callable) -> Callable:
        return lambda: of(t())

    def summed(shares: Any) -> Any:
        return tree.map_tensors(lambda g: g.sum(0), shares)

    expected = cache(lambda: loops.gradient(problem))
    yield Claim("batch_grad", found(one(problem, "batch_grad"), summed), expected, problem.n)
    yield Claim("grad_and_variance", found(one(problem, "grad_and_variance"), lambda r: r[0]), expected, problem.n)


def _without_draws(problem: LawProblem) -> str:
    if problem.draws:
        return "f draws"
    return "" if problem.n > 1 else "there is one sample"


@law("samples do not mix", when=_without_draws, of_f=True)
def apart(problem: LawProblem) -> Iterator[Claim]:
    """f(params, *batch)[n], and loss(z, y)[n], stay what they are when the other samples become copies of sample n; a
    scalar loss is a sum: its gradient in z[n] is of the same direction then, and the same for other z[m]"""
    if problem.kind == SCALAR:
        yield Claim("f", lambda: _mixes(problem), lambda: "")
        return
    yield Claim("f", lambda: _values(problem), lambda: _alone(problem))
    if problem.kind == BOTH:
        if _loss(problem).ndim:
            yield Claim("loss", lambda: _loss(problem), lambda: _losses_alone(problem))
        else:
            yield Claim("loss", lambda: _slopes(problem), lambda: _slopes_beside_others(problem))
            yield Claim("loss, direction", lambda: _directions(problem), lambda: _directions_alone(problem))


def _mixes(problem: LawProblem) -> str:
    """Tells what mixes the samples of a scalar loss, which is not the sum or mean of its values for each of them."""
    try:
        one(problem, "batch_grad").itself()
    except SampleAxisError as error:
        if problem.fold:
            raise
        return str(error)
    return ""


def _values(problem: LawProblem) -> Any:
    with torch.no_grad():
        return tree.map_tensors(lambda z: z.detach().clone(), problem.f(problem.params, *problem.inputs))


def _copies(problem: LawProblem) -> list[LawProblem]:
    """For each sample a batch that is made of it alone."""
    return [problem.part([n] * problem.n) for n in range(problem.n)]


def _own(trees: list[Any]) -> Any:
    """Of the n-th tree the n-th rows."""
    return zipped(torch.stack, [tree.map_tensors(lambda z, n=n: z[n], z) for n, z in enumerate(trees)])


def _alone(problem: LawProblem) -> Any:
    return _own([_values(part) for part in _copies(problem)])


def _loss(problem: LawProblem) -> torch.Tensor:
    """The loss of the outputs, which draws nothing."""
    assert problem.loss is not None
    with torch.no_grad():
        z, before = problem.f(problem.params, *problem.inputs), generators()
        value = problem.loss(z, problem.batch[-1]).clone()
    if any(not torch.equal(a, b) for a, b in zip(before, generators(), strict=True)):
        raise Inapplicable("loss draws")
    return value


def _losses_alone(problem: LawProblem) -> torch.Tensor:
    return torch.stack([_loss(part)[n] for n, part in enumerate(_copies(problem))])


def _slopes(problem: LawProblem) -> Any:
    """The gradient of the loss in the outputs."""
    _loss(problem)
    return _slopes_at(problem, tree.tensors(_values(problem)))


def _slopes_at(problem: LawProblem, z: list[torch.Tensor]) -> list[torch.Tensor]:
    with torch.enable_grad():
        return loops.loss_slope(problem, z)


def _slopes_beside_others(problem: LawProblem) -> Any:
    """Each row of it where all other outputs are those of this sample, and the targets what they are."""
    z = tree.tensors(_values(problem))
    return _own([_slopes_at(problem, [x[n].expand_as(x) for x in z]) for n in range(problem.n)])


def _directions(problem: LawProblem) -> Any:
    return [_directed(x) for x in _slopes(problem)]


def _directions_alone(problem: LawProblem) -> Any:
    return _own([_directions(part) for part in _copies(problem)])


def _directed(slope: torch.Tensor) -> torch.Tensor:
    """Rows of length one, as weights of targets scale them; zeros where a sample has no slope."""
    rows = slope.reshape(len(slope), -1)
    return torch.nn.functional.normalize(rows, dim=1, eps=torch.finfo(rows.dtype).tiny).reshape(slope.shape)


@law("per-sample gradients equal their loop", when=loops.no_shares)
def first_order(problem: LawProblem) -> Iterator[Claim]:
    """batch_grad(f)(params, *batch)[n] == grad(lambda p: f(p, *batch)[n])(params), and what is made of these"""
    shares = cache(lambda: loops.shares(problem))
    for of in every(problem):
        reduce = of.row.of_shares
        if reduce is not None and OF_THE_MODEL not in of.called:
            yield Claim(of.called, of, lambda reduce=reduce: reduce(shares()), problem.n)


@law("the GGN equals its loop", when=loops.no_outputs)
def ggn(problem: LawProblem) -> Iterator[Claim]:
    """diag_ggn(f, loss)(params, *batch)[i] == sum_n (J[n] e_i)^T H[n] (J[n] e_i), and what is made of these"""
    diagonals = cache(lambda: loops.ggn_entries(problem))
    for name in ("diag_ggn", "diag_ggn of each"):
        of = one(problem, name)

        def found(of: Made = of) -> Any:
            return loops.at_entries(problem, of())

        reduce: Any = of.row.of_each
        yield Claim(name, found, lambda reduce=reduce: reduce(diagonals()), problem.n)
    of = one(problem, "sqrt_ggn")

    def squares() -> Any:
        return tree.map_tensors(lambda s: s.square().sum(0), loops.at_entries(problem, of()))

    yield Claim("sqrt_ggn", squares, diagonals, problem.n)
    if problem.complete:
        trace: Any = ROWS["ggn_trace"].of_each
        yield Claim("ggn_trace", one(problem, "ggn_trace"), lambda: trace(diagonals()), problem.n)


@law("the Hessian equals its loop", when=no_loss)
def hessian(problem: LawProblem) -> Iterator[Claim]:
    """diag_hessian(f)(params, *batch)[i] == e_i^T (grad(grad(f)) e_i)"""
    of = one(problem, "diag_hessian")
    expected = cache(lambda: loops.hessian_entries(problem))
    yield Claim("diag_hessian", lambda: loops.at_entries(problem, of()), expected, problem.n)


def vectors(problem: LawProblem) -> list[Any]:
    """Trees like the parameters: numbers in all entries, and a one at one of the entries."""
    leaves, form = tree.separate(problem.params)
    unit = [torch.zeros_like(p, memory_format=torch.contiguous_format) for p in leaves]
    leaf = max(range(len(leaves)), key=lambda i: leaves[i].numel())
    unit[leaf].view(-1)[int(problem.entries[leaf][-1])] = 1
    return [directions(problem.params), form.join(unit)]


def _of_product(problem: LawProblem, called: str, product: Any, expected: Any) -> Iterator[Claim]:
    """By itself, and by its linearisation."""
    for turn, v in enumerate(vectors(problem)):
        dense = cache(lambda v=v: expected(v))
        more = ", of a column" if turn else ""
        yield Claim(f"{called}{more}", lambda v=v: product(problem.params, v, *problem.batch), dense, problem.n)
        yield Claim(f"{called}.linearize{more}", lambda v=v: product.linearize(*problem.args)(v), dense, problem.n)


@law("products equal those of the matrix", when=no_loss)
def of_matrices(problem: LawProblem) -> Iterator[Claim]:
    """hvp(f)(params, v, *batch) == H v, ggnvp(f, loss) is J^T H (J v), with fisher="empirical" sum_n G[n] (G[n] . v)"""
    given = (problem.f,) if problem.loss is None else (problem.f, problem.loss)

    def hessian(v: Any) -> Any:
        loop, form = loops.of_loss(problem)
        return form.join(loop.pulled(loop.rows, loop.leaves, tree.tensors(v)))

    def ggn(v: Any) -> Any:
        loop, form = loops.of_outputs(problem)
        return form.join(loop.back(loop.bent(loop.forth(tree.tensors(v)))))

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


def _no_model(problem: LawProblem) -> str:
    return "" if problem.kind in (MODEL, BOTH, LOSSES) else "f returns one number"


@law("Jacobians equal their loop", when=_no_model)
def jacobians(problem: LawProblem) -> Iterator[Claim]:
    """linearize(f)(params, *inputs) == f, v -> J v, c -> J^T c; batch_jacobian(f) times v is J v, its gram J J^T c"""
    inputs, v = (problem.params, *problem.inputs), directions(problem.params)
    run = cache(lambda: loops.of_model(problem))
    linearized = cache(lambda: invfunc.linearize(problem.f)(*inputs))

    def values() -> list[torch.Tensor]:
        return [z.detach() for z in run()[0].z]

    def cotangents() -> list[torch.Tensor]:
        return [fixed(z.shape, z, 0.2) for z in values()]

    def forth() -> list[torch.Tensor]:
        return run()[0].forth(tree.tensors(v))

    def back() -> Any:
        loop, form = run()
        return form.join(loop.back(cotangents()))

    def pulled() -> Any:
        return linearized()[2](tree.separate(problem.f(*inputs))[1].join(cotangents()))

    yield Claim("linearize, values", lambda: tree.tensors(linearized()[0]), values)
    yield Claim("linearize, J v", lambda: tree.tensors(linearized()[1](v)), forth, problem.n)
    yield Claim("linearize, J^T c", pulled, back, problem.n)
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
def factors(problem: LawProblem) -> Iterator[Claim]:
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


# Laws of a statistic, also of one's own

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


def check(
    f: Callable,
    params: Any,
    *batch: Any,
    loss: Callable | None = None,
    in_dims: InDims = 0,
    seconds: float = 30,
    only: Iterable[str] | str | None = None,
    samples: Iterable[int] | None = None,
    seed: int = 0,
) -> Table:
    """Assert the laws of this library for a function of yours: that its statistics are right, in all ways to them.

        for law in LAWS.values():
            assert all(claim.found() == claim.expected() for claim in law.claims(f, params, *batch))

    A law is tried on all statistics that take f, against plain loops and double backward passes of autograd that know
    nothing of this library, or against the same statistic on another way. What this library refuses is no failure: it
    is told, with its error. Give few samples (3 to 8) and small sizes, in float64, where rounding hides least. In a
    lower precision as much is tolerated as the loop itself differs from the same loop in float64, some times over.
    "Samples do not mix" is of f and of `loss`: a contrastive loss, or a batch norm that trains, fails it. An f that
    gives NaN is an error.

    Args:
        f: a loss function `f(params, *batch)` that returns a scalar or `[N]`, or a model function `f(params, *inputs)`.
        params: any pytree of floating-point tensors.
        batch: tensors, or trees of them, with the samples along axis 0; with `loss` the last one is its target.
        loss: `loss(outputs, target)` of a model function, a scalar or `[N]`.
        in_dims: the sample axis of each batch argument, or of all; None for what all samples share.
        seconds: how long laws are tried, the cheap and telling ones first. What is left is listed as not tried, and
            is no failure; what was begun is finished, which may take minutes (the Hessian of attention, without fast
            rules). A smallest case is looked for as long again.
        only: the name of a law, or several.
        samples: these of the batch only.
        seed: where torch's global generators start; they are put back behind.

    Returns:
        A `Table`, which prints as a line for each law.

    Raises:
        AssertionError: a law does not hold. It tells the smallest case: the fewest samples, the entry with both
            numbers, and what to type to see it again.
        ArgumentError, ArgumentTypeError: arguments that no law can use, names of no law, or an f that all laws refuse.

    Example:
        >>> import torch
        >>> from invfunc.testing import laws
        >>> def f(w, x, y):
        ...     return (x @ w - y).square()
        >>> w, x, y = torch.ones(2).double(), torch.eye(3, 2).double(), torch.zeros(3).double()
        >>> table = laws.check(f, w, x, y, only=["the Hessian equals its loop", "samples do not mix"])
        >>> [outcome.state for outcome in table.outcomes]
        ['holds', 'holds']

    Cost: some hundred statistics: a few seconds for a small model, half a minute for a small transformer.
    """
    given = problem("laws.check", f, params, batch, loss, in_dims, samples, seed)
    laws = chosen("laws.check", FUNCTION, only)
    outcomes = tried(laws, given, seconds)
    again = call("laws.check", "f, params, *batch", options(given, in_dims), seed)
    return judged(Table(repr(given), tuple(outcomes)), given, again, seconds)


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
