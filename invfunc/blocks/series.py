"""Calls of blocks, one after the other, in the way that saves memory where there is memory to save.

Many equal steps on a small state are one node of autograd, where nodes would take more memory than states. The first
step is a block as any other, and shows what the others do: they are one node if it drew nothing, wrote no buffers, and
read no tensor that needs a gradient but those that are known.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import torch

from invfunc import tree
from invfunc._torch import functorch
from invfunc._torch.values import differentiable
from invfunc.blocks.held import HERE
from invfunc.blocks.link import WRITTEN, Holder, Like, Link, Slot, Step, depth_of, slot_of
from invfunc.blocks.looks import compare, looked_at
from invfunc.blocks.run import BlockRun
from invfunc.blocks.surroundings import Closed, Surroundings, drew, swapped
from invfunc.core.run import Run
from invfunc.errors import ModifiedError
from invfunc.operations.forms import TwiceDifferentiable
from invfunc.pairs.value import read as there

MANY = 8
"""The number of steps from which on they may be one node."""
SMALL = 2**16
"""The bytes of a state up to which they may: above, an evaluation costs more than nodes."""
AT_ONCE = 2**18
"""The bytes of what autograd saves in steps that go backwards in one pass: a fifth faster than one by one."""
_MOST = 1000
"""The nodes of a step that are looked at."""


def alike(steps: Sequence[Step], x: Any) -> bool:
    """Tells whether these are many equal steps on a small state, with nobody who looks on."""
    if sum(t.nbytes for t in tree.tensors(x)) > SMALL:
        return False
    first = steps[0][0]
    if any(block is not first for block, *_ in steps) or not isinstance(first.check, str) or first.pair.hidden:
        return False
    inside = functorch.dispatched() or functorch.saving_hooks() or functorch.levels() or functorch.listening()
    draws = any([isinstance(x, torch.Generator) for _, args, kwargs in steps for x in (*args, *kwargs.values())])
    return not (first.keep or HERE.noted or inside or draws)


def as_one(steps: Sequence[Step], before: Any, run: BlockRun, x: Any) -> Any:
    """The state behind some steps, of which the first one was a run; None if the others cannot be one node.

    Args:
        steps: the steps.
        before: the state before the first one.
        run: the run of the first one.
        x: the state behind it.
    """
    (link,), (xs, form) = run.links, tree.separate(x)
    known, closed = link.block.known, link.around.closed
    same = form == link.form and [(t.shape, t.dtype) for t in xs] == [(t.shape, t.dtype) for t in link.like]
    quiet = link.states is None and not (link.around.buffers or link.around.casts or known.differentiates)
    if not (same and quiet) or any(m.training for m in closed.norms):
        return None
    if not _reads_only(xs, [*tree.tensors((before, *steps[0][1:])), *closed.tensors()]):
        return None
    saved = sum([shape.numel() * dtype.itemsize for shape, dtype in run.like])
    found = _Steps(link, steps, x, max(1, min(MANY, AT_ONCE // max(1, saved))))
    drawn = run.draws.states()
    if not found.forward() or drew(drawn, run.draws.states()):
        found.around.undo()
        run.draws.put(drawn)
        return None
    ys = list(_StepsNode.apply(found, *found.xs, *found.needing)[: found.number])
    found.ends(ys)
    return form.join(ys)


def _reads_only(ys: Sequence[torch.Tensor], known: Sequence[torch.Tensor]) -> bool:
    """Tells whether some tensors alone have a gradient of what was computed from them."""
    leaves, ends = {id(t) for t in known}, {t.grad_fn for t in known}
    waiting, seen = [t.grad_fn for t in ys], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or node in ends:
            continue
        seen.add(node)
        if len(seen) > _MOST or id(getattr(node, "variable", ys[0])) not in {*leaves, id(ys[0])}:
            return False
        waiting += [n for n, _ in node.next_functions]
    return True


class _Steps(Holder):
    """Steps that are one node.

    Args:
        link: the step before them.
        steps: that step and the steps.
        x: the state before them.
        span: how many of them go backwards in one pass.
    """

    def __init__(self, link: Link, steps: Sequence[Step], x: Any, span: int) -> None:
        self.span = span
        self.block, self._names = link.block, link.names()
        self.xs, self.form = tree.separate(x)
        self._like = [Like(torch.empty_like(t)) for t in self.xs]  # expanded in one step, full in the next
        self.number, self.count = len(self.xs), len(steps) - 1
        self.around = Surroundings(self.block.known.closed(self.block.pair), False, steps[0])
        steps = steps[1:]
        rest, self._args = tree.separate([given for _, *given in steps])
        unique = {id(t): t for t in rest}
        places = {key: i for i, key in enumerate(unique)}
        self._places = [places[id(t)] for t in rest]
        self._asked = [i for i, t in enumerate(unique.values()) if t.requires_grad]
        self._given = [t if t.grad_fn is None else t.detach() for t in unique.values()]
        self._versions = functorch.versions(self._given)
        self._slots = [slot_of(t, []) for t in self.xs]
        self._looks = looked_at(self.xs) if self.block.check != "off" else None
        self.needing = [*(t for t in unique.values() if t.requires_grad), *self._closes_over(self.around.closed)]
        """The tensors beside the state that need a gradient."""
        self.ys: list[torch.Tensor] = []

    def _closes_over(self, of: Closed) -> list[torch.Tensor]:
        """The tensors that need a gradient among those that the first step has read."""
        closed = of.tensors()
        self._closed = [i for i, t in enumerate(closed) if t.requires_grad]
        read = {id(closed[i]): closed[i] for i in self._closed}  # tied weights stand in several places
        places = {key: i for i, key in enumerate(read)}
        self._tied = [places[id(closed[i])] for i in self._closed]
        self._read = [t if t.grad_fn is None else functorch.leaf_at(t, True) for t in read.values()]
        self._others = len(of.all) > len(closed) and any(t.requires_grad for t in map(there, of.standing()))
        """True if others may read tensors that need a gradient and that it did not read."""
        return [*read.values()]

    def _steps(self, given: Sequence[torch.Tensor]) -> list[tuple[tuple, dict[str, Any]]]:
        """The further arguments of each step."""
        return self._args.join([given[i] for i in self._places])

    def forward(self) -> bool:
        """Compute the state behind the steps; False if they do more than the first one: write buffers, or read other
        tensors that need a gradient."""
        xs, pair = [t.detach() for t in self.xs], self.block.pair
        known = [*self._given, *self.around.closed.tensors()] if self._others else []
        for args, kwargs in self._steps(self._given):
            with torch.set_grad_enabled(self._others):
                ys = tree.tensors(pair.forward(*pair.shared, self.form.join(xs), *args, **kwargs))
            if self._others and not _reads_only(ys, known):
                return False
            xs = [t.detach() for t in ys]
        self.around.called()
        self.ys = xs
        return not self.around.buffers

    def ends(self, ys: Sequence[torch.Tensor]) -> None:
        """Take the state before the steps over, and let the next call do so with that behind them."""
        self.outs = [Slot(t, depth_of(self._slots) + self.count) for t in ys]
        for t, slot in zip(ys, self.outs, strict=True):
            slot.note(t, held=False)
        self.take_over(self._slots)
        self.xs, self._slots, self.needing = [], [], []

    def back(self, ys: list[torch.Tensor]) -> list[torch.Tensor]:
        return self._pulled_back(ys, None)[0]

    def gradients(self, gs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the state before the steps and of all that needs one, from those of the state behind them."""
        xs, found = self._pulled_back(self.output(), [*gs])
        self.fill(xs)
        return found

    def _pulled_back(self, ys: list[torch.Tensor], gs: list | None) -> tuple[list[torch.Tensor], list]:
        pair, state = self.block.pair, ys
        if functorch.versions(self._given) != self._versions:
            raise ModifiedError(WRITTEN)
        given = [functorch.leaf_at(t, i in self._asked) for i, t in enumerate(self._given)]
        read = [functorch.leaf_at(t, True) if functorch.hooked([t]) else t for t in self._read]  # who see the sum
        total = dict[int, torch.Tensor | None].fromkeys(map(id, (*(given[i] for i in self._asked), *read)))
        with functorch.plainly(), self.around.again(), self._reading(read):
            steps = self._steps(given)
            for end in range(len(steps), 0, -self.span):
                span = steps[max(0, end - self.span) : end]
                with torch.no_grad():
                    for args, kwargs in reversed(span):
                        found = tree.tensors(pair.inverse(*pair.shared, self.form.join(state), *args, **kwargs))
                        state = [like.laid_out(t) for t, like in zip(found, self._like, strict=True)]
                if gs is None:
                    continue
                leaves = [functorch.leaf_at(t, differentiable(t)) for t in state]  # any may need a gradient
                x = self.form.join(leaves)
                with torch.enable_grad():
                    for args, kwargs in span:
                        x = pair.forward(*pair.shared, x, *args, **kwargs)
                own = {id(t): t for t in (*leaves, *tree.tensors(tuple(span)), *read) if t.requires_grad}
                outs = tree.tensors(x)
                of = dict(zip(own, _gradients(outs, [*own.values()], gs), strict=True))
                gs = [of.pop(id(t), None) for t in leaves]
                for key, g in of.items():
                    before = total[key]
                    total[key] = g if before is None else before if g is None else before + g
        if self._looks is not None:
            compare(self.block, self._looks, state, self._names, ys)
        return state, [*(gs or ()), *total.values()]

    def _reading(self, tensors: Sequence[torch.Tensor]) -> AbstractContextManager:
        """A context in which the steps read these in place of what they close over."""
        return swapped([self.around.places[i] for i in self._closed], [tensors[i] for i in self._tied])

    def again(self, saved: Sequence[torch.Tensor], gs: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients with a graph, from steps that are blocks."""
        xs = self._pulled_back(self.output(), None)[0]
        own = [t.view_as(t) for t in saved]  # behind which no gradient goes on, through the ghosts to the others
        ghosts, needing = own[: self.number], own[self.number :]
        xs = [x + ghost if ghost.requires_grad else x for x, ghost in zip(xs, ghosts, strict=True)]
        given = [*self._given]
        for i, t in zip(self._asked, needing, strict=False):
            given[i] = t
        state = self.form.join(xs)
        with self._reading(needing[len(self._asked) :]):
            for args, kwargs in self._steps(given):
                state = self.block(state, *args, **kwargs)
        asked = [t for t in ghosts if t.requires_grad] + needing
        of = iter(_gradients(tree.tensors(state), asked, gs, create_graph=True))
        return [*(next(of) if t.requires_grad else None for t in ghosts), *of]


def _gradients(outs: Sequence[torch.Tensor], inputs: list, gs: Sequence[Any], create_graph: bool = False) -> Any:
    """Gradients of those outputs that have any."""
    ends = [(t, g) for t, g in zip(outs, gs, strict=True) if g is not None and t.requires_grad]
    if not ends or not inputs:
        return [None] * len(inputs)
    outs, gs = zip(*ends, strict=True)
    return functorch.gradients_of(outs, gs, inputs, create_graph)


class _StepsNode(torch.autograd.Function):
    """The state behind steps, and ghosts of that before them: zeros without memory, which stand for it where a gradient
    is differentiated."""

    @staticmethod
    def forward(ctx: Any, steps: _Steps, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ys, steps.ys = steps.ys, []
        ghosts = [x.new_zeros(()).expand(x.shape) for x in tensors[: steps.number]]
        ctx.set_materialize_grads(False)
        ctx.mark_non_differentiable(*(y for y in ys if not differentiable(y)))
        ctx.steps = steps
        ctx.save_for_backward(*ghosts, *tensors[steps.number :])
        return *ys, *ghosts

    @staticmethod
    def backward(ctx: Any, *gs: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        steps, saved = ctx.steps, ctx.saved_tensors  # whose versions autograd compares
        of_ys, of_ghosts = gs[: steps.number], gs[steps.number :]
        found: list[torch.Tensor | None] = [None] * len(saved)
        if any(g is not None for g in of_ys):
            found = steps.again(saved, of_ys) if torch.is_grad_enabled() else steps.gradients(of_ys)
        for i, g in enumerate(of_ghosts):
            if g is not None:
                found[i] = g if (own := found[i]) is None else own + g
        return None, *found


@dataclass
class Known:
    """Facts about a block from its calls. A copy of the block has its own."""

    first: bool = True
    """True if it was not called yet."""
    warned: bool = False
    """True if it has told of an inexact inverse."""
    differentiates: bool = False
    """True if f goes backwards itself, by torch.autograd."""
    uses_torch_func: bool = False
    _closed: tuple[Any, Closed] | None = None

    def __deepcopy__(self, memo: dict) -> Known:
        return Known()

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def closed(self, pair: Any) -> Closed:
        """Tensors and modules that the functions of a pair close over."""
        found = self._closed
        if found is None or found[0] is not pair or found[1].moved():
            found = self._closed = pair, Closed((pair.forward, pair.inverse, *pair.shared))
        return found[1]


_ASKS, _LAYOUT, _STRIDED = attrgetter("requires_grad"), attrgetter("layout"), {torch.strided}


def in_series(steps: Sequence[Step], x: Any) -> tuple[Any, list[tuple]]:
    """The state behind some blocks, and what each of them hides; function modes see the calls of the blocks alone."""
    if not functorch.listening():
        return _in_series(steps, x, False)
    if functorch.under(Run, lambda run: not run.frees):  # it keeps what the blocks read
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
        run = BlockRun(level, seen)
        try:
            before, (x, more) = x, run.forward(rest[: 1 if one else count], x)
            hidden += more
            if one and (y := as_one(rest[:count], before, run, x)) is not None:
                x, more = y, [()] * (count - 1)
            elif one:
                run = BlockRun(level, seen)
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
            run.draws.put(run.first_states)
    return x, hidden


def _differs(block: Any, first: Any) -> bool:
    """Tells whether a block cannot be in one run with the first one."""
    return block.known.uses_torch_func or block.preserve_rng_state != first.preserve_rng_state or bool(block.min_bytes)


def _level(steps: Sequence[Step], x: Any) -> int | None:
    """The level of torch.func at which alone there is a graph, 0 for plain autograd; None if there is no memory to
    save: without gradients, in forward mode, at several levels, or below `min_bytes`."""
    (block, args, kwargs), xs = steps[0], [x] if type(x) is torch.Tensor else tree.tensors(x)
    if not torch.is_grad_enabled() or block.known.uses_torch_func or torch.is_inference_mode_enabled():
        return None
    if not xs or {*map(_LAYOUT, xs)} != _STRIDED or functorch.under(Run, lambda run: not run.frees):
        return None
    if block.min_bytes and sum(t.nbytes for t in xs) < block.min_bytes:
        return None
    if not any(map(_ASKS, xs)) and not any(map(functorch.needs_grad, xs)) and not any(map(_needs, steps)):
        return None
    if functorch.under(TwiceDifferentiable) and functorch.saving_hooks() is None:  # what a statistic writes out
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
    """Tells whether a block reads something beside x that needs a gradient."""
    block, args, kwargs = step
    given = tree.tensors((args, kwargs)) if args or kwargs else ()
    return any(functorch.needs_grad(t) for t in (*given, *block.known.closed(block.pair).tensors()))
