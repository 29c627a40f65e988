"""Checkpointing inside of torch.func of calls that need not be watched (`straight`): within one `grad` alone.

There the node of `function` and its step are computed on plain tensors, with autograd as it is. Where anything else is
around the backward pass (a `vmap` over it, a transform that has ended), the step is that of `function`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from invfunc import thresholds, tree
from invfunc._functorch import LevelFunction, bare_at, gradients, innermost, only_level, plainly, wrapped_at
from invfunc._values import differentiable
from invfunc.errors import ReplayError
from invfunc.pairs.pair import Invertible
from invfunc.recomputation.call import Call, Evaluate, Tensors
from invfunc.recomputation.function import NOT_TWICE, Forward, LevelBlock, Node
from invfunc.recomputation.maps import Run, Shared, among, pulled_back
from invfunc.recomputation.report import CHANGES, Report
from invfunc.recomputation.slots import fetch
from invfunc.recomputation.straight import Straight, Template


class StraightCall(Call):
    """A call that is not watched."""

    def __init__(self, pair: Invertible, template: Template, straight: Straight, report: Report) -> None:
        super().__init__(pair, template.x, template.rest, random=False, report=report)
        self.template, self._straight = template, straight
        self._like, self._y = template.like, template.y

    def dtypes(self) -> list[torch.dtype]:
        return [like.dtype for like in self._like]

    def unchanged(self) -> None:
        """Raise if a function is not what it was."""
        if not self._straight.unchanged():
            raise ReplayError(f"a function that the block evaluates has been exchanged since its call. {CHANGES}")


class Evaluated:
    """An evaluation of a shared function, as those that are watched are seen from outside."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self._fn, (self.tensors, self._form) = fn, tree.separate((args, kwargs))

    def at(self, tensors: Tensors) -> Any:
        """The result at some tensors."""
        args, kwargs = self._form.join(tensors)
        return self._fn(*args, **kwargs)


class StraightRun(Run):
    """A call that is not watched, as functions of flat lists of tensors."""

    call: StraightCall

    def first(self, xs: Tensors, rest: Tensors) -> list[torch.Tensor]:
        return self.forward(xs, rest)

    def forward(
        self, xs: Tensors, rest: Tensors, known: Evaluate | None = None, compare: bool = True, exact: bool = False
    ) -> list[torch.Tensor]:
        template, pair = self.call.template, self.call.pair
        args, kwargs = template.rest.join(rest)
        shared, at = pair.shared, iter(range(len(template.evaluations)))

        def evaluated(fn: Callable, *args: Any, **kwargs: Any) -> Any:
            assert known is not None
            evaluation: Any = Evaluated(fn, args, kwargs)
            return known(next(at), evaluation)

        if known is not None:
            shared = tuple(partial(evaluated, fn) for fn in shared)
        y = pair.forward(*shared, template.x.join(xs), *args, **kwargs)
        return [y] if type(y) is torch.Tensor else tree.tensors(y)

    def inverse(self, sources: Tensors, rest: Tensors, evaluate: Evaluate | None) -> list[torch.Tensor]:
        self.call.unchanged()
        template, pair = self.call.template, self.call.pair
        args, kwargs = template.rest.join(rest)
        at = len(template.evaluations)

        def backwards(fn: Callable, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal at
            at -= 1
            evaluation: Any = Evaluated(fn, (template.evaluations[at][0].given_to(state), *args), kwargs)
            return evaluation.at(evaluation.tensors) if evaluate is None else evaluate(at, evaluation)

        shared = tuple(partial(backwards, fn) for fn in pair.shared)
        came = tree.tensors(pair.inverse(*shared, template.y.join(sources), *args, **kwargs))
        if len(came) != len(template.like):
            raise ReplayError(f"the inverse gives {len(came)} tensors, where x has {len(template.like)}. {CHANGES}")
        return [
            like.checked(t, i, self.call.names) for i, (like, t) in enumerate(zip(template.like, came, strict=True))
        ]


class StraightForward(Forward):
    """What the node of such a call computes, at the level of a `grad`."""

    _run: StraightRun

    def __init__(self, run: StraightRun, count: int, level: int, given: Tensors) -> None:
        super().__init__(run, count)
        self.level, self._given = level, given

    def apply(self, tensors: Tensors, ctx: Any) -> tuple[torch.Tensor, ...]:
        """The outputs, at the level, of tensors of the level, which were given without their wrappers."""
        given, self._given = self._given, ()
        xs, rest = given[: self._count], given[self._count :]
        with plainly():
            ctx.block = LevelBlock(self._run, rest)
            found = self._run.forward(xs, rest)
            ys = [t.view_as(t) if any(t is other for other in given) else t for t in found]
            ghosts = [x.new_zeros(()).expand(x.shape) for x in xs]
        ys, ghosts = ([wrapped_at(t, self.level) for t in ts] for ts in (ys, ghosts))
        ctx.block.connect(tensors[: self._count], ys, [ctx.metadata] * len(ys), xs)
        ctx.save_for_backward(*ghosts, *tensors[self._count :])
        return *ys, *ghosts

    def step(self, ctx: Any, of: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """The gradients of the inputs; None where something else than the `grad` is around."""
        of_ys, of_ghosts = of[: len(of) - self._count], of[len(of) - self._count :]
        if only_level() != self.level or any(g is not None for g in of_ghosts):
            return None
        given = [i for i, g in enumerate(of_ys) if g is not None]
        gs = [bare_at(g, self.level) for g in of_ys if g is not None]
        needs = ctx.needs_input_grad[1:]
        wanted, idle = [i for i, need in enumerate(needs) if need], set[int]()
        block, call = ctx.block, self._run.call
        plain = [g for g in gs if g is not None]
        if len(plain) < len(gs):
            return None
        with torch.enable_grad(), call.named():
            rest = block.arguments()
            xs = block.xs()
            sources = [] if xs is not None else _bare(fetch(block.sources))
            with plainly():
                call.unchanged()
                asked = wanted, given, idle
                xs, found = _stepped(self._run, None if xs is None else _bare(xs), sources, rest, plain, asked)
                if sources:
                    block.give_back_and_tell(xs)
        values = [(i, g) for i, g in zip(wanted, found, strict=True) if i not in idle]
        if torch.is_grad_enabled() and values:
            outputs = _Once.at_level(self.level, [g for _, g in values], ctx.saved_tensors[wanted[0]])
        else:
            outputs = [wrapped_at(g, self.level) for _, g in values]
        by_place = {i: output for (i, _), output in zip(values, outputs, strict=True)}
        return [by_place.get(i) for i in range(len(needs))]


class _Straight(LevelFunction):
    """The node."""

    @staticmethod
    def forward(ctx: Any, op: StraightForward, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.op, ctx.around = op, []
        outputs = op.apply(tensors, ctx)
        ctx.mark_non_differentiable(*(t for t in outputs if not differentiable(t)))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        found = ctx.op.step(ctx, gradients)
        return Node.backward(ctx, *gradients) if found is None else (None, *found)


class _Once(LevelFunction):
    """Gradients as tensors of the level that they were taken in, where they have none themselves."""

    @staticmethod
    def forward(ctx: Any, level: int, gradients: Tensors, of: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(wrapped_at(g, level) for g in gradients)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        raise ReplayError(NOT_TWICE)


def _bare(tensors: Tensors) -> list[torch.Tensor]:
    return [innermost(t) for t in tensors]


def _stepped(
    run: StraightRun,
    xs: Tensors | None,
    sources: Tensors,
    rest: Tensors,
    gs: Tensors,
    asked: tuple[Sequence[int], Sequence[int], set[int]],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """x and the gradients, as `maps.unwound` has them, of plain tensors."""
    (wanted, given, idle), count = asked, len(run.call.template.like)
    if xs is None and run.call.pair.shared and sum(t.numel() for t in sources) >= thresholds.MERGED:
        level = _entered, _edge, torch.Tensor.detach
        shared = Shared(level, among([t for i, t in enumerate(rest, count) if i not in wanted]), False)
        xs = [x.detach() for x in run.inverse(sources, rest, shared.evaluate)]

        def forward(tensors: Tensors) -> list[torch.Tensor]:
            return run.forward(tensors[:count], tensors[count:], shared.recall)

        return xs, pulled_back(forward, [*xs, *rest], gs, asked, level, shared.gradients)
    if xs is None:
        with torch.no_grad():
            xs = run.inverse(sources, rest, None)
    inputs = [*xs, *rest]
    for i in wanted:
        inputs[i] = _entered(inputs[i])
    ys = run.forward(inputs[:count], inputs[count:])
    ends = [(ys[i], g) for i, g in zip(given, gs, strict=True) if ys[i].requires_grad]
    found = gradients(*zip(*ends, strict=True), [inputs[i] for i in wanted]) if ends else [None] * len(wanted)
    idle.update(i for i, g in zip(wanted, found, strict=True) if g is None)
    return list(xs), [inputs[i] if g is None else g for i, g in zip(wanted, found, strict=True)]


def _entered(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def _edge(x: torch.Tensor) -> torch.autograd.graph.GradientEdge | torch.Tensor | None:
    return None if not x.requires_grad else x if x.is_leaf else torch.autograd.graph.get_gradient_edge(x)


def straight_noded(
    pair: Invertible, template: Template, straight: Straight, report: Report, leaves: list[Any]
) -> tuple[Any] | None:
    """The result of a call whose graph is one node, in a tuple; None where it has to be watched after all."""
    level = only_level()
    tensors = [leaves[place] for place in template.places]
    given = [bare_at(t, level) for t in tensors] if level else [None]
    plain = [t for t in given if t is not None]
    if level is None or len(plain) < len(tensors):
        return None
    call = StraightCall(pair, template, straight, report)
    op = StraightForward(StraightRun(call), template.count, level, plain)
    outputs = _Straight.at_level(op, *tensors)
    return (template.y.join(outputs[: len(outputs) - template.count]),)
