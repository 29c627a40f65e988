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
from operator import attrgetter, is_, ne
from typing import Any
from weakref import ref

import torch

from invfunc import tree
from invfunc._torch import functorch
from invfunc._torch.values import differentiable
from invfunc.blocks.held import HERE, note, note_kept
from invfunc.blocks.link import Enter, Evaluation, Holder, Like, Link, Slot, Step, Tensors, slot_of
from invfunc.blocks.looks import EVERY, compare, looked_at, precision_of, relative_error, tolerated
from invfunc.blocks.surroundings import Draws, Reading, States, Surroundings, drew, generators_of
from invfunc.core.generic import Composed
from invfunc.core.run import Run
from invfunc.errors import InverseError, InvFuncError, ModifiedError, ReplayError
from invfunc.transform import told


class _Collected(list[torch.Tensor]):
    """Tensors that autograd saves in an evaluation once more."""

    @functorch.untraced
    def pack(self, t: torch.Tensor) -> int:
        """The number of a tensor among those that are saved."""
        self.append(t.detach())
        return len(self) - 1

    def given_back(self, tensor: torch.Tensor) -> None:
        """Nothing, as no statistic records it; it has seen the first evaluation."""


def _nothing(_: Any) -> torch.Tensor:
    """The tensor that autograd asks for, where f did not go backwards itself the first time."""
    raise ReplayError(_OTHER.format("tensors that it reads at once"))


def _place(x: torch.Tensor) -> tuple[int, int]:
    """Offset of a tensor in its memory, and its number of entries: halves of a state are alike in all else."""
    return int(x.storage_offset()), x.numel()


def _difference(found: list[tuple[torch.Size, torch.dtype]], like: list[tuple[torch.Size, torch.dtype]]) -> str:
    """The first tensor that is another one."""
    if len(found) != len(like):
        return f"{len(found)} tensors, where it was {len(like)}"
    (shape, dtype), (then, of) = next(pair for pair in zip(found, like, strict=True) if pair[0] != pair[1])
    return f"a tensor of shape {list(shape)} {dtype}, where it was {list(then)} {of}"


class BlockRun(Holder):
    """Blocks one after the other in one call.

    Args:
        level: the level of torch.func at which there is a graph; 0 for plain autograd.
        seen: whether function modes see the calls of the blocks, as they do not see those of the run.
    """

    _form: tree.Form | None = None
    """Form of the state behind the last block."""
    _now: int | None = None
    """The link whose saved tensors are at hand."""
    _state: tuple[int, Tensors] | None = None
    """A state between the links, and the number of links before it."""
    _origin: Sequence[tuple[ref[torch.Tensor], int]] = ()
    """x where no block gave it out: the caller may hold it."""
    _draws = False
    """True if a block drew random numbers."""
    _done = False
    _lock: Any = None

    def __init__(self, level: int, seen: bool = False) -> None:
        self._level, self._watched = functorch.level_at(level), seen
        self._forms = Composed if functorch.under(Run) else None
        self.links: list[Link] = []
        self._starts: list[int] = []
        self.like: list[tuple[torch.Size, torch.dtype]] = []
        """Shape and dtype of each tensor that autograd has saved, in order."""
        self._live: list[tuple[torch.Tensor, int]] = []
        """Tensors that it has saved of the block that is running, with their versions."""
        self._written = set[int]()
        """The numbers of what was written since, by the block itself: an error if autograd asks for it, as it does not
        for what had no gradient."""
        self._at_hand: dict[int, tuple[torch.Tensor, int]] = {}
        """Tensors that autograd has not asked for yet, with their versions when they were computed again."""
        self.gathering: list[Any] = []

    # Forwards

    def forward(self, steps: Sequence[Step], x: Any) -> tuple[Any, list[tuple]]:
        """The state behind the blocks, and what each of them hides.

        It ends behind a block that has a graph at a level below that of the run too: there nothing is freed.
        """
        xs, form = tree.separate(x)
        slots, depth = [slot_of(t, self.gathering) for t in xs], 0
        for slot in slots:
            if slot is not None:
                depth, self._lock = max(depth, slot.depth), slot.lock or self._lock
        if not any(slots):
            self._origin = [*zip(map(ref, xs), functorch.versions(xs), strict=True)]
        self._lock = self._lock or threading.RLock()
        every = {id(block): block for block, _, _ in steps}
        closed = {key: block.known.closed(block.pair) for key, block in every.items()}
        self.draws = Draws(generators_of(xs, steps, closed.values()) if steps[0][0].preserve_rng_state else [])
        states = self.first_states = self.draws.states() or None
        hidden: list[tuple] = []
        before = xs, form
        for k, step in enumerate(steps):
            around = Surroundings(closed[id(step[0])], step[0].known.first, step)
            link = Link(step, xs, form, len(self.like), around, states)
            self._begun(link, xs, depth + k)
            x = self._first(link, step, x, xs)
            if link.pair.hidden:
                x, link.hidden = link.pair.apart(x)
            hidden.append(link.hidden)
            states, link.block.known.first = self._ended(link, xs, states), False
            before, (xs, form) = (xs, form), tree.separate(x)
            if self._level.number and any(map(functorch.tracked_below, xs)):
                self.links.pop()
                self._starts.pop()
                self._close(slots, *before, depth)
                return x, hidden
            self._form = form
            self._free()
            if HERE.noted and k + 1 < len(steps):
                note(link.block, depth + k, x, before[0], None)
            if not isinstance(link.block.check, str):
                self._check(k, before[0], xs)
        self._close(slots, xs, form, depth)
        note(self.links[-1].block, depth + len(steps) - 1, x, before[0], [*self.outs])
        return x, hidden

    def _begun(self, link: Link, xs: Tensors, number: int) -> None:
        """Add a link, with what stays of x."""
        self.links.append(link)
        self._starts.append(link.start)
        if link.block.keep:
            link.kept = {i: Slot(xs[i]) for i in link.block.kept(len(xs))}
            note_kept(xs, link.kept)
        if number % EVERY == 0 and link.block.check != "off" and len(link.kept) < len(xs):
            with functorch.unwatched():
                link.looks = looked_at(xs, link.kept)
                if link.looks and link.pair.carries_a_sum:  # from which nothing is computed
                    link.looks[-1] = None

    def _first(self, link: Link, step: Step, x: Any, xs: Tensors) -> Any:
        """The first evaluation of a block."""
        (_, args, kwargs), pair, around = step, link.pair, link.around
        shared = [partial(self._evaluate, link, fn) for fn in pair.shared]
        before = functorch.versions(xs)
        was = functorch.push_hooks(self.pack, self.unpack)
        try:
            if around.learned and not self._watched:
                y = pair.forward(*shared, x, *args, **kwargs)
            else:
                with nullcontext() if around.learned else Reading() as reading, self._seen():
                    y = pair.forward(*shared, x, *args, **kwargs)
                if reading is not None:
                    around.closed.learn(reading.read, around.key)
        finally:
            functorch.pop_hooks(was)
        if functorch.versions(xs) != before:
            raise ModifiedError(_WRITES)
        return y

    def _seen(self) -> AbstractContextManager:
        """A context for calls of the blocks."""
        return functorch.watched() if self._watched else nullcontext()

    def _evaluate(self, link: Link, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        """The first evaluation of a shared function."""
        around = link.around
        if link.evaluations and around.buffers:
            around.mark()
        first = bool(args) and type(args[0]) is torch.Tensor and id(args[0]) not in link.ids
        given = args[:1]
        if not first or kwargs or not link.ids.issuperset(map(id, args[1:])):
            given = [t for t in tree.tensors((args, kwargs)) if id(t) not in link.ids]
            first = False
        states = None if link.quiet else self.draws.states()
        evaluation = Evaluation(fn, link.start + len(self._live), first, [*map(Like, given)], states)
        link.evaluations.append(evaluation)
        result = fn(*args, **kwargs)
        evaluation.end = link.start + len(self._live)
        return result

    def _ended(self, link: Link, xs: Tensors, states: States | None) -> States | None:
        """Note how the world is behind a block; gives the states of the generators."""
        around, quiet = link.around, link.around.closed.quiet
        if states is not None:
            after = self.draws.states()
            if not drew(states, after):
                quiet.add(around.key)
                link.states = None
                for evaluation in link.evaluations:
                    evaluation.states = None
            elif link.quiet:  # the states before each evaluation are not known, for once
                quiet.discard(around.key)
                link.kept = {i: Slot(t) for i, t in enumerate(xs)}
            self._draws |= link.states is not None
            states = after
        around.called()
        link.own, link.end = (), link.start + len(self._live)
        link.merged = link.end - link.start == sum([e.end - e.start for e in link.evaluations])
        if link.hidden:
            link.hidden = tree.map_tensors(torch.Tensor.detach, link.hidden)
        return states

    def _free(self) -> None:
        """Let go of what autograd has saved of a block."""
        tensors, counts = zip(*self._live, strict=True) if self._live else ((), ())
        now = tuple(map(functorch.counted, tensors))
        if now != counts:
            self._written |= {n for n, pair in enumerate(zip(now, counts, strict=True), self._starts[-1]) if ne(*pair)}
        self.like += map(_LIKE, tensors)
        self._live = []

    def _close(self, slots: Sequence[Slot | None], xs: Tensors, form: tree.Form, depth: int) -> None:
        """Take the state before the blocks over, and let the next call do so with that behind them."""
        self._live, self._form, self._done, self.first_states = [], form, True, None
        if not self.links:
            return
        with functorch.unwatched():
            hooks = functorch.saving_hooks()
            if hooks is not None and any(map(functorch.is_batched, xs)):
                hooks = None
            self.outs = [Slot(t, depth + len(self.links), hooks, self._lock) for t in xs]
            own: ref[Holder] = ref(self)
            for t, slot in zip(xs, self.outs, strict=True):
                slot.owner = own
                slot.note(t, held=bool(HERE.noted))
        kept = self.links[0].kept
        self.take_over([None if i in kept else slot for i, slot in enumerate(slots)] if kept else slots)

    def _check(self, k: int, xs: Tensors, ys: Tensors) -> None:
        """Compare all entries of x with what the inverse gives, where that is asked for."""
        link = self.links[k]
        if len(link.kept) == len(xs):
            return
        tolerance = tolerated(link.block.check, max(map(precision_of, xs)))
        looks, link.looks = link.looks, None
        with self._entered() as (enter, leave, _), self._seen():
            back = self._inverted(k, [t.detach() for t in ys], enter, None)
        link.looks = looks
        for name, x, came in zip(link.names(), xs, map(leave, back), strict=True):
            error = relative_error(came, x)
            if not error <= tolerance:
                raise InverseError(
                    f"the inverse gives {name} of shape {list(x.shape)} back with an error of {error:.1e} of its "
                    f"largest entry, where {tolerance:.1e} is tolerated (check=)."
                )

    @functorch.untraced
    def pack(self, t: torch.Tensor) -> int:
        """The number that autograd gets in place of a tensor."""
        self._live.append((t, functorch.counted(t)))
        return self._starts[-1] + len(self._live) - 1

    def given_back(self, tensor: torch.Tensor) -> Callable[[], torch.Tensor] | None:
        """A function that computes a saved tensor again, for a statistic that records f; None if it was not saved."""
        for n, (t, _) in reversed([*enumerate(self._live, self._starts[-1])]):
            if functorch.storage_of(t) == functorch.storage_of(tensor) and _place(t) == _place(tensor):
                same = t.shape == tensor.shape and t.stride() == tensor.stride()
                if same or (t.is_contiguous() and tensor.is_contiguous()):
                    return partial(self._fetched, n, tensor.shape)
        return None

    def _fetched(self, n: int, shape: torch.Size) -> torch.Tensor:
        with self._lock:
            return self._found(n)[0].reshape(shape)

    def undo(self) -> None:
        """Take back what the blocks have written to buffers."""
        for link in reversed(self.links):
            link.around.undo()

    # Backwards

    @functorch.untraced
    def unpack(self, n: int) -> torch.Tensor:
        """The tensor in whose place a number was given."""
        with self._lock:
            t, then = self._at_hand.pop(n, None) or self._found(n)
            if functorch.counted(t) != then:
                raise self._late(n)
            if not self._at_hand and self._now == 0:
                self.release()
        if self._level.number == 0 or not self._level.running:
            return t
        if torch.is_grad_enabled() and functorch.backward_by_torch_func():
            functorch.set_graph(False)  # nobody can differentiate once more at this level
        return t

    def _found(self, n: int) -> tuple[torch.Tensor, int]:
        """A saved tensor and its version, which is computed again unless it is at hand."""
        k = bisect_right(self._starts, n) - 1
        if n in self._at_hand:
            return self._at_hand[n]
        if 0 <= (at := n - self._starts[-1]) < len(self._live):  # f itself goes backwards, or two levels have a graph
            if not self._done:
                self.links[-1].block.known.differentiates = True
            return self._live[at]
        if n in self._written:
            raise self._late(n)
        try:
            self._restore(k)
        except InvFuncError as error:
            raise told(error, self._where(self.links[k])) from error.__cause__
        return self._at_hand.pop(n)

    def _late(self, n: int) -> InvFuncError:
        link = self.links[bisect_right(self._starts, n) - 1]
        return told(ModifiedError(_LATE.format([*self.like[n][0]])), self._where(link))

    def _where(self, link: Link) -> str:
        return f"{link.block!r}, in the backward pass" if self._done else f"{link.block!r}(x, ...)"

    def release(self) -> None:
        self._now, self._state, self._at_hand = None, None, {}

    def back(self, ys: Tensors) -> Tensors:
        at, state = self._state or (len(self.links), ys)
        with self._entered() as (enter, leave, _):
            self._state = self._wound_back(at, state, 0, enter, leave)
        return self._state[1]

    def _wound_back(self, at: int, state: Tensors, to: int, enter: Enter, leave: Callable) -> tuple[int, Tensors]:
        """The state before a link, from one behind it."""
        for k in reversed(range(to, at)):
            try:
                state = [*map(leave, self._inverted(k, state, enter, None))]
            except InvFuncError as error:
                raise told(error, self._where(self.links[k])) from error.__cause__
        return min(to, at), state

    def _restore(self, k: int) -> None:
        """Have at hand what autograd saved of a link."""
        self._now, self._at_hand = None, {}
        if self._state is None or self._state[0] < k:
            self._state = len(self.links), self.output()
        link = self.links[k]
        saved: list[Any] = [None] * (link.end - link.start)
        with self._entered() as (enter, leave, kept):
            at, xs = self._state
            if at > k + 1:
                at, xs = self._state = self._wound_back(at, xs, k + 1, enter, leave)
            if at == k + 1:
                xs = [*map(leave, self._inverted(k, xs, enter, saved))]
                self._state = k, xs
            if any(map(_IS_MISSING, saved)):
                self._evaluated(link, xs, enter, saved)
            if kept is not functorch.as_it_is:
                saved = [*map(kept, saved)]
        if k == 0:
            self.fill(xs)
        self._at_hand = dict(enumerate(zip(saved, functorch.versions(saved), strict=True), link.start))
        for n in self._written:
            self._at_hand.pop(n, None)
        self._now = k

    def _entered(self) -> AbstractContextManager[tuple[Enter, Callable, Callable]]:
        """The level of the run, entered again, and generators that are put back."""
        return self._drawing() if self._draws else self._level.again()

    @contextmanager
    def _drawing(self) -> Iterator[tuple[Enter, Callable, Callable]]:
        with self.draws.kept(), self._level.again() as level:
            yield level

    def inverse(self, ys: Tensors) -> Tensors:
        """The tensors of x of a run of one block, from those of any y."""
        self._origin = ()
        with self._entered() as (enter, leave, _):
            return [leave(x) for x in self._inverted(0, ys, enter, None)]

    def once_more(self, x: Any) -> Any:
        """y of a run of one block at any x, with the same random numbers."""
        link = self.links[0]
        with self._entered() as (enter, _, _), link.around.again(0, enter):
            self.draws.put(link.states)
            args, kwargs = link.called_with(link.pair.shared, x, enter)
            return link.pair.apart(link.pair.forward(*args, **kwargs))[0]

    def _held(self, link: Link) -> Tensors | None:
        """The tensors of x where they are in memory."""
        if self._origin and self._done and link is self.links[0]:
            held = [x for of, then in self._origin if (x := of()) is not None and functorch.version(x) == then]
            if len(held) == len(self._origin):
                return [functorch.alive(x).detach() for x in held]
        if link.kept and len(link.kept) == len(link.like):
            return [link.kept[i].get() for i in range(len(link.like))]
        return None

    def _inverted(self, k: int, ys: Tensors, enter: Enter, saved: list | None) -> Tensors:
        """The tensors of x, from those of y; what autograd saves of shared functions is put into `saved`."""
        link = self.links[k]
        if (held := self._held(link)) is not None:
            return held
        pair, around, differentiates = link.pair, link.around, link.block.known.differentiates
        args, kwargs = link.given(enter)
        if self._level is not functorch.PLAIN:
            ys = [*map(functorch.alive, ys)]
        if differentiates:
            ys = [enter(t, differentiable(t)) for t in ys]
        before, again, functions = functorch.versions(ys), None, pair.shared
        form = self.links[k + 1].form if k + 1 < len(self.links) else self._form
        assert form is not None
        if not functions:
            self.draws.put(link.states)
        elif saved is not None or link.states is not None or around.buffers:
            again = _Shared(self, link, (args, kwargs), enter, saved)
            functions = [partial(again.evaluated, fn) for fn in pair.shared]
        graph = torch.is_grad_enabled()
        functorch.set_graph(differentiates)
        try:
            with around.again(-1, enter, restarts=not functions):
                x = link.inverse(functions, form.join(ys), args, kwargs)
        finally:
            functorch.set_graph(graph)
        if functorch.versions(ys) != before:
            raise ModifiedError(_WRITES_Y)
        xs = link.came(x)
        if again is not None and again.at and again.at < len(link.evaluations):
            raise InverseError(_SHARED)
        if link.looks is not None:
            compare(link.block, link.looks, xs, link.names(), ys)
        if saved is not None and again is not None and again.results:
            self._beside(link, xs, again, enter, saved)
        return xs

    def _beside(self, link: Link, xs: Tensors, shared: _Shared, enter: Enter, saved: list) -> None:
        """Put in place all that autograd saves beside the shared functions, whose results are known."""
        missing = link.spans()
        with torch.enable_grad(), link.around.again(0, enter):
            given = link.called_with(shared.recalled(), link.entered(xs, enter), enter)
            _, found = self.saves(link, link.pair.forward, *given, [self.like[n] for n in missing])
        for n, t in zip(missing, found, strict=True):
            saved[n - link.start] = t

    def _evaluated(self, link: Link, xs: Tensors, enter: Enter, saved: list) -> None:
        """Put in place all that autograd saves of f at x."""
        self.draws.put(link.states)
        with torch.enable_grad(), link.around.again(0, enter):
            given = link.called_with(link.pair.shared, link.entered(xs, enter), enter)
            _, saved[:] = self.saves(link, link.pair.forward, *given, self.like[link.start : link.end])

    def saves(self, link: Link, fn: Callable, args: tuple, kwargs: dict, wanted: list) -> tuple[Any, Tensors]:
        """The result of a function and what autograd saves in it, which has to be like this.

        Args:
            link: the block.
            fn, args, kwargs: the call.
            wanted: the shapes and dtypes.
        """
        collected, differentiates = _Collected(), link.block.known.differentiates
        pack, unpack = (collected.pack, collected.__getitem__) if differentiates else (collected.append, _nothing)
        was = functorch.push_hooks(pack, unpack)
        try:
            if self._forms is None and link.around.learned:
                out = fn(*args, **kwargs)
            else:  # parts that are compiled ran as they are written under the mode of the first evaluation
                forms = self._forms() if self._forms is not None else nullcontext()
                with forms, nullcontext() if link.around.learned else Reading():
                    out = fn(*args, **kwargs)
        finally:
            functorch.pop_hooks(was)
        found = [*collected]
        if not differentiates:
            collected.clear()  # whose graphs hold the hooks, and so the list
            if self._level is not functorch.PLAIN:
                found = [t.detach() for t in found]
        if (like := [*map(_LIKE, found)]) != wanted:
            raise ReplayError(_OTHER.format(_difference(like, wanted)))
        return out, found


class _Shared:
    """The functions that f shares with its inverse, where the inverse evaluates them once more.

    Args:
        run, link: the block.
        given: its further arguments.
        enter: gives a tensor as a leaf.
        saved: what autograd saves in them is put here; None if that is not wanted.
    """

    __slots__ = ("_run", "_link", "_given", "_enter", "_saved", "at", "results")

    def __init__(self, run: BlockRun, link: Link, given: Any, enter: Enter, saved: list | None) -> None:
        self._run, self._link, self._given, self._enter, self._saved = run, link, given, enter, saved
        self.at = len(link.evaluations)
        """Number of evaluations that are left."""
        self.results: dict[int, Any] = {}

    def recalled(self) -> Iterator[Callable]:
        """Functions that give their results, for f."""
        results = iter([self.results[at] for at in sorted(self.results)])

        def recall(*_: Any, **__: Any) -> Any:
            return tree.map_tensors(lambda t: self._enter(t, functorch.needs_grad(t)), next(results))

        return (recall for _ in self._link.pair.shared)

    def evaluated(self, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        """The result of one once more."""
        run, link, saved = self._run, self._link, self._saved
        self.at -= 1
        if self.at < 0 or link.evaluations[self.at].fn is not fn:
            raise InverseError(_SHARED)
        evaluation = link.evaluations[self.at]
        args, kwargs = self._entered(evaluation, args, kwargs)
        if evaluation.states is not None:
            run.draws.put(evaluation.states)
        with link.around.again(self.at, self._enter) if link.around.buffers else _AS_IT_IS:
            if saved is None:
                result = fn(*args, **kwargs)
            else:
                functorch.set_graph(True)
                try:
                    wanted = run.like[evaluation.start : evaluation.end]
                    result, found = run.saves(link, fn, args, kwargs, wanted)
                finally:
                    functorch.set_graph(link.block.known.differentiates)
                saved[evaluation.start - link.start : evaluation.end - link.start] = found
        if not link.merged:
            self.results[self.at] = result
        return result.detach() if type(result) is torch.Tensor else tree.map_tensors(torch.Tensor.detach, result)

    def _entered(self, evaluation: Evaluation, args: tuple, kwargs: dict[str, Any]) -> Any:
        """The arguments of an evaluation, like those that it had."""
        if evaluation.first and args and not kwargs:
            like = evaluation.given[0]
            return (self._enter(like.laid_out(args[0]), like.needs), *args[1:]), kwargs
        likes, given = iter(evaluation.given), {id(t) for t in tree.tensors(self._given)}

        def entered(t: torch.Tensor) -> torch.Tensor:
            like = None if id(t) in given else next(likes, None)
            return t if like is None else self._enter(like.laid_out(t), like.needs)

        return tree.map_tensors(entered, (args, kwargs))


_AS_IT_IS, _LIKE, _IS_MISSING = nullcontext(), attrgetter("shape", "dtype"), partial(is_, None)
_OTHER = (
    "evaluated a second time, the function does something else: autograd saves {}. Most often it draws random numbers "
    "of Python or numpy: draw with torch, whose numbers are replayed (preserve_rng_state=True). Or it reads something "
    "that changes, as a counter or a mode: pass that as an argument."
)
_WRITES = (
    "the function writes into its argument x. Take inplace=False in its first layers, or give them a copy: lambda x: "
    "f(x.clone())."
)
_WRITES_Y = (
    "f_inv writes into its argument y. Write y = y - z in place of y -= z, or give it a copy: lambda y: "
    "f_inv(y.clone())."
)
_SHARED = (
    "the inverse has to evaluate each shared function as often as f, in the reverse order, at the same arguments; or "
    "leave shared= out."
)
_LATE = (
    "a tensor of shape {} that is needed to compute the gradient has been modified by an inplace operation. Write "
    "t = t + z in place of t += z."
)
