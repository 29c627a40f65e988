"""Calls of blocks, one after the other, in the way that saves memory where there is memory to save."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from invfunc import tree
from invfunc._torch import functorch
from invfunc._torch.generators import set_states
from invfunc.blocks.closed import Closed
from invfunc.blocks.equal_steps import MANY, alike, as_one
from invfunc.blocks.link import Step
from invfunc.blocks.run import Run
from invfunc.core.run import Run as CoreRun
from invfunc.operations.second_derivatives import TwiceDifferentiable


@dataclass
class Known:
    """What is known of a block from its calls. A copy of the block has its own."""

    first: bool = True
    """Whether it was not called yet."""
    warned: bool = False
    """Whether it has told of an inexact inverse."""
    differentiates: bool = False
    """Whether f goes backwards itself, by torch.autograd."""
    uses_torch_func: bool = False
    _closed: tuple[Any, Closed] | None = None

    def __deepcopy__(self, memo: dict) -> Known:
        return Known()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def closed(self, pair: Any) -> Closed:
        """What the functions of a pair close over."""
        found = self._closed
        if found is None or found[0] is not pair or found[1].moved():
            found = self._closed = pair, Closed((pair.forward, pair.inverse, *pair.shared))
        return found[1]


_ASKS, _LAYOUT, _STRIDED = attrgetter("requires_grad"), attrgetter("layout"), {torch.strided}


def in_series(steps: Sequence[Step], x: Any) -> tuple[Any, list[tuple]]:
    """The state behind some blocks, and what each of them hides; function modes see the calls of the blocks alone."""
    if not functorch.listening():
        return _in_series(steps, x, False)
    if functorch.under(CoreRun, lambda run: not run.frees):  # it keeps what the blocks read
        return _in_series(steps, x, False)
    with functorch.unwatched():
        return _in_series(steps, x, True)


def _in_series(steps: Sequence[Step], x: Any, seen: bool) -> tuple[Any, list[tuple]]:
    hidden: list[tuple] = []
    while len(hidden) < len(steps):
        rest = steps[len(hidden) :]
        level = _level(rest, x)
        if level is None:
            block, args, kwargs = rest[0]
            with functorch.watched() if seen else nullcontext():
                y = block.pair.forward(*block.pair.shared, x, *args, **kwargs)
            x, own = block.pair.apart(y)
            hidden.append(own)
            continue
        differing = (i for i, (block, *_) in enumerate(rest) if i and _differs(block, rest[0][0]))
        count = 1 if len(rest) == 1 else next(differing, len(rest))
        one = level == 0 and count > MANY and alike(rest[1:count], x)
        run = Run(level, seen)
        try:
            before, (x, more) = x, run.forward(rest[: 1 if one else count], x)
            hidden += more
            if one and (y := as_one(rest[:count], before, run, x)) is not None:
                x, more = y, [()] * (count - 1)
            elif one:
                run = Run(level, seen)
                x, more = run.forward(rest[1:count], x)
            hidden += more if one else []
        except TypeError as error:
            vars(error)["at"] = len(hidden) + len(run.links) - 1  # for a chain to name the block
            raise
        except RuntimeError as error:
            if "saved tensor hooks" not in str(error) or not run.links:
                raise
            run.undo()  # f uses torch.func, which refuses hooks: it is taken as it is
            run.links[-1].block.known.uses_torch_func = True
            set_states(zip(run.generators, run.first_states or (), strict=False))
    return x, hidden


def _differs(block: Any, first: Any) -> bool:
    """Whether a block cannot be in one run with the first one."""
    return block.known.uses_torch_func or block.preserve_rng_state != first.preserve_rng_state or bool(block.min_bytes)


def _level(steps: Sequence[Step], x: Any) -> int | None:
    """The level of torch.func at which alone there is a graph, 0 for plain autograd; None if there is no memory to
    save: without gradients, in forward mode, at several levels, or below `min_bytes`."""
    (block, args, kwargs), xs = steps[0], [x] if type(x) is torch.Tensor else tree.tensors(x)
    if not torch.is_grad_enabled() or block.known.uses_torch_func or torch.is_inference_mode_enabled():
        return None
    if not xs or {*map(_LAYOUT, xs)} != _STRIDED or functorch.under(CoreRun, lambda run: not run.frees):
        return None
    if block.min_bytes and sum(t.nbytes for t in xs) < block.min_bytes:
        return None
    if not any(map(_ASKS, xs)) and not any(map(functorch.needs_grad, xs)) and not any(map(_needs, steps)):
        return None
    if (
        functorch.under(TwiceDifferentiable) and functorch.saving_hooks() is None
    ):  # a statistic writes out what is differentiated twice
        return None
    if not (functorch.transforming() or functorch.dual_level()):
        return 0
    given = *xs, *tree.tensors((args, kwargs)), *block.known.closed(block.pair).tensors()
    return None if functorch.dual(*given) else _only_level(given) if functorch.levels() else 0


def _only_level(given: Sequence[torch.Tensor]) -> int | None:
    """The level inside of torch.func at which alone some tensors have a graph, if there is one."""
    around = functorch.levels()
    grads = [level for kind, level in around if kind == "grad"]
    if len(grads) > 1 or any(kind not in ("grad", "vmap") for kind, _ in around):
        return None
    level = grads[0] if grads else 0
    other = ((of := functorch.recorded(t)).requires_grad and (functorch.level_of(of) or 0) != level for t in given)
    return None if any(map(functorch.tracked_below, given)) or any(other) else level


def _needs(step: Step) -> bool:
    """Whether a block reads something beside x that needs a gradient."""
    block, args, kwargs = step
    given = tree.tensors((args, kwargs)) if args or kwargs else ()
    return any(functorch.needs_grad(t) for t in (*given, *block.known.closed(block.pair).tensors()))
