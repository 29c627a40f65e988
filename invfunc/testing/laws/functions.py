"""Laws of a function: what its statistics are, and that they come to it in all ways.

Plain loops and double backward passes know nothing of this library; where a law compares two ways to a statistic, the
other one is what it is by itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch

import invfunc
from invfunc import tree
from invfunc.arguments.problem import InDims
from invfunc.errors import SampleAxisError
from invfunc.plan import AxisName
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
from invfunc.testing.laws.rows import BOTH as MODEL_AND_LOSS
from invfunc.testing.laws.rows import FACTORS, LOSS, ROWS, Row, in_blocks
from invfunc.testing.laws.rows import MODEL as OF_MODEL
from invfunc.testing.laws.rows import generic as generic_path
from invfunc.testing.laws.run import (
    FUNCTION,
    Claim,
    Inapplicable,
    Table,
    call,
    chosen,
    judged,
    law,
    tried,
)
from invfunc.testing.oracles import dense_diag_ggn

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

    def again(self, problem: LawProblem) -> Made:
        """The same of another problem of the kind."""
        known = made(problem, self.called.removesuffix(OF_THE_MODEL))
        return next(one for one in known if one.called == self.called)


def made(problem: LawProblem, name: str, f: Callable | None = None) -> list[Made]:
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


def every(problem: LawProblem) -> list[Made]:
    """All statistics of a problem."""
    return [one for name in ROWS for one in made(problem, name)]


def one(problem: LawProblem, name: str) -> Made:
    """The statistic of a loss."""
    return made(problem, name)[0]


def no_loss(problem: LawProblem) -> str:
    """The reason why there are no statistics of a loss, if there are none."""
    return "f is no loss function; give loss=" if problem.kind == MODEL else ""


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
    for name, row in ROWS.items():
        of_shares = row.of_shares
        if of_shares is not None:
            for of in made(problem, name)[:1]:
                yield Claim(name, of, lambda of_shares=of_shares: of_shares(shares()), problem.n)


@law("the GGN equals its loop", when=loops.no_outputs)
def ggn(problem: LawProblem) -> Iterator[Claim]:
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
def hessian(problem: LawProblem) -> Iterator[Claim]:
    """diag_hessian(f)(params, *batch)[i] == e_i^T (grad(grad(f)) e_i)"""
    of = one(problem, "diag_hessian")
    expected = cache(lambda: loops.hessian_entries(problem))
    yield Claim("diag_hessian", lambda: loops.at_entries(problem, of()), expected, problem.n)


@law("statistics agree with each other", when=no_loss)
def agreement(problem: LawProblem) -> Iterator[Claim]:
    """what is made of the diagonals of each sample is that: diag_ggn == diag_ggn(per_sample=True).sum(0), ..."""

    def each(name: str) -> Any:
        return one(problem, name).itself()

    def squares(name: str, *axes: int) -> Any:
        return tree.map_tensors(lambda s: s.square().sum(axes), each(name))

    for name, row in ROWS.items():
        of_each = row.of_each
        if of_each is not None and name != "diag_ggn of each":

            def expected(of_each: Callable = of_each) -> Any:
                return of_each(each("diag_ggn of each"))

            yield Claim(name, one(problem, name).itself, expected, problem.n)
    yield Claim("sqrt_ggn", lambda: squares("sqrt_ggn", 0), lambda: each("diag_ggn of each"), problem.n)
    yield Claim("diag_ggn drawn", lambda: each("diag_ggn drawn"), lambda: squares("sqrt_ggn drawn", 0, 1), problem.n)

    def summed() -> Any:
        return tree.map_tensors(lambda d: d.sum(0), each("diag_hessian of each"))

    yield Claim("diag_hessian of each", summed, lambda: each("diag_hessian"), problem.n)


VECTORS = 2
"""The number of vectors that are multiplied: numbers in all entries, and a one at one of the entries."""


def vectors(problem: LawProblem) -> list[Any]:
    """Trees like the parameters."""
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


def _in_any_order(problem: LawProblem) -> str:
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
def order(problem: LawProblem) -> Iterator[Claim]:
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
def samples(problem: LawProblem) -> Iterator[Claim]:
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
def several(problem: LawProblem) -> Iterator[Claim]:
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


@law("blocks do not matter")
def blocks(problem: LawProblem) -> Iterator[Claim]:
    """t(params, *batch) is the same whatever fits the cache, and with it the samples and columns of one pass"""
    for of in every(problem):
        yield Claim(of.called, lambda of=of: in_blocks(of.make())(*of.args), of.itself, problem.n)


@law("fast equals generic")
def generic(problem: LawProblem) -> Iterator[Claim]:
    """t(params, *batch) is the same by rules of operations, and by the path that every operation can take"""
    for of in every(problem):
        if of.row.gives == FACTORS:  # K-factors are of operations with a rule
            continue
        yield Claim(of.called, lambda of=of: generic_path(of.make())(*of.args), of.itself, problem.n)


def _divided(of: Made) -> tuple[AxisName, ...]:
    """The axes along which chunks give what the whole does: an f that draws draws anew in each chunk of samples."""
    return tuple(axis for axis in of.row.axes if axis != "samples" or not of.problem.draws)


@law("chunks do not matter")
def chunks(problem: LawProblem) -> Iterator[Claim]:
    """chunked(t, n, over="samples" | "outputs" | "params")(params, *batch) == t(params, *batch), for every n"""
    for of in every(problem):
        for turn, over in enumerate(_divided(of)):
            split = {"chunk_size": 1} if turn % 2 else {"n": 2 if problem.n < 4 else 3}

            def found(of: Made = of, over: AxisName = over, split: dict = split) -> Any:
                return invfunc.chunked(of.make(), over=over, **split)(*of.args)

            yield Claim(f"{of.called} over {over}", found, of.itself, problem.n)


DENSE = 4096
"""Numbers in a Jacobian up to which what is made of the whole of it is differentiated."""


Formula = Callable[..., Any]
"""`(params, *batch)`, of the batch that the statistic takes."""


def no_formulas(problem: LawProblem) -> str:
    """The reason why there are none, if there are none."""
    if problem.kind == MODEL:
        return f"its Jacobian has more than {DENSE} numbers" if _large(problem) else ""
    return loops.no_shares(problem)


def _large(problem: LawProblem) -> bool:
    return sum(p.numel() for p in tree.tensors(problem.params)) * problem.n > DENSE


def formulas(problem: LawProblem, samples: list[int] | None = None) -> Iterator[tuple[Made, Formula]]:
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


def _one_output(problem: LawProblem) -> bool:
    with torch.no_grad():
        return len(tree.tensors(problem.f(problem.params, *problem.inputs))) == 1


def value(problem: LawProblem) -> Callable:
    """One number of what f gives, as a function of `(params, *batch)`."""
    if problem.kind == MODEL:
        return lambda params, *batch: total(problem.f(params, *batch))
    return lambda params, *batch: problem.losses(params, *batch).sum()


def moved(problem: LawProblem, by: float = 0.1, at: float = 0.0) -> LawProblem:
    """At other parameters: at those that training starts from a derivative may be zero, and its rounding is not."""
    return replace(problem, params=tree.map_tensors(lambda p: p + by * fixed(p.shape, p, at), problem.params))


Way = Callable[[Callable], Callable]


def _of_parameters(problem: LawProblem, ways: dict[str, Way], loop: Way) -> Iterator[Claim]:
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
def differentiated(problem: LawProblem) -> Iterator[Claim]:
    """grad(lambda p: total(t(p, *batch)))(params) == the same of the loop, by torch.autograd; so of t by autograd"""
    yield from _of_parameters(problem, {"": slopes, " by autograd": loop_slopes}, loop_slopes)


@law("vmap over parameters is the loop")
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
        >>> table = laws.check(f, w, x, y, only=["fast equals generic", "chunks do not matter"])
        >>> [outcome.state for outcome in table.outcomes]
        ['holds', 'holds']

    Cost: some hundred statistics: a few seconds for a small model, half a minute for a small transformer.
    """
    given = problem("laws.check", f, params, batch, loss, in_dims, samples, seed)
    laws = chosen("laws.check", FUNCTION, only)
    outcomes = tried(laws, given, seconds)
    again = call("laws.check", "f, params, *batch", options(given, in_dims), seed)
    return judged(Table(repr(given), tuple(outcomes)), given, again, seconds)
