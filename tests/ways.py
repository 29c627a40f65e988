"""Laws of the ways to a statistic: derivatives, vmap, modes, chunks within chunks, and effects on arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache, partial
from typing import Any

import torch
from torch.func import jacrev, jvp

import invfunc
from invfunc import tree
from invfunc.errors import InvFuncError
from invfunc.plan import AxisName
from invfunc.testing.laws import loops
from invfunc.testing.laws.compare import (
    POINTS,
    _of_tensors,
    alive,
    at_points,
    directions,
    fixed,
    generators,
    loop_at_points,
    loop_slopes,
    mapped_over,
    plain,
    scaled,
    seeded,
    shared,
    slopes,
    state,
    total,
    written,
    zipped,
)
from invfunc.testing.laws.functions import (
    Formula,
    Made,
    Way,
    _divided,
    _of_parameters,
    every,
    formulas,
    moved,
    no_formulas,
    no_loss,
    one,
    value,
)
from invfunc.testing.laws.problem import LawProblem, problem
from invfunc.testing.laws.run import Claim, Inapplicable, Law, Table, judged, tried
from invfunc.testing.laws.run import call as again
from invfunc.testing.laws.run import law as of_book

BOOK: dict[str, Law] = {}
"""The laws by their names."""
law = partial(of_book, book=BOOK)


def check(f: Callable, params: Any, *batch: Any, only: str | list[str], seconds: float = 300, **options: Any) -> Table:
    """`laws.check` of some of these laws."""
    loss, in_dims = options.get("loss"), options.get("in_dims", 0)
    given = problem("check", f, params, batch, loss, in_dims, options.get("samples"), 0)
    outcomes = tried([BOOK[name] for name in ([only] if isinstance(only, str) else only)], given, seconds)
    return judged(Table(repr(given), tuple(outcomes)), given, again("check", "f, params, *batch", {}, 0), seconds)


ALONG = 0.4
"""Where the numbers of a tangent begin."""


def rows(t: Callable) -> Callable:
    """The gradients of two totals at once, by torch.func."""

    def call(first: Any, *rest: Any) -> Any:
        of, leaves, join = _of_tensors(lambda *args: both(t(*args)), first, rest)
        return join(jacrev(of)(leaves))

    def both(result: Any) -> torch.Tensor:
        return torch.stack([total(result), total(result, 0.7)])

    return call


def loop_rows(t: Callable) -> Callable:
    """The same one by one, by torch.autograd."""
    return lambda *args: zipped(torch.stack, [loop_slopes(t)(*args), loop_slopes(t, 0.7)(*args)])


def slope_along(t: Callable, at: float = 0.0) -> Callable:
    """The derivative of its total along a fixed tangent of the first argument, in forward mode."""

    def call(first: Any, *rest: Any) -> torch.Tensor:
        of, leaves, _ = _of_tensors(lambda *args: tree.tensors(plain(t(*args))), first, rest)
        return total(jvp(of, (leaves,), (tree.tensors(directions(first, ALONG)),))[1], at)

    return call


def loop_slope_along(t: Callable, at: float = 0.0) -> Callable:
    """The same as the product of the gradient with the tangent, by torch.autograd."""

    def call(first: Any, *rest: Any) -> torch.Tensor:
        found = tree.tensors(loop_slopes(t, at)(first, *rest))
        pairs = zip(found, tree.tensors(directions(first, ALONG)), strict=True)
        return torch.stack([(g * v).sum() for g, v in pairs]).sum()

    return call


def in_float64(problem: LawProblem) -> LawProblem:
    """The same in float64, if f takes it."""
    found = problem.double()
    try:
        with torch.no_grad(), seeded(problem.seed):
            value(found)(*found.args)
    except Exception as error:  # of the user's f, with constants of its own
        raise Inapplicable(f"it is tried in float64, where f raises {type(error).__name__}: {error}") from error
    return found


def floats(problem: LawProblem) -> tuple[list[torch.Tensor], Callable]:
    """Those of the inputs, and the batch with others in their place."""
    tensors, form = tree.separate(problem.inputs)
    places = [i for i, x in enumerate(tensors) if x.is_floating_point()]
    target = problem.batch[len(problem.inputs) :]

    def batch(own: list[torch.Tensor]) -> tuple:
        given = dict(zip(places, own, strict=True))
        return (*form.join([given.get(i, x) for i, x in enumerate(tensors)]), *target)

    return [tensors[i] for i in places], batch


@law("no argument is written")
def arguments(problem: LawProblem) -> Iterator[Claim]:
    """t(params, *batch) leaves values, versions, requires_grad and .grad of params and batch as they were"""
    for of in every(problem):
        yield Claim(of.called, lambda of=of: written(of, problem.args), lambda: state(problem.args))


@law("results have memory of their own")
def memory(problem: LawProblem) -> Iterator[Claim]:
    """no two tensors of t(params, *batch) share memory, with each other or with params and batch"""
    for of in every(problem):
        yield Claim(of.called, lambda of=of: shared(of(), problem.args), list)


@law("nothing stays alive")
def life(problem: LawProblem) -> Iterator[Claim]:
    """when params, batch and result are deleted, their tensors are gone"""

    def all_of_them(given: tuple) -> list[Any]:
        params, *batch = given
        own, results = replace(problem, params=params, batch=tuple(batch)), []
        for of in every(own):
            try:
                results.append(of())
            except InvFuncError:  # told elsewhere
                continue
        return results

    yield Claim("all statistics", lambda: alive(all_of_them, problem.args), list)


@law("the generators end where f leaves them")
def random_numbers(problem: LawProblem) -> Iterator[Claim]:
    """torch's generators are after t(params, *batch) where they are after f(params, *batch)"""

    def after(call: Callable) -> list[torch.Tensor]:
        call()
        return generators()

    def of_f() -> list[torch.Tensor]:
        with torch.no_grad():
            return after(lambda: problem.f(problem.params, *problem.inputs))

    for of in every(problem):
        yield Claim(of.called, lambda of=of: after(of), of_f)


@law("chunks within chunks do not matter")
def nested_chunks(problem: LawProblem) -> Iterator[Claim]:
    """chunked(chunked(t, n, over=a), m, over=b)(params, *batch) == t(params, *batch)"""
    for of in every(problem):
        axes = _divided(of)
        for inner, outer in zip(axes, (*axes[1:], axes[0]), strict=True) if axes else ():

            def found(of: Made = of, inner: AxisName = inner, outer: AxisName = outer) -> Any:
                within = invfunc.chunked(of.make(), chunk_size=1, over=inner)
                return invfunc.chunked(within, n=2, over=outer)(*of.args)

            yield Claim(f"{of.called} over {inner}, then {outer}", found, of.itself, problem.n)


STEP, FAR = 1e-4, 1e-3
"""How far parameters are moved for a difference, and for one of differences."""
WEIGHTS = 0.3
"""Where the numbers begin that slopes are weighed with."""


@law("jacrev of a statistic is that of its loop", when=no_formulas)
def jacobian(problem: LawProblem) -> Iterator[Claim]:
    """jacrev(lambda p: stack([total(t(p, *batch)), other(t(p, *batch))]))(params) == the rows of the loop"""
    yield from _of_parameters(problem, {"": rows}, loop_rows)


@law("jvp of a statistic is that of its loop", when=no_formulas)
def forward(problem: LawProblem) -> Iterator[Claim]:
    """total(jvp(t, (params,), (v,))[1]) == grad(total(loop))(params) . v"""
    yield from _of_parameters(problem, {"": slope_along}, loop_slope_along)


@law("grad of chunks of some samples is that of its loop", when=no_formulas)
def of_chunks(problem: LawProblem) -> Iterator[Claim]:
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


def _no_hessian(problem: LawProblem) -> str:
    return no_loss(problem) or ("f draws" if problem.draws else "")


@law("derivatives of the Hessian are those of its loop", when=_no_hessian)
def of_hessian(problem: LawProblem) -> Iterator[Claim]:
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

    def loop(at: LawProblem, h: float) -> torch.Tensor:
        return total(loops.hessian_entries(moved(at, h, WEIGHTS)))

    def first(at: LawProblem) -> torch.Tensor:
        return (loop(at, STEP) - loop(at, -STEP)) / (2 * STEP)

    def second(at: LawProblem) -> torch.Tensor:
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


def _no_data(problem: LawProblem) -> str:
    return no_formulas(problem) or ("" if floats(problem)[0] else "there are no floats among the inputs")


@law("grad of a statistic in the data is that of its loop", when=_no_data)
def differentiated_in_data(problem: LawProblem) -> Iterator[Claim]:
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
def differentiated_twice(problem: LawProblem) -> Iterator[Claim]:
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

    def changes(formula: Formula, count: int, at: LawProblem) -> Any:
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


def _draws(problem: LawProblem) -> str:
    if problem.draws:
        return "f draws"
    return "" if any(dim is not None for dim in problem.in_dims) else "all samples share the batch"


class _Sets:
    """The batch, and another one of the same samples, some of them twice."""

    def __init__(self, problem: LawProblem) -> None:
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
def batched_in_data(problem: LawProblem) -> Iterator[Claim]:
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


def _no_formulas(problem: LawProblem) -> str:
    return no_formulas(problem) or ("f draws" if problem.draws else "")


@law("vmap of grad of a statistic is that of its loop", when=_no_formulas)
def batched_slopes(problem: LawProblem) -> Iterator[Claim]:
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


def _closing(problem: LawProblem, c: torch.Tensor) -> LawProblem:
    """The same of an f with a scale of the parameters and a shift of the data that it closes over."""
    by, shift = c.to(problem.dtype).unbind()

    def f(params: Any, *inputs: Any) -> Any:
        tensors, form = tree.separate(inputs)
        inputs = form.join([x + shift.to(x.dtype) if x.is_floating_point() else x for x in tensors])
        return problem.f(scaled(params, by), *inputs)

    return replace(problem, f=f)


@law("what f closes over is differentiated", when=no_formulas)
def closed_over(problem: LawProblem) -> Iterator[Claim]:
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
def modes(problem: LawProblem) -> Iterator[Claim]:
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
