"""Laws of a statistic of one's own: it is its plain loop, by itself and inside of other transforms."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch.func import grad, vmap

import invfunc
from invfunc import tree
from invfunc.plan import Options
from invfunc.statistic import Statistic
from invfunc.testing.laws.compare import plain, zipped
from invfunc.testing.laws.compositions import POINTS, total
from invfunc.testing.laws.effects import alive, shared, state, written
from invfunc.testing.laws.law import TRANSFORM, Claim, Inapplicable, law
from invfunc.testing.laws.problem import Problem, generators
from invfunc.testing.laws.statistics import tiny_cache


@dataclass(frozen=True, repr=False)
class TransformProblem:
    """A maker of statistics and that of their loops, with functions to try them on."""

    t: Callable
    oracle: Callable
    problems: tuple[Problem, ...]
    seed: int
    called: tuple[str, ...]
    """What the functions are called."""
    samples: tuple[int, ...] = field(default=())
    rtol = None

    @property
    def n(self) -> int:
        """How many samples may be left out: of one function its own, of several none."""
        return self.problems[0].n if len(self.problems) == 1 else 0

    @property
    def dtype(self) -> torch.dtype:
        """The coarsest one."""
        return max((p.dtype for p in self.problems), key=lambda dtype: torch.finfo(dtype).eps)

    @property
    def floor(self) -> float:
        """What is small beside the gradients."""
        return max(p.floor for p in self.problems)

    def part(self, samples: Sequence[int]) -> TransformProblem:
        """The same of some samples of the one function."""
        part = self.problems[0].part(samples)
        return replace(self, problems=(part,), samples=part.samples)

    def each(self) -> Iterator[tuple[str, Problem, Callable, Callable]]:
        """What each is called, the function with its arguments, its statistic and its loop."""
        for called, one in zip(self.called, self.problems, strict=True):
            functions = (one.f,) if one.loss is None else (one.f, one.loss)
            yield called, one, self.t(*functions), self.oracle(*functions)


@law("it equals its oracle", TRANSFORM)
def equals(subject: TransformProblem) -> Iterator[Claim]:
    """t(f)(params, *batch) == oracle(f)(params, *batch)"""
    for called, one, t, oracle in subject.each():
        yield Claim(called, lambda t=t, a=one.args: t(*a), lambda o=oracle, a=one.args: o(*a), one.n)


@law("grad of it is that of its oracle", TRANSFORM)
def differentiated(subject: TransformProblem) -> Iterator[Claim]:
    """grad(lambda p: total(t(f)(p, *batch)))(params) == the same of the oracle, by torch.autograd"""
    for called, one, t, oracle in subject.each():

        def found(one: Problem = one, t: Callable = t) -> Any:
            return grad(lambda p: total(t(p, *one.batch)))(one.params)

        def expected(one: Problem = one, oracle: Callable = oracle) -> Any:
            leaves, form = tree.separate(one.params)
            leaves = [p.detach().clone().requires_grad_() for p in leaves]
            value = total(oracle(form.join(leaves), *one.batch))
            if not value.requires_grad:
                raise Inapplicable("the oracle is not differentiable")
            return form.join(torch.autograd.grad(value, leaves, materialize_grads=True))

        yield Claim(called, found, expected, one.n)


@law("vmap of it is the loop", TRANSFORM)
def batched(subject: TransformProblem) -> Iterator[Claim]:
    """vmap(t(f), (0, None, ...))(stack(points), *batch) == stack([t(f)(p, *batch) for p in points])"""
    for called, one, t, _ in subject.each():
        points = [tree.map_tensors(lambda p, c=c: c * p, one.params) for c in POINTS]

        def mapped(one: Problem = one, t: Callable = t, points: list = points) -> Any:
            dims = (0, *[None] * len(one.batch))
            return vmap(lambda *a: plain(t(*a)), dims, randomness="same")(zipped(torch.stack, points), *one.batch)

        def looped(one: Problem = one, t: Callable = t, points: list = points) -> Any:
            return zipped(torch.stack, [plain(t(p, *one.batch)) for p in points])

        yield Claim(called, mapped, looped, one.n)


@law("chunks, blocks and paths do not matter to it", TRANSFORM)
def passes(subject: TransformProblem) -> Iterator[Claim]:
    """of a statistic that this library made: chunked(t, 2, over=axis), a tiny cache, the generic path"""
    for called, one, t, _ in subject.each():
        if not isinstance(t, Statistic):
            continue
        ways: dict[str, Callable] = {
            f"{called} over {axis}": lambda t=t, axis=axis, a=one.args: invfunc.chunked(t, 2, over=axis)(*a)
            for axis in t.axes
        }
        ways[f"{called} in blocks"] = lambda t=t, one=one: _in_blocks(t, one)
        if t.options.fast:
            slow = replace(t, options=Options(fast=False)) if t.options == Options() else t
            ways[f"{called}, generic"] = lambda t=slow, a=one.args: t(*a)
        for name, way in ways.items():
            yield Claim(name, way, lambda t=t, a=one.args: t(*a), one.n)


def _in_blocks(t: Callable, one: Problem) -> Any:
    with tiny_cache(one):
        return t(*one.args)


@law("it leaves all as it was", TRANSFORM)
def effects(subject: TransformProblem) -> Iterator[Claim]:
    """no argument is written, no results share memory, nothing stays alive, the generators end where f leaves them"""
    for called, one, t, _ in subject.each():

        def call(one: Problem = one, t: Callable = t) -> Any:
            return t(*one.args)

        def after(call: Callable = call) -> list[torch.Tensor]:
            call()
            return generators()

        def of_f(one: Problem = one) -> list[torch.Tensor]:
            with torch.no_grad():
                one.f(one.params, *one.inputs)
            return generators()

        yield Claim(f"{called}: arguments", lambda c=call, o=one: written(c, o.args), lambda o=one: state(o.args))
        yield Claim(f"{called}: memory", lambda c=call, o=one: shared(c(), o.args), list)
        yield Claim(f"{called}: generators", after, of_f)
    for called, one, t, _ in list(subject.each())[:1]:  # collecting garbage takes its time
        yield Claim(f"{called}: life", lambda t=t, one=one: alive(lambda given: t(*given), one.args), list)
