"""Blocks one after the other in one call, whose graph is that of f itself and saves nothing.

Hooks give autograd numbers in place of the tensors that it saves. When it asks for the first one of a block, the input
of the block is computed from its output, f runs once more, and what autograd saves then is handed out. Between runs the
states are in slots, which the next run takes over; within one they are nowhere.

Inside of torch.func it is the same where one `grad` alone has a graph: the hooks are let in there, and the level is
entered again where it has ended.
"""

from __future__ import annotations

import threading
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from types import EllipsisType
from typing import Any
from weakref import ref

import torch

from invfunc import tree
from invfunc._torch.functorch import (
    Level,
    alive,
    backward_by_torch_func,
    graphless_node,
    is_batched,
    needs_grad,
    pop_hooks,
    push_hooks,
    saving_hooks,
    storage_of,
    tracked_below,
    under,
    untraced,
    unwatched,
    version,
    versions,
)
from invfunc._torch.values import differentiable
from invfunc.blocks.closed import Reading
from invfunc.blocks.link import Enter, Evaluation, Link, Step, Tensors
from invfunc.blocks.looks import EVERY, compare, looked_at
from invfunc.blocks.rounding import relative_error
from invfunc.blocks.slots import Holder, Slot, depth_of, slot_of
from invfunc.blocks.states import HERE, note, note_kept
from invfunc.blocks.surroundings import (
    States,
    Surroundings,
    drawing,
    drew,
    generators_of,
    kinds_of,
    put_states,
    states_of,
)
from invfunc.errors import InverseError, InvFuncError, ModifiedError, ReplayError
from invfunc.operations.heard import Followed
from invfunc.core.run import Run as CoreRun
from invfunc.recording.trace import Trace
from invfunc.transform import told


class _Enough(BaseException):
    """All that is needed has been saved."""


class _Saved:
    """What autograd gets in place of a tensor: its number, and the tensor as long as its block has not ended."""

    __slots__ = ("number", "value", "version")

    def __init__(self, number: int, value: torch.Tensor) -> None:
        self.number, self.version = number, version(value)
        self.value: Any = value


class _Collected:
    """What autograd saves in an evaluation once more, which has to be like what it has saved.

    Args:
        like: the shapes and dtypes of that.
        stop: whether to end when all of it has been saved.
    """

    __slots__ = ("like", "stop", "saved")

    def __init__(self, like: list[tuple[torch.Size, torch.dtype]], stop: bool) -> None:
        self.like, self.stop = like, stop
        self.saved: Tensors = []

    @untraced
    def pack(self, t: torch.Tensor) -> int:
        """The number of a tensor among those that are saved."""
        n, count = len(self.saved), len(self.like)
        if n == count or (t.shape, t.dtype) != self.like[n]:
            then = "one more than before" if n == count else f"where it was {list(self.like[n][0])} {self.like[n][1]}"
            raise ReplayError(_OTHER.format(f"a tensor of shape {list(t.shape)} {t.dtype}, {then}"))
        self.saved.append(t.detach() if t.requires_grad else t)
        if self.stop and n + 1 == count:
            raise _Enough
        return n

    def given_back(self, tensor: torch.Tensor) -> None:
        """Nothing, as no statistic records it; it has seen the first evaluation."""


class Run(Holder):
    """Blocks one after the other in one call.

    Args:
        level: the level of torch.func at which there is a graph; 0 for plain autograd.
        seen: a context in which function modes see the calls of the blocks, as they do not see those of the run.
    """

    def __init__(self, level: int, seen: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self._level, self._seen = Level(level), seen
        self._forms = Followed if under((Trace, CoreRun)) else nullcontext
        self.links: list[Link] = []
        self._starts: list[int] = []
        self._like: list[tuple[torch.Size, torch.dtype]] = []
        """What autograd has saved was like, in order."""
        self._live: list[_Saved] = []
        """What it has saved of the block that is running."""
        self._form: tree.Form | None = None
        """That of the state behind the last block."""
        self._now: int | None = None
        """The link whose saved tensors are at hand."""
        self._saved: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        """Their versions when they were computed again."""
        self._left = 0
        """How many of them autograd has not asked for yet."""
        self._state: tuple[int, Tensors] | None = None
        """A state between the links, and the number of links before it."""
        self._lock: Any = None
        self._origin: list[tuple[ref[torch.Tensor], int]] = []
        """x where no block gave it out: the caller may hold it."""
        self._done = False
        self.gathering: list[Any] = []

    # Forwards

    def forward(self, steps: Sequence[Step], x: Any) -> tuple[Any, list[tuple]]:
        """The state behind the blocks, and what each of them hides.

        It ends behind a block that has a graph at a level below that of the run too: there nothing is freed.
        """
        xs, form = tree.separate(x)
        slots = [slot_of(t, self.gathering) for t in xs]
        depth = depth_of(slots)
        self._lock = next((slot.lock for slot in slots if slot is not None), None) or threading.RLock()
        replays, kinds = steps[0][0].preserve_rng_state, kinds_of(xs)
        self.generators = generators_of(xs, steps) if replays else []
        states = self.first_states = states_of(self.generators) if replays else None
        if not any(slots):
            self._origin = [*zip(map(ref, xs), versions(xs), strict=True)]
        hidden: list[tuple] = []
        before = xs, form
        for k, step in enumerate(steps):
            link = self._begun(step, xs, form, depth + k)
            known = link.block.known
            link.around, link.states = Surroundings(known.closed(link.pair), kinds, known.first, step), states
            x, link.hidden = link.pair.apart(self._first(link, step, x))
            hidden.append(link.hidden)
            states = self._ended(link, states)
            before, (xs, form) = (xs, form), tree.separate(x)
            if self._level.number and any(map(tracked_below, xs)):
                self.links.pop()
                self._starts.pop()
                self._close(slots, *before, depth)
                return x, hidden
            self._form = form
            self._free()
            if k + 1 < len(steps):
                note(link.block, depth + k, x, before[0], None)
            self._check(link, before[0], xs)
        self._close(slots, xs, form, depth)
        note(self.links[-1].block, depth + len(steps) - 1, x, before[0], [*self.outs])
        return x, hidden

    def _begun(self, step: Step, xs: Tensors, form: tree.Form, number: int) -> Link:
        """A link, with what stays of x."""
        link = Link(step, xs, form, len(self._like))
        self.links.append(link)
        self._starts.append(link.start)
        link.kept = {i: Slot(xs[i]) for i in link.block.kept(len(xs))}
        if link.kept:
            note_kept(xs, link.kept)
        if link.block.check != "off" and number % EVERY == 0 and len(link.kept) < len(xs):
            with unwatched():
                link.looks = looked_at(xs, link.kept)
                if link.looks and link.pair.carries_a_sum:  # from which nothing is computed
                    link.looks[-1] = None
        return link

    def _first(self, link: Link, step: Step, x: Any) -> Any:
        """The first evaluation of a block."""
        _, args, kwargs = step
        closed, key = link.around.closed, link.around.key
        shared = [partial(self._evaluate, link, fn) for fn in link.pair.shared]
        xs = tree.tensors(x)
        before = versions(xs)
        was = push_hooks(self.pack, self.unpack)
        try:
            with nullcontext() if closed.learned(key) else Reading() as reading, self._seen():
                y = link.pair.forward(*shared, x, *args, **kwargs)
            if reading is not None:
                closed.learn(reading.read, key)
        finally:
            pop_hooks(was)
        if versions(xs) != before:
            raise ModifiedError(_WRITES)
        return y

    def _evaluate(self, link: Link, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        """The first evaluation of a shared function."""
        if link.evaluations and link.around.buffers:
            link.around.mark()
        if _single(args, kwargs):
            given = args[:1]
        else:
            own = {id(t) for t in link.own}
            given = [t for t in tree.tensors((args, kwargs)) if id(t) not in own]
        states = states_of(self.generators) if self.generators else None
        evaluation = Evaluation(fn, len(self._like), given, states)
        link.evaluations.append(evaluation)
        result = fn(*args, **kwargs)
        evaluation.end = len(self._like)
        return result

    def _ended(self, link: Link, states: States | None) -> States | None:
        """Note how the world is behind a block; gives the states of the generators."""
        if states is not None:
            after = states_of(self.generators)
            if not drew(states, after):
                link.states = None
                for evaluation in link.evaluations:
                    evaluation.states = None
            states = after
        link.around.called()
        link.own, link.end, link.block.known.first = (), len(self._like), False
        link.hidden = tree.map_tensors(torch.Tensor.detach, link.hidden) if link.hidden else ()
        return states

    def _free(self) -> None:
        """Let go of what autograd has saved of a block."""
        for saved, now in zip(self._live, versions([saved.value for saved in self._live]), strict=True):
            if now != saved.version:
                saved.version = -1  # an error if autograd asks for it, as it does not for what had no gradient
            saved.value = None
        self._live = []

    def _close(self, slots: Sequence[Slot | None], xs: Tensors, form: tree.Form, depth: int) -> None:
        """Take the state before the blocks over, and let the next call do so with that behind them."""
        self._live, self._form, self._done, self.first_states = [], form, True, None
        if not self.links:
            return
        with unwatched():
            hooks = None if any(map(is_batched, xs)) else saving_hooks()
            self.outs = [Slot(t, depth + len(self.links), hooks, self._lock) for t in xs]
            own: ref[Holder] = ref(self)
            for t, slot in zip(xs, self.outs, strict=True):
                slot.owner = own
                slot.note(t, held=bool(HERE.noted))
        kept = self.links[0].kept
        self.take_over([None if i in kept else slot for i, slot in enumerate(slots)])

    def _check(self, link: Link, xs: Tensors, ys: Tensors) -> None:
        """Compare all entries of x with what the inverse gives, where that is asked for."""
        tolerance = link.block.tolerance(xs)
        if tolerance is None or len(link.kept) == len(xs):
            return
        looks, link.looks = link.looks, None
        with self._entered() as (enter, leave, _), self._seen():
            back = self._inverted(link, [t.detach() for t in ys], enter, None)
        link.looks = looks
        for name, x, came in zip(link.names(), xs, map(leave, back), strict=True):
            error = relative_error(came, x)
            if not error <= tolerance:
                raise InverseError(
                    f"the inverse gives {name} of shape {list(x.shape)} back with an error of {error:.1e} of its "
                    f"largest entry, where {tolerance:.1e} is tolerated (check=)."
                )

    @untraced
    def pack(self, t: torch.Tensor) -> _Saved:
        """What autograd gets in place of a tensor."""
        self._like.append((t.shape, t.dtype))
        saved = _Saved(len(self._like) - 1, t)
        self._live.append(saved)
        return saved

    def given_back(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """A function that computes a saved tensor again, for a statistic that records f; None if it was not saved."""
        for saved in reversed(self._live):
            t = saved.value
            if storage_of(t) == storage_of(tensor) and t.numel() == tensor.numel():
                same = t.shape == tensor.shape and t.stride() == tensor.stride()
                if same or (t.is_contiguous() and tensor.is_contiguous()):
                    return partial(self._fetched, saved.number, tensor.shape)
        return None

    def _fetched(self, n: int, shape: torch.Size) -> torch.Tensor:
        with self._lock:
            return self._found(n).reshape(shape)

    def undo(self) -> None:
        """Take back what the blocks have written to buffers."""
        for link in reversed(self.links):
            link.around.undo()

    # Backwards

    @untraced
    def unpack(self, saved: _Saved) -> torch.Tensor:
        """The tensor in whose place something was given."""
        if saved.value is not None:
            return self._still_there(saved, saved.value)
        if saved.version < 0:
            raise self._late(saved.number)
        with self._lock:
            found = self._found(n := saved.number)
            self._saved[n - self._starts[self._now or 0]] = None
            self._left -= 1
            if self._now == 0 and not self._left:
                self.release()
        if self._level.running and torch.is_grad_enabled() and backward_by_torch_func():
            graphless_node()  # nobody can differentiate once more at this level
        return found

    def _still_there(self, saved: _Saved, value: torch.Tensor) -> torch.Tensor:
        """A tensor that was not freed: f itself goes backwards, or two levels have a graph."""
        if not self._done:
            self.links[-1].block.known.differentiates = True
        if version(value) != saved.version:
            raise ModifiedError(_LATE.format(list(value.shape)))
        return value

    def _found(self, n: int) -> torch.Tensor:
        k = bisect_right(self._starts, n) - 1
        found = self._saved[n - self._starts[k]] if self._now == k else None
        if found is not None and version(found) != self._versions[n - self._starts[k]]:
            raise self._late(n)
        if found is None:
            with self._telling(self.links[k]):
                self._restore(k)
            found = self._saved[n - self._starts[k]]
            assert found is not None
        return found

    def _late(self, n: int) -> InvFuncError:
        link = self.links[bisect_right(self._starts, n) - 1]
        return told(ModifiedError(_LATE.format([*self._like[n][0]])), self._where(link))

    def _where(self, link: Link) -> str:
        return f"{link.block!r}, in the backward pass" if self._done else f"{link.block!r}(x, ...)"

    @contextmanager
    def _telling(self, link: Link) -> Iterator[None]:
        """A context in which an error says which block it is of."""
        try:
            yield
        except InvFuncError as error:
            raise told(error, self._where(link)) from error.__cause__

    def release(self) -> None:
        self._now, self._saved, self._state = None, [], None

    def back(self, ys: Tensors) -> Tensors:
        at, state = self._state or (len(self.links), ys)
        with self._entered() as (enter, leave, _):
            self._state = self._wound_back(at, state, 0, enter, leave)
        return self._state[1]

    def _wound_back(self, at: int, state: Tensors, to: int, enter: Enter, leave: Callable) -> tuple[int, Tensors]:
        """The state before a link, from one behind it."""
        for k in reversed(range(to, at)):
            with self._telling(self.links[k]):
                state = [leave(x) for x in self._inverted(self.links[k], state, enter, None)]
        return min(to, at), state

    def _restore(self, k: int) -> None:
        """Have at hand what autograd saved of a link."""
        self._now, self._saved = None, []
        if self._state is None or self._state[0] < k:
            self._state = len(self.links), self.output()
        link = self.links[k]
        saved: list[torch.Tensor | None] = [None] * link.count
        with self._entered() as (enter, leave, kept):
            at, xs = self._state = self._wound_back(*self._state, k + 1, enter, leave)
            if at == k + 1:
                xs = [leave(x) for x in self._inverted(link, xs, enter, saved)]
                self._state = k, xs
            if any(t is None for t in saved):
                self._evaluated(link, xs, enter, saved)
            there = [kept(t) for t in saved if t is not None]
        if k == 0:
            self.fill(xs)
        self._now, self._saved, self._versions, self._left = k, [*there], versions(there), link.count

    @contextmanager
    def _entered(self) -> Iterator[tuple[Enter, Callable, Callable]]:
        """The level of the run, entered again, and generators that are put back."""
        draws = any(link.states is not None for link in self.links)
        with drawing(self.generators) if draws else nullcontext(), self._level.again() as level:
            yield level

    def inverse(self, ys: Tensors) -> Tensors:
        """The tensors of x of a run of one block, from those of any y."""
        self._origin = []
        with self._entered() as (enter, leave, _):
            return [leave(x) for x in self._inverted(self.links[0], ys, enter, None)]

    def once_more(self, x: Any) -> Any:
        """y of a run of one block at any x, with the same random numbers."""
        link = self.links[0]
        with self._entered() as (enter, _, _), link.around.again(0, enter):
            put_states(self.generators, link.states)
            return link.pair.apart(link.forward(link.pair.shared, x, enter)())[0]

    def _held(self, link: Link) -> Tensors | None:
        """The tensors of x where they are in memory."""
        if link is self.links[0] and self._origin and self._done:
            held = [x for of, then in self._origin if (x := of()) is not None and version(x) == then]
            if len(held) == len(self._origin):
                return [alive(x).detach() for x in held]
        return [link.kept[i].get() for i in range(len(link.like))] if len(link.kept) == len(link.like) else None

    def _inverted(self, link: Link, ys: Tensors, enter: Enter, saved: list | None) -> Tensors:
        """The tensors of x, from those of y; what autograd saves of shared functions is put into `saved`."""
        if (held := self._held(link)) is not None:
            return held
        differentiates, around = link.block.known.differentiates, link.around
        args, kwargs = link.given(enter)
        ys = [enter(alive(t), differentiable(t)) if differentiates else alive(t) for t in ys]
        before = versions(ys)
        shared = _Shared(self, link, (args, kwargs), enter, saved)
        if not link.pair.shared:
            put_states(self.generators, link.states)
        with torch.set_grad_enabled(differentiates), around.again(-1, enter, restarts=not link.pair.shared):
            x = link.inverse(shared.functions(), self._behind(link).join(ys), args, kwargs)
        if versions(ys) != before:
            raise ModifiedError(_WRITES_Y)
        shared.end()
        xs = link.came(x)
        if link.looks is not None:
            compare(link.block, link.looks, xs, link.names(), ys)
        if saved is not None and shared.results:
            self._beside(link, xs, shared, enter, saved)
        return xs

    def _behind(self, link: Link) -> tree.Form:
        """The form of the state behind a link."""
        k = self.links.index(link) + 1
        form = self.links[k].form if k < len(self.links) else self._form
        assert form is not None
        return form

    def _beside(self, link: Link, xs: Tensors, shared: _Shared, enter: Enter, saved: list) -> None:
        """What autograd saves beside the shared functions, whose results are known."""
        missing = link.spans()
        if not missing:
            return
        with torch.enable_grad(), link.around.again(0, enter):
            run = link.forward(shared.recalled(), link.entered(xs, enter), enter)
            _, found = self.saves(run, missing, stop=True)
        for n, t in zip(missing, found, strict=True):
            saved[n - link.start] = t

    def _evaluated(self, link: Link, xs: Tensors, enter: Enter, saved: list) -> None:
        """What autograd saves of f at x."""
        put_states(self.generators, link.states)
        with torch.enable_grad(), link.around.again(0, enter):
            run = link.forward(link.pair.shared, link.entered(xs, enter), enter)
            stop = link.states is None  # what is drawn may be filled in when it has been saved
            _, saved[:] = self.saves(run, range(link.start, link.end), stop)

    def saves(self, fn: Callable, wanted: Sequence[int], stop: bool = False) -> tuple[Any, Tensors]:
        """The result of a function and what autograd saves in it, which has to be like that of some numbers."""
        collected = _Collected([self._like[n] for n in wanted], stop)
        out = None
        was = push_hooks(collected.pack, collected.saved.__getitem__)
        try:
            if wanted or not stop:
                with self._forms():
                    out = fn()
        except _Enough:
            pass
        finally:
            pop_hooks(was)
        if (number := len(collected.saved)) != len(wanted):
            raise ReplayError(_OTHER.format(f"{number} tensors, where it was {len(wanted)}"))
        return out, collected.saved


class _Shared:
    """The functions that f shares with its inverse, where the inverse evaluates them once more.

    Args:
        run, link: the block.
        given: its further arguments.
        enter: gives a tensor as a leaf.
        saved: what autograd saves in them is put here; None if that is not wanted.
    """

    def __init__(self, run: Run, link: Link, given: Any, enter: Enter, saved: list | None) -> None:
        self._run, self._link, self._enter, self._saved = run, link, enter, saved
        self._given = {id(t) for t in tree.tensors(given)}
        self._at = len(link.evaluations)
        self.results: dict[int, Any] = {}

    def functions(self) -> Sequence[Callable]:
        """They, for the inverse."""
        link = self._link
        once_more = self._saved is not None or link.states is not None or link.around.buffers
        return [partial(self._again, fn) for fn in link.pair.shared] if once_more else link.pair.shared

    def end(self) -> None:
        """Raise if the inverse has not evaluated all of them."""
        if self._at and self.results:
            raise InverseError(_SHARED)

    def recalled(self) -> Iterator[Callable]:
        """Functions that give their results, for f."""
        results = iter([self.results[at] for at in sorted(self.results)])

        def recall(*_: Any, **__: Any) -> Any:
            return tree.map_tensors(lambda t: self._enter(t, needs_grad(t)), next(results))

        return (recall for _ in self._link.pair.shared)

    def _again(self, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        link, self._at = self._link, self._at - 1
        if self._at < 0 or link.evaluations[self._at].fn is not fn:
            raise InverseError(_SHARED)
        evaluation = link.evaluations[self._at]
        args, kwargs = self._entered(evaluation, args, kwargs)
        put_states(self._run.generators, evaluation.states)
        with link.around.again(self._at, self._enter) if link.around.buffers else nullcontext():
            if self._saved is None:
                result = fn(*args, **kwargs)
            else:
                numbers = range(evaluation.start, evaluation.end)
                with torch.enable_grad():
                    result, found = self._run.saves(partial(fn, *args, **kwargs), numbers)
                self._saved[evaluation.start - link.start : evaluation.end - link.start] = found
        self.results[self._at] = result
        return tree.map_tensors(torch.Tensor.detach, result)

    def _entered(self, evaluation: Evaluation, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The arguments of an evaluation, like those that it had."""
        likes = iter(evaluation.given)

        def entered(t: torch.Tensor) -> torch.Tensor:
            like = None if id(t) in self._given else next(likes, None)
            return t if like is None else self._enter(like.laid_out(t), like.needs)

        single = _single(args, kwargs)
        return ((entered(args[0]), *args[1:]), kwargs) if single else tree.map_tensors(entered, (args, kwargs))


def _single(args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether there is one tensor, in front of constants alone."""
    return bool(args) and not kwargs and type(args[0]) is torch.Tensor and all(type(a) in _CONSTANTS for a in args[1:])


_CONSTANTS = {type(None), EllipsisType, bool, int, float, str}
_CHANGES = (
    "It reads something that changes: random numbers of Python or numpy, a counter, what is chosen around the forward "
    "pass alone. Draw with torch, whose numbers are replayed (preserve_rng_state=True), or pass what changes as an "
    "argument."
)
_OTHER = "evaluated again, the function does something else: autograd saves {}. " + _CHANGES
_WRITES = (
    "the function writes into x, which it was given. Take inplace=False in its first layers, or give them a copy: "
    "lambda x: f(x.clone())."
)
_WRITES_Y = (
    "f_inv writes into y, which it was given. Write y = y - z in place of y -= z, or give it a copy: lambda y: "
    "f_inv(y.clone())."
)
_SHARED = (
    "the inverse evaluates a shared function more or less often than f, or in another order. It has to evaluate all of "
    "them, in the reverse order of f, at the same arguments; or leave shared= out."
)
_LATE = (
    "a tensor of shape {} that is needed to compute the gradient has been modified by an inplace operation. Write "
    "t = t + z in place of t += z."
)
