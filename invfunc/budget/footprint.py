"""The memory that a call would take: it is run without numbers, and its tensors are counted."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from traceback import clear_frames
from typing import Any

import torch

from invfunc import tree
from invfunc._alike import Spent, counted
from invfunc._torch.functorch import FakeTensorMode, NoNumbers, TorchDispatchMode, storage
from invfunc._torch.generators import set_states, state_of
from invfunc._torch.values import undecided
from invfunc._ways import straight
from invfunc.budget.beside import HEAP, filled, in_pages
from invfunc.budget.duration import duration
from invfunc.budget.scratch import scratch
from invfunc.errors import ArgumentError

BY_HAND = "Give the number of chunks: chunked(t, n)."
_DEVICE = torch.ops.prim.device.default


class _Enough(BaseException):
    """More is in use than was asked about; nobody else is to catch it."""


class Footprint(TorchDispatchMode):
    """Counts the bytes that are in use at once, and those that are read and written, until that is above a limit."""

    def __init__(self, limit: int | None = None) -> None:
        super().__init__()
        self.limit, self.over = limit, False
        self.live, self.counted = 0, 0
        self.work = 0.0
        """About how long the call takes, in nanoseconds."""
        self.at = ""
        """The operation at which the most was in use."""
        self.results = 0
        """The bytes of what the call returned."""
        self.undecided: list[str] = []
        """What depends on numbers, so that it may be otherwise in the call itself."""
        self.open: dict[str, Spent | None] = {}
        self.parts: dict[str, int] = {}
        self._libraries: dict[Hashable, int] = {}
        """What libraries keep, by what it is for."""
        self._known: dict[int, weakref.ref] = {}
        self._most = 0
        self._heap, self._filled = 0, 0
        """What small tensors took at most, and take now."""

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _DEVICE:  # a question of tensors without numbers: up to half of what comes by
            return func(*args)
        given = [x for x in tree.tensors((args, kwargs or {})) if not x.is_meta]
        for x in given:
            self._see(x, new=False)
        try:
            result = func(*args, **(kwargs or {}))
        except NoNumbers:
            self.undecided.append(f"what `{_name(func)}` reads")
            raise
        made = [x for x in tree.tensors((result,)) if not x.is_meta]
        for x in made:
            self._see(x, new=True)
        beside = scratch(func, given, made, args)
        if beside.kept:
            self._libraries[beside.of] = max(self._libraries.get(beside.of, 0), beside.kept)
        self.work += duration(func, given, made, args)
        self.use(self.live + beside.working, _name(func))
        return result

    def use(self, size: int, at: str = "") -> None:
        """Count so many bytes, beside those that libraries keep; at which operation they are in use, if at one."""
        size += self._holes
        self._most = max(self._most, size)
        if size + self.kept > self.counted:
            self.counted, self.at = size + self.kept, at or self.at
            if self.limit is not None and self.peak > self.limit:
                self.over = True
                raise _Enough

    @contextmanager
    def spending(self) -> Iterator[Spent]:
        """What is in use and done meanwhile."""
        spent, start, work, before = Spent(), self.live, self.work, self._most
        self._most = most = start + self._holes
        try:
            yield spent
        finally:
            spent.most, spent.left, spent.work = self._most - most, self.live - start, self.work - work
            self._most = max(before, self._most)

    @property
    def kept(self) -> int:
        """The bytes that libraries keep."""
        return sum(self._libraries.values())

    @property
    def peak(self) -> int:
        """The bytes that are never exceeded; of a call that ended early, those that are."""
        return filled(self.counted, self._heap)

    def _see(self, x: torch.Tensor, new: bool) -> None:
        memory = storage(x)
        key = id(memory)  # one object as long as there is the memory
        if key not in self._known:
            size = in_pages(memory.nbytes()) if new else 0
            self.live += size
            self._fill(size)
            self._known[key] = weakref.ref(memory, lambda _: self._gone(key, size))

    def _gone(self, key: int, size: int) -> None:
        self._known.pop(key, None)
        self.live -= size
        self._fill(-size)

    @property
    def _holes(self) -> int:
        return self._heap - self._filled

    def _fill(self, size: int) -> None:
        if abs(size) < HEAP:
            self._filled += size
            self._heap = max(self._heap, self._filled)


def _name(func: Any) -> str:
    return func.overloadpacket.__name__


def footprint(
    call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], drawn: Iterable[Any], limit: int | None = None
) -> Footprint:
    """What a call takes beside its arguments, from a run without numbers, which ends above the limit."""
    return straight(partial(_footprint, call, args, kwargs, [*drawn], limit))


def _footprint(
    call: Callable[..., Any], args: tuple, kwargs: dict[str, Any], drawn: Sequence[Any], limit: int | None
) -> Footprint:
    found, result = Footprint(limit), None
    with without_numbers((args, kwargs), drawn) as (given, named), _nothing_collected(), undecided() as more:
        try:
            with found, counted(found):
                result = call(*given, **named)
        except _Enough as end:
            clear_frames(end.__traceback__)  # which would keep what was alive then until the garbage is collected
        finally:
            found.undecided += more
    found.results = sum({id(m := storage(x)): m.nbytes() for x in tree.tensors((result,))}.values())
    return found


@contextmanager
def without_numbers(given: Any, drawn: Iterable[Any]) -> Iterator[Any]:
    """Where operations know sizes alone: what is given without its numbers; generators are as they were afterwards."""
    mode = FakeTensorMode(allow_non_fake_inputs=True)
    states = [(g, state_of(g)) for g in (torch.default_generator, *drawn)]
    try:
        with mode:
            yield tree.map_tensors(mode.from_tensor, given)
    finally:
        set_states(states)
        FakeTensorMode.cache_clear()  # what it keeps of each operation of each size would be there until the end


def certain(found: Footprint) -> Footprint:
    """What a call takes, if it takes it whatever the numbers are."""
    if found.undecided:
        raise unpredictable(f"{found.undecided[0]} depends on numbers")
    return found


def unpredictable(why: str) -> ArgumentError:
    """The error for a call of which nobody knows beforehand what it takes."""
    return ArgumentError(f"what it takes cannot be predicted: {why}. {BY_HAND}")


def warmed() -> None:
    """Have the libraries take what they keep for the whole process, which is not of one call."""
    _warmed(torch.get_num_threads())


@cache
def _warmed(_: int) -> None:
    """Once for each number of threads, each of which has buffers of its own."""
    ones = partial(torch.ones, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        x, slope = (ones(16, 64, 128).mT for _ in range(2))
        weight = ones(1).expand(128, 128, 1)
        torch.ops.aten.convolution_backward(slope, x, weight, None, [1], [0], [1], False, [0], 1, [True, True, False])
        torch.conv2d(ones(2, 64, 16, 16), ones(64, 64, 3, 3))
        x, slope, weight = ones(2, 64, 32, 32), ones(2, 128, 16, 16), ones(128, 64, 3, 3)  # some 2 MiB for its strides
        torch.ops.aten.convolution_backward(
            slope, x, weight, None, [2, 2], [1, 1], [1, 1], False, [0, 0], 1, [True, False, False]
        )
        torch.bmm(ones(4, 64, 64), ones(4, 64, 64))
        torch.mm(ones(512, 512), ones(512, 8192))  # for which MKL takes as much as for any of this dtype, some 5 MiB
        footprint(torch.mm, (ones(2, 2), ones(2, 2)), {}, [])


@contextmanager
def _nothing_collected() -> Iterator[None]:
    """Without the garbage collector: what nobody refers to is free at once, and what refers to itself is not."""
    on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if on:
            gc.enable()
