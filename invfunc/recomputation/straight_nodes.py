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
from invfunc._torch.functorch import innermost, plainly
from invfunc._torch.levels import LevelFunction, bare_at, gradients, has_ended, only_level, wrapped_at
from invfunc._torch.values import differentiable
from invfunc.errors import ReplayError
from invfunc.recomputation.call import Call, Evaluate, Tensors
from invfunc.recomputation.function import NOT_TWICE, Forward, LevelBlock, Node
from invfunc.recomputation.maps import Maps, Shared, among, pulled_back
from invfunc.recomputation.report import CHANGES
from invfunc.recomputation.slots import fetch
from invfunc.recomputation.straight_found import Found


class StraightCall(Call):
    """A call that is not watched."""

    def __init__(self, found: Found) -> None:
        template, report = found.template, found.report
        super().__init__(report.block.pair, template.x.form, template.rest.form, random=False, report=report)
        self.template, self._closed = template, found.closed
        self._like, self._y = template.like, template.y

    def dtypes(self) -> list[torch.dtype]:
        return [like.dtype for like in self._like]

    def unchanged(self) -> None:
        """Raise if a function is not what it was."""
        self._closed.again()


class Evaluated:
    """An evaluation of a shared function, as those that are watched are seen from outside."""

    def __init__(self, fn: Callable, args: tuple, kwargs: dict[str, Any]) -> None:
        self._fn, (self.tensors, self._form) = fn, tree.separate((args, kwargs))

    def at(self, tensors: Tensors) -> Any:
        """The result at some tensors."""
        args, kwargs = self._form.join(tensors)
        return self._fn(*args, **kwargs)


class StraightMaps(Maps):
    """A call that is not watched, as functions of flat lists of tensors."""

    call: StraightCall

    def first(self, xs: Tensors, rest: Tensors) -> list[torch.Tensor]:
        return self.forward(xs, rest)

    def forward(
        self, xs: Tensors, rest: Tensors, known: Evaluate | None = None, compare: bool = True, exact: bool = False
    ) -> list[torch.Tensor]:
        template = self.call.template
        args, kwargs = template.rest.form.join(rest)
        shared, at = template.shared, iter(range(len(template.evaluations)))

        def evaluated(fn: Callable, *args: Any, **kwargs: Any) -> Any:
            assert known is not None
            evaluation: Any = Evaluated(fn, args, kwargs)
            return known(next(at), evaluation)

        if known is not None:
            shared = tuple(partial(evaluated, fn) for fn in shared)
        y = template.forward(*shared, template.x.form.join(xs), *args, **kwargs)
        return [y] if type(y) is torch.Tensor else tree.tensors(y)

    def inverse(self, sources: Tensors, rest: Tensors, evaluate: Evaluate | None) -> list[torch.Tensor]:
        self.call.unchanged()
        template = self.call.template
        args, kwargs = template.rest.form.join(rest)
        at = len(template.evaluations)

        def backwards(fn: Callable, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
            nonlocal at
            at -= 1
            evaluation: Any = Evaluated(fn, (template.evaluations[at][0].given_to(state), *args), kwargs)
            return evaluation.at(evaluation.tensors) if evaluate is None else evaluate(at, evaluation)

        shared = tuple(partial(backwards, fn) for fn in template.shared)
        came = tree.tensors(template.inverse(*shared, template.y.join(sources), *args, **kwargs))
        if len(came) != len(template.like):
            raise ReplayError(f"the inverse gives {len(came)} tensors, where x has {len(template.like)}. {CHANGES}")
        return [
            like.checked(t, i, self.call.names) for i, (like, t) in enumerate(zip(template.like, came, strict=True))
        ]


class StraightLevelBlock(LevelBlock):
    """The slots of such a call."""

    gathers = True


class StraightForward(Forward):
    """What the node of such a call computes, at the level of a `grad`."""

    _maps: StraightMaps

    def __init__(self, maps: StraightMaps, count: int, level: int, given: Tensors) -> None:
        super().__init__(maps, count)
        self.level, self._given = level, given

    def apply(self, tensors: Tensors, ctx: Any) -> tuple[torch.Tensor, ...]:
        """The outputs, at the level, of tensors of the level, which were given without their wrappers."""
        given, self._given = self._given, ()
        xs, rest = given[: self._count], given[self._count :]
        with plainly():
            ctx.block = StraightLevelBlock(self._maps, rest)
            found = self._maps.forward(xs, rest)
            ys = [t.view_as(t) if any(t is other for other in given) else t for t in found]
            ghosts = [x.new_zeros(()).expand(x.shape) for x in xs]
        ys, ghosts = ([wrapped_at(t, self.level) for t in ts] for ts in (ys, ghosts))
        ctx.block.connect(tensors[: self._count], ys, [ctx.metadata] * len(ys), xs)
        ctx.save_for_backward(*ghosts, *tensors[self._count :])
        return *ys, *ghosts

    def step(self, ctx: Any, of: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None] | None:
        """The gradients of the inputs; None where something else than the `grad` is around."""
        number = len(of) - self._count
        if has_ended(ctx.saved_tensors[0]):  # another transform may have the number of that one now
            return None
        gs = self._plain([g for g in of[:number] if g is not None])
        if gs is None or any(g is not None for g in of[number:]):
            return None
        needs = ctx.needs_input_grad[1:]
        given, wanted = (
            [i for i, there in enumerate(which) if there] for which in ([g is not None for g in of], needs)
        )
        idle, block, call = set[int](), ctx.block, self._maps.call
        with torch.enable_grad(), call.named():
            rest = _bare(block.arguments())
            xs = block.xs()
            sources = [] if xs is not None else _bare(fetch(block.sources))
            with plainly():
                call.unchanged()
                xs = None if xs is None else _bare(xs)
                xs, found = _stepped(self._maps, xs, sources, rest, gs, (wanted, given, idle))
                if sources:
                    block.give_back_and_tell(xs)
        values = {i: g for i, g in zip(wanted, found, strict=True) if i not in idle}
        outputs = self._wrapped(list(values.values()), ctx.saved_tensors[wanted[0]])
        by_place = dict(zip(values, outputs, strict=True))
        return [by_place.get(i) for i in range(len(needs))]

    def _wrapped(self, gradients: Tensors, of: torch.Tensor) -> Sequence[torch.Tensor]:
        """Gradients at the level, which are not differentiated there once more."""
        if torch.is_grad_enabled() and gradients:
            return _Once.at_level(self.level, gradients, of)
        return [wrapped_at(g, self.level) for g in gradients]

    def _plain(self, tensors: Tensors) -> list[torch.Tensor] | None:
        """The tensors without their wrappers, where nothing but the `grad` is around them and us."""
        found = [bare_at(t, self.level) for t in tensors]
        plain = [t for t in found if t is not None]
        return plain if len(plain) == len(tensors) and only_level() == self.level else None


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
    maps: StraightMaps,
    xs: Tensors | None,
    sources: Tensors,
    rest: Tensors,
    gs: Tensors,
    asked: tuple[Sequence[int], Sequence[int], set[int]],
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """x and the gradients, as `maps.unwound` has them, of plain tensors."""
    (wanted, given, idle), count = asked, len(maps.call.template.like)
    if xs is None and maps.call.template.shared and sum(t.numel() for t in sources) >= thresholds.MERGED:
        level = _entered, _edge, torch.Tensor.detach
        shared = Shared(level, among([t for i, t in enumerate(rest, count) if i not in wanted]), False)
        xs = [x.detach() for x in maps.inverse(sources, rest, shared.evaluate)]

        def forward(tensors: Tensors) -> list[torch.Tensor]:
            return maps.forward(tensors[:count], tensors[count:], shared.recall)

        return xs, pulled_back(forward, [*xs, *rest], gs, asked, level, shared.gradients)
    if xs is None:
        with torch.no_grad():
            xs = maps.inverse(sources, rest, None)
    inputs = [*xs, *rest]
    for i in wanted:
        inputs[i] = _entered(inputs[i])
    ys = maps.forward(inputs[:count], inputs[count:])
    ends = [(ys[i], g) for i, g in zip(given, gs, strict=True) if ys[i].requires_grad]
    leaves = [inputs[i] for i in wanted]
    found = gradients([y for y, _ in ends], [g for _, g in ends], leaves) if ends else [None] * len(wanted)
    idle.update(i for i, g in zip(wanted, found, strict=True) if g is None)
    return list(xs), [inputs[i] if g is None else g for i, g in zip(wanted, found, strict=True)]


def _entered(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_()


def _edge(x: torch.Tensor) -> torch.autograd.graph.GradientEdge | torch.Tensor | None:
    return None if not x.requires_grad else x if x.is_leaf else torch.autograd.graph.get_gradient_edge(x)


class NodeSeries:
    """Calls one after the other, each of which is one node.

    Args:
        x: the state before them.
    """

    def __init__(self, x: Any) -> None:
        self.state, self.count = x, 0
        self.flat = tree.flatten(x)
        self._level = only_level() or 0

    def goes_on(self, found: Found, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Evaluate one more, if all that it is given is plain beside the level."""
        tensors = [*found.xs, *found.rest]
        plain = [bare for t in tensors if (bare := bare_at(t, self._level)) is not None]
        if len(plain) < len(tensors):
            return False
        op = StraightForward(StraightMaps(StraightCall(found)), len(found.xs), self._level, plain)
        outputs = _Straight.at_level(op, *tensors)
        self.state = found.template.y.join(outputs[: len(outputs) - len(found.xs)])
        self.flat, self.count = tree.flatten(self.state), self.count + 1
        return True

    def ends(self) -> tuple[Any, int]:
        """The state behind them, and how many they are."""
        return self.state, self.count
