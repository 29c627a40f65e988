"""Laws of a statistic of one's own: it is its plain loop, by itself and inside of other transforms."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.func import grad

import invfunc
from invfunc import tree
from invfunc.arguments.problem import InDims
from invfunc.callables import check_callable, describe
from invfunc.errors import InvFuncError
from invfunc.plan import AxisName, Options
from invfunc.statistic import Statistic
from invfunc.testing import models
from invfunc.testing.laws.compare import (
    POINTS,
    alive,
    generators,
    mapped_over,
    plain,
    shared,
    state,
    total,
    written,
    zipped,
)
from invfunc.testing.laws.problem import LawProblem, options, problem
from invfunc.testing.laws.rows import generic, in_blocks
from invfunc.testing.laws.run import (
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


@dataclass(frozen=True, repr=False)
class TransformProblem:
    """A maker of statistics and that of their loops, with a function to try them on."""

    maker: Callable
    loop: Callable
    one: LawProblem
    called: str
    rtol = None

    @property
    def n(self) -> int:
        """The number of samples."""
        return self.one.n

    @property
    def samples(self) -> tuple[int, ...]:
        """The places of the samples."""
        return self.one.samples

    @property
    def seed(self) -> int:
        """The same of the function."""
        return self.one.seed

    @property
    def dtype(self) -> torch.dtype:
        """The same of the function."""
        return self.one.dtype

    @property
    def floor(self) -> float:
        """A size that is small beside its gradients."""
        return self.one.floor

    def part(self, samples: Sequence[int]) -> TransformProblem:
        """The same of some samples."""
        return replace(self, one=self.one.part(samples))

    def double(self) -> TransformProblem:
        """The same in float64."""
        return replace(self, one=self.one.double())

    @property
    def functions(self) -> tuple[Callable, ...]:
        """The functions that the makers take."""
        return (self.one.f,) if self.one.loss is None else (self.one.f, self.one.loss)

    def made(self) -> Callable:
        """The statistic, anew."""
        return self.maker(*self.functions)

    def t(self, *args: Any) -> Any:
        """Its result."""
        return self.made()(*args)

    def oracle(self, *args: Any) -> Any:
        """The result of its loop."""
        return self.loop(*self.functions)(*args)


@law("it equals its oracle", TRANSFORM)
def equals(subject: TransformProblem) -> Iterator[Claim]:
    """t(f)(params, *batch) == oracle(f)(params, *batch)"""
    args = subject.one.args

    def expected() -> Any:
        try:
            return subject.oracle(*args)
        except Exception as error:
            subject.t(*args)  # what this refuses needs no oracle
            raise AssertionError(f"the oracle of {subject.called} raises {type(error).__name__}: {error}") from error

    yield Claim(subject.called, lambda: subject.t(*args), expected, subject.n)


@law("grad of it is that of its oracle", TRANSFORM)
def differentiated(subject: TransformProblem) -> Iterator[Claim]:
    """grad(lambda p: total(t(f)(p, *batch)))(params) == the same of the oracle, by torch.autograd"""
    params, *batch = subject.one.args

    def expected() -> Any:
        leaves, form = tree.separate(params)
        leaves = [p.detach().clone().requires_grad_() for p in leaves]
        try:
            value = total(subject.oracle(form.join(leaves), *batch))
            return form.join(torch.autograd.grad(value, leaves, materialize_grads=True))
        except InvFuncError:
            raise
        except Exception as error:
            raise Inapplicable(f"its oracle cannot be differentiated: {type(error).__name__}: {error}") from error

    def found() -> Any:
        leaves, form = tree.separate(params)  # torch.func takes no None
        return form.join(grad(lambda own: total(subject.t(form.join(own), *batch)))(leaves))

    yield Claim(subject.called, found, expected, subject.n)


@law("vmap of it is the loop", TRANSFORM)
def batched(subject: TransformProblem) -> Iterator[Claim]:
    """vmap(t(f), (0, None, ...))(stack(points), *batch) == stack([t(f)(p, *batch) for p in points])"""
    params, *batch = subject.one.args
    points = [tree.map_tensors(lambda p, c=c: c * p, params) for c in POINTS]

    def mapped() -> Any:
        leaves, form = tree.separate(zipped(torch.stack, points))
        return mapped_over(lambda own: plain(subject.t(form.join(own), *batch)), leaves)

    def looped() -> Any:
        return zipped(torch.stack, [plain(subject.one.steady(subject.t)(p, *batch)) for p in points])

    yield Claim(subject.called, mapped, looped, subject.n)


@law("chunks, blocks and paths do not matter to it", TRANSFORM)
def passes(subject: TransformProblem) -> Iterator[Claim]:
    """of a statistic that this library made: chunked(t, 2, over=axis), a tiny cache, the generic path"""
    t, args = subject.made(), subject.one.args
    if not isinstance(t, Statistic):
        return

    def in_chunks(axis: AxisName) -> Any:
        return invfunc.chunked(subject.made(), 2, over=axis)(*args)

    ways: dict[str, Callable] = {f"{subject.called} over {axis}": partial(in_chunks, axis) for axis in t.axes}
    if subject.one.draws:  # anew in each chunk of samples
        ways.pop(f"{subject.called} over samples", None)
    ways[f"{subject.called} in blocks"] = lambda: in_blocks(subject.made())(*args)
    if t.options == Options():
        ways[f"{subject.called}, generic"] = lambda: generic(subject.made())(*args)
    for name, way in ways.items():
        yield Claim(name, way, lambda: subject.t(*args), subject.n)


@law("it leaves all as it was", TRANSFORM)
def effects(subject: TransformProblem) -> Iterator[Claim]:
    """no argument is written, no results share memory, nothing stays alive, the generators end where f leaves them"""
    one, called = subject.one, subject.called

    def after(call: Callable) -> list[torch.Tensor]:
        call()
        return generators()

    def itself() -> Any:
        return subject.t(*one.args)

    yield Claim(f"{called}: arguments", lambda: written(itself, one.args), lambda: state(one.args))
    yield Claim(f"{called}: memory", lambda: shared(itself(), one.args), list)
    yield Claim(f"{called}: generators", lambda: after(itself), lambda: after(lambda: one.f(one.params, *one.inputs)))
    yield Claim(f"{called}: life", lambda: alive(lambda given: subject.t(*given), one.args), list)


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

    also under `grad` and `vmap`, and in chunks, in blocks and on the generic path where this library made it.

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
    one = problem(CALL, f, params, batch, loss, in_dims, samples, seed)
    subject = TransformProblem(t, oracle, one, describe(f))
    outcomes = tried(laws, subject, seconds)
    again = call(CALL, f"t, oracle, {describe(f)}, params, *batch", options(one, in_dims), seed)
    return judged(Table(f"{describe(t)} of {one!r}", tuple(outcomes)), subject, again, seconds)


def _of_families(t: Callable, oracle: Callable, laws: list[Law], seconds: float, seed: int) -> Table:
    """The laws on one function of each family."""
    deadline, outcomes, two = time.perf_counter() + seconds, [Outcome(law) for law in laws], _takes_two(oracle)
    form = "p.model.f, p.model.params, *p.batch, loss=p.loss" if two else "p.f, p.model.params, *p.batch"
    for name in models.FAMILIES:
        p = models.Problem(models.Model(name), models.Loss("mse_loss", "mean" if two else "none"))
        f, loss = (p.model.f, p.loss) if two else (p.f, None)
        subject = TransformProblem(t, oracle, problem(CALL, f, p.model.params, p.batch, loss, 0, None, seed), name)
        found = tried(laws, subject, max(0, deadline - time.perf_counter()))
        for whole, outcome in zip(outcomes, found, strict=True):
            whole.add(outcome)
        judged(Table(f"p = {p!r}", tuple(found)), subject, call(CALL, f"t, oracle, {form}", {}, seed), seconds)
    return Table(f"{describe(t)} of one function of each of {len(models.FAMILIES)} families", tuple(outcomes))


def _takes_two(oracle: Callable) -> bool:
    """True if it is made of a model and its loss."""
    found = inspect.signature(oracle).parameters.values()
    return sum(p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in found) > 1
