"""Laws of a statistic of one's own: it is its plain loop, by itself and inside of other transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch.func import grad

import invfunc
from invfunc import tree
from invfunc.errors import InvFuncError
from invfunc.plan import AxisName, Options
from invfunc.statistic import Statistic
from invfunc.testing.laws.around import POINTS, mapped_over, total
from invfunc.testing.laws.compare import plain, zipped
from invfunc.testing.laws.effects import alive, shared, state, written
from invfunc.testing.laws.law import TRANSFORM, Claim, Inapplicable, law
from invfunc.testing.laws.paths import generic, in_blocks
from invfunc.testing.laws.problem import Problem, generators


@dataclass(frozen=True, repr=False)
class TransformProblem:
    """A maker of statistics and that of their loops, with a function to try them on."""

    maker: Callable
    loop: Callable
    one: Problem
    called: str
    rtol = None

    @property
    def n(self) -> int:
        """How many samples there are."""
        return self.one.n

    @property
    def samples(self) -> tuple[int, ...]:
        """Which ones they are."""
        return self.one.samples

    @property
    def seed(self) -> int:
        """That of the function."""
        return self.one.seed

    @property
    def dtype(self) -> torch.dtype:
        """That of the function."""
        return self.one.dtype

    @property
    def floor(self) -> float:
        """What is small beside its gradients."""
        return self.one.floor

    def part(self, samples: Sequence[int]) -> TransformProblem:
        """The same of some samples."""
        return replace(self, one=self.one.part(samples))

    def double(self) -> TransformProblem:
        """The same in float64."""
        return replace(self, one=self.one.double())

    @property
    def functions(self) -> tuple[Callable, ...]:
        """What the makers take."""
        return (self.one.f,) if self.one.loss is None else (self.one.f, self.one.loss)

    def made(self) -> Callable:
        """The statistic, anew."""
        return self.maker(*self.functions)

    def t(self, *args: Any) -> Any:
        """Its result."""
        return self.made()(*args)

    def oracle(self, *args: Any) -> Any:
        """That of its loop."""
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
