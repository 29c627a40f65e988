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
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any
from weakref import ref

import torch

from invfunc import tree
from invfunc._torch.functorch import (
    Level,
    alive,
    backward_by_torch_func,
    batched_like,
    batches_of,
    ended,
    is_batched,
    needs_grad,
    pop_hooks,
    push_hooks,
    recorded,
    saving_hooks,
    storage,
    storage_of,
    tracked_below,
    under,
    untraced,
    unwatched,
    unwrapped,
    version,
)
from invfunc._torch.values import differentiable
from invfunc.blocks.closed import Reading
from invfunc.blocks.looks import EVERY, Look, compare, looked_at
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
    states_of,
)
from invfunc.callables import describe
from invfunc.errors import InverseError, InvFuncError, ModifiedError, ReplayError
from invfunc.operations.heard import Followed
from invfunc.recording.trace import Trace
from invfunc.transform import told

Step = tuple[Any, tuple, dict[str, Any]]
"""A block with its further arguments."""
Tensors = list[torch.Tensor]
WRITTEN = (
    "an argument has been modified by an inplace operation, by f or after it, and is needed to compute the gradient. "
    "Write t = t + z in place of t += z."
)
CHANGES = (
    "It reads something that changes: random numbers of Python or numpy, a counter, what is chosen around the forward "
    "pass alone. Draw with torch, whose numbers are replayed (preserve_rng_state=True), or pass what changes as an "
    "argument."
)


class _Enough(BaseException):
    """All that is needed has been saved."""


class _Like:
    """What a tensor of x was like."""

    __slots__ = ("shape", "dtype", "device", "stride", "needs", "batches")

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.dtype, self.device, self.needs = x.shape, x.dtype, x.device, needs_grad(x)
        self.stride = x.stride() if x.layout is torch.strided else None
        self.batches = batches_of(x)

    def checked(self, came: Any, link: Link, place: int) -> torch.Tensor:
        """What the inverse gave for it."""
        if not isinstance(came, torch.Tensor) or came.shape != self.shape or not self._holds(came.dtype):
            what = f"{list(came.shape)} {came.dtype}" if isinstance(came, torch.Tensor) else type(came).__name__
            name = link.names()[place]
            raise InverseError(
                f"the inverse gives {name} as {what}, where it was {list(self.shape)} {self.dtype}. To keep it in "
                f"memory, and not compute it by the inverse, pass keep=({place},)."
            )
        return self.laid_out(came.detach())

    def laid_out(self, came: torch.Tensor) -> torch.Tensor:
        """A tensor in the dtype and with the strides that it had: kernels are chosen by them."""
        came = batched_like(came if came.dtype == self.dtype else came.to(self.dtype), self.batches)
        if self.stride is None or came.stride() == self.stride or came.shape != self.shape or came.numel() < 2:
            return came
        for dim, stride in enumerate(self.stride):
            if stride == 0:  # expanded
                came = came.narrow(dim, 0, 1)
        made = came.new_empty_strided(came.shape, self.stride)
        overlaps = unwrapped(made) is None and storage(made).nbytes() < made.nbytes
        return (came if overlaps else made.copy_(came)).expand(self.shape)

    def _holds(self, dtype: torch.dtype) -> bool:
        """Whether a dtype has all of its digits."""
        if dtype == self.dtype:
            return True
        floats = dtype.is_floating_point and self.dtype.is_floating_point
        return floats and torch.promote_types(dtype, self.dtype) == dtype


class _Constant:
    """A tensor of the arguments that had a graph, without it."""

    __slots__ = ("value",)

    def __init__(self, tensor: torch.Tensor) -> None:
        self.value = tensor.detach()


class _Saved:
    """What autograd gets in place of a tensor: its number, and the tensor as long as its block has not ended."""

    __slots__ = ("number", "value", "version")

    def __init__(self, number: int, value: torch.Tensor) -> None:
        self.number, self.version = number, version(value)
        self.value: torch.Tensor | None = value


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
            raise ReplayError(
                f"evaluated again, the function does something else: autograd saves a tensor of shape {list(t.shape)} "
                f"and {t.dtype}" + (", one more than before. " if n == count else
                f", where it was {list(self.like[n][0])} and {self.like[n][1]}. ") + CHANGES
            )  # fmt: skip
        self.saved.append(t.detach() if t.requires_grad else t)
        if self.stop and n + 1 == count:
            raise _Enough
        return n

    def given_back(self, tensor: torch.Tensor) -> None:
        """Nothing, as no statistic records it; it has seen the first evaluation."""


class _Evaluation:
    """An evaluation of a function that f shares with its inverse."""

    __slots__ = ("fn", "start", "end", "given", "states")

    def __init__(self, fn: Callable, start: int, given: Iterable[torch.Tensor], states: States | None) -> None:
        self.fn, self.start, self.end, self.states = fn, start, start, states
        self.given = [*map(_Like, given)]
        """The tensors that it is given beside the arguments of the block."""


class Link:
    """A block of a run."""

    __slots__ = (
        "block", "form", "like", "own", "tensors", "args", "needs", "versions", "start", "around", "states", "looks",
        "kept", "hidden", "evaluations",
    )  # fmt: skip

    def __init__(self, step: Step, xs: Tensors, form: tree.Form, start: int) -> None:
        self.block, *given = step
        self.form, self.like, self.start = form, [_Like(x) for x in xs], start
        self.tensors, self.args = tree.separate(tuple(given)) if given[0] or given[1] else ((), None)
        self.needs = [needs_grad(t) for t in self.tensors]
        self.versions = [version(t) for t in self.tensors]
        self.own = self.tensors
        """The tensors of the arguments, until the call has ended."""
        self.tensors = [t if recorded(t).grad_fn is None else _Constant(t) for t in self.tensors]
        self.kept: dict[int, Slot] = {}
        self.looks: list[Look | None] | None = None
        self.hidden: tuple = ()
        self.states: States | None = None
        self.evaluations: list[_Evaluation] = []

    @property
    def pair(self) -> Any:
        """The pair of the block."""
        return self.block.pair

    def names(self) -> list[str]:
        """The tensors of x as one would write them."""
        named = tree.named_leaves(self.form.join(range(len(self.form.places))))
        return ["x" + named[place][0] for place in self.form.places]

    def tensors_of(self, x: Any) -> Tensors:
        """The tensors that the inverse gives, which has to be a tree like x."""
        found, form = tree.separate(x)
        if form.structure == self.form.structure and form.places == self.form.places:
            return found
        names, came = self.names(), ["x" + path for path, t in tree.named_leaves(x) if isinstance(t, torch.Tensor)]
        if came == names:  # a list in place of a tuple
            return found
        what = "one tensor" if came == ["x"] else f"{type(x).__name__} of {', '.join(came)}" if came else repr(x)
        raise InverseError(
            f"the inverse gives {what}, where x was {'one tensor' if names == ['x'] else ', '.join(names)}. It has to "
            "be of the form of x: f_inv(f(x)) is x."
        )

    def given(self, enter: Callable[[torch.Tensor, bool], torch.Tensor]) -> tuple[tuple, dict[str, Any]]:
        """The further arguments, to be read once more: what had a graph needs a gradient as before."""
        if self.args is None:
            return (), {}
        for t, then in zip(self.tensors, self.versions, strict=True):
            if version(t.value if isinstance(t, _Constant) else t) != then:
                raise ModifiedError(WRITTEN)
        found = []
        for t, need in zip(self.tensors, self.needs, strict=True):
            constant = isinstance(t, _Constant)
            t = t.value if constant else t
            found.append(enter(t, need) if constant or ended(t) else t)
        return self.args.join(found)


class Run(Holder):
    """Blocks one after the other in one call.

    Args:
        level: the level of torch.func at which there is a graph; 0 for plain autograd.
        seen: a context in which function modes see the calls of the blocks, as they do not see those of the run.
    """

    def __init__(self, level: int, seen: Callable[[], AbstractContextManager] = nullcontext) -> None:
        self._level, self._seen = Level(level), seen
        self._forms = Followed if under(Trace) else nullcontext
        self.links: list[Link] = []
        self._starts: list[int] = []
        self._like: list[tuple[torch.Size, torch.dtype]] = []
        """What autograd has saved was like, in order."""
        self._live: list[_Saved] = []
        """What it has saved of the block that is running."""
        self._form: tree.Form | None = None
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
        replays = steps[0][0].preserve_rng_state
        self.generators = generators_of(xs, steps) if replays else []
        kinds = kinds_of(xs)
        states = self.first_states = states_of(self.generators) if replays else None
        if not any(slots):
            self._origin = [(ref(t), version(t)) for t in xs]
        y, hidden, whole = x, [], False
        for k, step in enumerate(steps):
            link = Link(step, xs, form, len(self._like))
            block, before, before_form, versions = link.block, xs, form, [version(t) for t in xs]
            self._keep(link, xs)
            if block.check != "off" and (depth + k) % EVERY == 0 and len(link.kept) < len(xs):
                with unwatched():
                    link.looks = looked_at(xs)
                    if link.looks and link.pair.carries_a_sum:  # from which nothing is computed
                        link.looks[-1] = None
            link.around = Surroundings(block.known.closed(link.pair), kinds, block.known.first)
            link.around.mark()
            link.states = states
            self.links.append(link)
            self._starts.append(link.start)
            y, link.hidden = link.pair.apart(self._first(link, step, y))
            hidden.append(link.hidden)
            if any(version(t) != then for t, then in zip(before, versions, strict=True)):
                raise ModifiedError(_WRITES)
            states = self._ended(link, states)
            xs, form = tree.separate(y)
            whole = self._level.number > 0 and any(map(tracked_below, xs))
            if whole:
                self.links.pop(), self._starts.pop()
                xs, form = before, before_form
                break
            for saved in self._live:
                assert (value := saved.value) is not None
                if version(value) != saved.version:
                    saved.version = -1  # an error if autograd asks for it, as it does not for what had no gradient
                saved.value = None
            self._live, self._form = [], form
            if k + 1 < len(steps):
                note(block, depth + k, y, before, None)
            if (tolerance := block.tolerance(before)) is not None and len(link.kept) < len(before):
                self._check(link, before, xs, tolerance)
        self._live, self._form, self._done, self.first_states = [], form, True, None
        if self.links:
            with unwatched():
                hooks = None if any(map(is_batched, xs)) else saving_hooks()
                self.outs = [Slot(t, depth + len(self.links), hooks, self._lock) for t in xs]
                own: ref[Holder] = ref(self)
                for t, slot in zip(xs, self.outs, strict=True):
                    slot.owner = own
                    slot.note(t, held=bool(HERE.noted))
                if not whole:
                    note(block, depth + len(steps) - 1, y, before, self.outs)
            kept = self.links[0].kept
            self.take_over([None if i in kept else slot for i, slot in enumerate(slots)])  # nothing has failed
        return y, hidden

    def _ended(self, link: Link, states: States | None) -> States | None:
        """Note how the world is behind a block; gives the states of the generators."""
        known = link.block.known
        if states is not None:
            after = states_of(self.generators)
            if not drew(states, after):
                link.states = None
                for evaluation in link.evaluations:
                    evaluation.states = None
            states = after
        link.around.called()
        link.own = ()
        known.first = False
        link.hidden = tree.map_tensors(torch.Tensor.detach, hidden) if (hidden := link.hidden) else ()
        return states

    def _check(self, link: Link, xs: Tensors, ys: Tensors, tolerance: float) -> None:
        """Compare all entries of x with what the inverse gives."""
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

    def _first(self, link: Link, step: Step, x: Any) -> Any:
        """The first evaluation of a block."""
        block, args, kwargs = step
        closed = link.around.closed
        shared = [partial(self._evaluate, link, fn) for fn in link.pair.shared]
        was = push_hooks(self.pack, self.unpack)
        try:
            if closed.learned:
                with self._seen():
                    return link.pair.forward(*shared, x, *args, **kwargs)
            with Reading() as reading, self._seen():
                y = link.pair.forward(*shared, x, *args, **kwargs)
            closed.learn(reading.read)
            return y
        finally:
            pop_hooks(was)

    def _evaluate(self, link: Link, fn: Callable, *args: Any, **kwargs: Any) -> Any:
        """The first evaluation of a shared function."""
        if link.evaluations and link.around.buffers:
            link.around.mark()
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            given = args
        else:
            own = {id(t) for t in link.own}
            given = [t for t in tree.tensors((args, kwargs)) if id(t) not in own]
        states = states_of(self.generators) if self.generators else None
        evaluation = _Evaluation(fn, len(self._like), given, states)
        link.evaluations.append(evaluation)
        result = fn(*args, **kwargs)
        evaluation.end = len(self._like)
        return result

    def _keep(self, link: Link, xs: Tensors) -> None:
        """Keep the tensors of x that the inverse does not give."""
        for i in link.block.kept(len(xs)):
            link.kept[i] = Slot(xs[i])
        if link.kept:
            note_kept(xs, link.kept)

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
            assert t is not None
            if storage_of(t) == storage_of(tensor) and t.numel() == tensor.numel():
                same = t.shape == tensor.shape and t.stride() == tensor.stride()
                if same or (t.is_contiguous() and tensor.is_contiguous()):
                    return partial(self._fetched, saved.number, tensor.shape)
        return None

    def _fetched(self, n: int, shape: torch.Size) -> torch.Tensor:
        with self._lock:
            return self._found(n).reshape(shape)

    def inverse(self, ys: Tensors) -> Tensors:
        """The tensors of x of a run of one block, from those of any y."""
        self._origin = []
        with self._entered() as (enter, leave, _):
            return [leave(x) for x in self._inverted_by(self.links[0], ys, enter, None)]

    def once_more(self, x: Any) -> Any:
        """y of a run of one block at any x, with the same random numbers."""
        link = self.links[0]
        with self._entered() as (enter, _, _), link.around.again(0, enter):
            if link.states is not None:
                self._draw(link.states)
            args, kwargs = link.given(enter)
            return link.pair.apart(link.pair.forward(*link.pair.shared, x, *args, **kwargs))[0]

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
            torch._C._set_grad_enabled(False)  # in this node: nobody can differentiate once more at this level
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
            self._restore(k)
            found = self._saved[n - self._starts[k]]
            assert found is not None
        return found

    def _late(self, n: int) -> InvFuncError:
        link = self.links[bisect_right(self._starts, n) - 1]
        return told(ModifiedError(_LATE.format([*self._like[n][0]])), self._where(link))

    def release(self) -> None:
        self._now, self._saved, self._state = None, [], None

    def back(self, ys: Tensors) -> Tensors:
        if self._state is None:
            self._state = len(self.links), ys
        with self._entered() as (enter, leave, _):
            while self._state[0]:
                k = self._state[0] - 1
                self._state = k, [leave(x) for x in self._inverted(self.links[k], self._state[1], enter, None)]
        return self._state[1]

    def _restore(self, k: int) -> None:
        """Have at hand what autograd saved of a link."""
        self._now, self._saved = None, []
        if self._state is None or self._state[0] < k:
            self._state = len(self.links), self._output(k)
        end = self._starts[k + 1] if k + 1 < len(self.links) else len(self._like)
        link, saved = self.links[k], [None] * (end - self._starts[k])
        with self._entered() as (enter, leave, kept):
            while self._state[0] > k + 1:
                at, state = self._state
                self._state = at - 1, [leave(x) for x in self._inverted(self.links[at - 1], state, enter, None)]
            at, xs = self._state
            if at == k + 1:
                xs = [leave(x) for x in self._inverted(link, xs, enter, saved)]
                self._state = k, xs
            if any(t is None for t in saved):
                try:
                    self._evaluated(link, xs, enter, saved)
                except InvFuncError as error:
                    raise told(error, self._where(link)) from error.__cause__
            saved = [kept(t) for t in saved]
        if k == 0:
            self.fill(xs)
        self._now, self._saved, self._versions, self._left = k, saved, [version(t) for t in saved], len(saved)

    def _output(self, k: int) -> Tensors:
        try:
            return self.output()
        except InvFuncError as error:
            raise told(error, self._where(self.links[k])) from error.__cause__

    @contextmanager
    def _entered(self) -> Iterator[tuple[Callable, Callable, Callable]]:
        """The level of the run, entered again, and generators that are put back."""
        draws = any(link.states is not None for link in self.links)
        with drawing(self.generators) if draws else nullcontext(), self._level.again() as level:
            yield level

    def _inverted(self, link: Link, ys: Tensors, enter: Callable, saved: list | None) -> Tensors:
        """The tensors of x, from those of y; what autograd saves of shared functions is put into `saved`."""
        try:
            return self._inverted_by(link, ys, enter, saved)
        except InvFuncError as error:
            raise told(error, self._where(link)) from error.__cause__

    def _where(self, link: Link) -> str:
        return f"{link.block!r}, in the backward pass" if self._done else f"{link.block!r}(x, ...)"

    def _inverted_by(self, link: Link, ys: Tensors, enter: Callable, saved: list | None) -> Tensors:
        block, pair = link.block, link.pair
        if link is self.links[0] and self._origin and self._done:
            held = [x for of, then in self._origin if (x := of()) is not None and version(x) == then]
            if len(held) == len(self._origin):
                return [alive(x).detach() for x in held]
        if len(link.kept) == len(link.like):
            return [link.kept[i].get() for i in range(len(link.like))]
        k = self.links.index(link)
        form = self.links[k + 1].form if k + 1 < len(self.links) else self._form
        assert form is not None
        args, kwargs = link.given(enter)
        if block.known.differentiates:
            ys = [enter(alive(t), differentiable(t)) for t in ys]
        ys = [alive(t) for t in ys]
        versions = [version(t) for t in ys]
        y, replays = form.join(ys), link.states is not None or bool(link.around.buffers)
        at = len(link.evaluations)
        outs: dict[int, Any] = {}
        own = {id(t) for t in tree.tensors((args, kwargs))}

        def again(fn: Callable, *given: Any, **named: Any) -> Any:
            nonlocal at
            at -= 1
            if at < 0 or link.evaluations[at].fn is not fn:
                raise InverseError(_SHARED)
            out = self._once_more(link, at, fn, given, named, enter, own, saved)
            outs[at] = out
            return tree.map_tensors(torch.Tensor.detach, out)

        shared = [partial(again, fn) for fn in pair.shared] if saved is not None or replays else pair.shared
        if link.states is not None and not pair.shared:
            self._draw(link.states)
        where = torch.enable_grad() if block.known.differentiates else torch.no_grad()
        inverse = pair.inverse_of(link.form, link.like, {i: slot.get() for i, slot in link.kept.items()})
        last = len(link.around.buffers[0][3]) - 1 if link.around.buffers else 0
        with where, link.around.again(last, enter, restarts=not pair.shared):
            try:
                x = inverse(*shared, y, *link.hidden, *args, **kwargs)
            except TypeError as error:
                error.add_note(_called(link, (y, *link.hidden, *args), kwargs))
                raise
        if [version(t) for t in ys] != versions:
            raise ModifiedError(
                "f_inv writes into y, which it was given. Write y = y - z in place of y -= z, or give it a copy: "
                "lambda y: f_inv(y.clone())."
            )
        if at and outs:
            raise InverseError(_SHARED)
        found, xs = link.tensors_of(x), []
        for i, (t, like) in enumerate(zip(found, link.like, strict=True)):
            xs.append(link.kept[i].get() if i in link.kept else like.checked(t, link, i))
        if link.looks is not None:
            looks = [None if i in link.kept else look for i, look in enumerate(link.looks)]
            compare(block, looks, xs, link.names(), ys)
        if saved is not None and outs and any(t is None for t in saved):
            self._recalled(link, xs, outs, enter, saved, args, kwargs)
        return xs

    def _draw(self, states: States) -> None:
        for generator, state in zip(self.generators, states, strict=True):
            generator.set_state(state)

    def _once_more(
        self, link: Link, at: int, fn: Callable, args: tuple, kwargs: dict, enter: Callable, own: set[int], saved: Any
    ) -> Any:
        """A shared function again, with what autograd saves."""
        evaluation = link.evaluations[at]
        if len(args) == 1 and not kwargs and type(args[0]) is torch.Tensor:
            like = evaluation.given[0]
            args = (enter(like.laid_out(args[0]), like.needs),)
        else:
            likes = iter(evaluation.given)

            def entered(t: torch.Tensor) -> torch.Tensor:
                like = next(likes, None)
                return t if like is None else enter(like.laid_out(t), like.needs)

            args, kwargs = tree.map_tensors(lambda t: t if id(t) in own else entered(t), (args, kwargs))
        if evaluation.states is not None:
            self._draw(evaluation.states)
        with link.around.again(at, enter) if link.around.buffers else nullcontext():
            if saved is None:
                return fn(*args, **kwargs)
            first, end = evaluation.start, evaluation.end
            with torch.enable_grad():
                out, found = self._saves(partial(fn, *args, **kwargs), [*range(first, end)])
        saved[first - link.start : end - link.start] = found
        return out

    def _recalled(
        self, link: Link, xs: Tensors, outs: dict, enter: Callable, saved: list, args: tuple, kwargs: dict
    ) -> None:
        """What autograd saves beside the shared functions, whose results are known."""
        at = -1

        def recall(*_: Any, **__: Any) -> Any:
            nonlocal at
            at += 1
            return tree.map_tensors(lambda t: enter(t, needs_grad(t)), outs[at])

        missing = [link.start + i for i, t in enumerate(saved) if t is None]
        x = self._x(link, xs, enter)
        with torch.enable_grad(), link.around.again(0, enter):
            run = partial(link.pair.forward, *[recall] * len(link.pair.shared), x, *args, **kwargs)
            _, found = self._saves(run, missing, stop=True)
        for n, t in zip(missing, found, strict=True):
            saved[n - link.start] = t

    def _evaluated(self, link: Link, xs: Tensors, enter: Callable, saved: list) -> None:
        """What autograd saves of f at x."""
        if link.states is not None:
            self._draw(link.states)
        args, kwargs = link.given(enter)
        x = self._x(link, xs, enter)
        with torch.enable_grad(), link.around.again(0, enter):
            run = partial(link.pair.forward, *link.pair.shared, x, *args, **kwargs)
            _, saved[:] = self._saves(run, [*range(link.start, link.start + len(saved))], stop=True)

    @staticmethod
    def _x(link: Link, xs: Tensors, enter: Callable) -> Any:
        return link.form.join([enter(x, like.needs) for x, like in zip(xs, link.like, strict=True)])

    def _saves(self, fn: Callable, wanted: list[int], stop: bool = False) -> tuple[Any, Tensors]:
        """The result of a function and what autograd saves in it, which has to be like that of some numbers."""
        count = len(wanted)
        collected = _Collected([self._like[n] for n in wanted], stop)
        out = None
        was = push_hooks(collected.pack, collected.saved.__getitem__)
        try:
            if count or not stop:
                with self._forms():
                    out = fn()
        except _Enough:
            pass
        finally:
            pop_hooks(was)
        if len(collected.saved) != count:
            raise ReplayError(
                f"evaluated again, the function does something else: autograd saves {len(collected.saved)} tensors, "
                f"where it was {count}. {CHANGES}"
            )
        return out, collected.saved


def _called(link: Link, args: tuple, kwargs: dict[str, Any]) -> str:
    """How an inverse was called that has failed."""
    more = [type(a).__name__ for a in args] + [f"{name}={type(a).__name__}" for name, a in kwargs.items()]
    return (
        f"{describe(link.pair.inverse)} was called with ({', '.join(more)}), in the backward pass of {link.block!r}: "
        "f_inv gets y and then the further arguments of f. Let it take them, as in lambda y, w: ..."
    )


_WRITES = (
    "the function writes into x, which it was given. Take inplace=False in its first layers, or give them a copy: "
    "lambda x: f(x.clone())."
)
_SHARED = (
    "the inverse evaluates a shared function more or less often than f, or in another order. It has to evaluate all of "
    "them, in the reverse order of f, at the same arguments; or leave shared= out."
)
_LATE = (
    "a tensor of shape {} that is needed to compute the gradient has been modified by an inplace operation. Write "
    "t = t + z in place of t += z."
)
