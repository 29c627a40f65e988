"""A function in as few chunks as a memory budget allows."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from invfunc import thresholds, tree
from invfunc._torch.functorch import dispatched, transforming
from invfunc._torch.generators import set_states, state_of, torchs_own
from invfunc.arguments.problem import batch_dims, batch_size, some_samples
from invfunc.budget import in_bytes, peak_of, settings, told
from invfunc.callables import describe
from invfunc.errors import ArgumentError, BudgetError, InvFuncError
from invfunc.report import Explanation
from invfunc.statistic import Statistic
from invfunc.transform import ArgumentNames, Transform

Chunks = dict[str, int]
"""Numbers of chunks along each axis that is divided."""
MARGIN, RESERVE = 1.1, 2**21
"""Factor on what was measured, and bytes beside it, for what no meter sees: pages, buffers of kernels, objects."""
TRIES, KEPT = 6, 64
"""Sizes of chunks that are measured along an axis at most, and kinds of calls whose chunks are kept."""
GAIN = 1.2
"""Factor by which a larger chunk has to be larger to be worth a try."""
_ORDER = ("samples", "outputs", "params")


def needed(peak: float) -> int:
    """Bytes of a budget that is enough for a call whose peak was measured."""
    return math.ceil(MARGIN * peak) + RESERVE


@dataclass(frozen=True)
class Choice:
    """Sizes of chunks along each axis, the bytes they need, and the largest batch that they serve."""

    sizes: Chunks
    lengths: Chunks
    need: int
    most: float

    def chunks(self, n: int) -> Chunks:
        """Numbers of chunks for a batch of n samples."""
        numbers = {a: math.ceil((n if a == "samples" else self.lengths[a]) / size) for a, size in self.sizes.items()}
        return {axis: number for axis, number in numbers.items() if number > 1}


@dataclass(frozen=True)
class BudgetedCall:
    """Arguments of a call: the batch axis of each, the number of samples, and the lengths of the axes to divide."""

    args: tuple
    kwargs: dict[str, Any]
    names: Any
    dims: dict[int, int | None]
    lengths: Chunks

    @property
    def n(self) -> int:
        return self.lengths["samples"]

    @property
    def device(self) -> torch.device:
        return next((x.device for x in tree.tensors(self.args)), torch.device("cpu"))

    def first(self, n: int) -> tuple:
        """Arguments of the first n samples."""
        return tuple(some_samples(x, self.dims.get(i), slice(0, n)) for i, x in enumerate(self.args))

    def key(self) -> Hashable:
        """Description of the call that does not depend on its number of samples."""

        def of(x: Any, dim: int | None = None) -> Hashable:
            if not isinstance(x, torch.Tensor):
                return x if isinstance(x, (int, float, str, bool)) else type(x)
            shape, steps = list(x.shape), x.stride() if dim is None and x.layout is torch.strided else ()
            if dim is not None:
                del shape[dim]
            return tuple(shape), steps, x.dtype, x.device, x.layout, x.requires_grad

        given = [(i, of(x, self.dims.get(i))) for i, arg in enumerate(self.args) for x in tree.leaves(arg)]
        return (*given, *map(of, tree.leaves(self.kwargs)), *self.kwargs, *settings())


@dataclass(frozen=True, repr=False)
class Budgeted(Transform):
    """A function in the chunks that its arguments ask for."""

    f: Callable
    make: Callable[[Chunks, bool], Any]
    """Makes the function in some chunks; the second argument says whether it may tell of its progress."""
    axes: tuple[str, ...]
    size: int | float
    text: str
    in_dims: Any = 0
    has_aux: bool = False
    choices: dict[Hashable, Choice] = field(default_factory=dict, compare=False)
    """Chunks that were chosen, by the kind of call."""
    outermost = budgeted = True  # what is around it would have memory of its own

    def __repr__(self) -> str:
        return f"chunked({describe(self.f)}, {self.text})"

    @property
    def owned(self) -> bool:
        return isinstance(self.f, Statistic)

    @property
    def several(self) -> bool:
        return isinstance(self.f, Statistic) and self.f.several

    def names(self, count: int) -> Any:
        return self.f.names(count) if isinstance(self.f, Transform) else ArgumentNames(self.f, count)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        call = self.call(args, kwargs, names)
        chunks = self.choice(call).chunks(call.n) if call.n else {}
        return self.make(chunks, True).compute(args, kwargs, names)

    def call(self, args: tuple, kwargs: dict[str, Any], names: Any) -> BudgetedCall:
        """The call, with the lengths of the axes along which it can be divided."""
        if transforming() or dispatched():
            raise ArgumentError(
                "within a transform of torch.func or a dispatch mode the memory of a call cannot be measured. Give the "
                "number of chunks: chunked(t, n)."
            )
        most = thresholds.TRIED_PASSES
        if not isinstance(self.f, Statistic):
            dims = batch_dims(self.in_dims, list(range(1, len(args))))
            return BudgetedCall(args, kwargs, names, dims, {"samples": batch_size(args, dims, names)})
        problem = self.f.problem(args, kwargs, names)
        drawn = [s.drawing.count if s.drawing else None for s in self.f.members or (self.f,)]
        columns = max([d or most for d in drawn])  # of columns that are not drawn nobody knows the number beforehand
        lengths: Chunks = {"samples": problem.n, "outputs": columns, "params": len(problem.leaves)}
        return BudgetedCall(args, kwargs, names, problem.dims, lengths)

    def choice(self, call: BudgetedCall) -> Choice:
        """Chunks within the budget: those that were chosen before, as long as they serve, or measured ones."""
        budget, key = in_bytes(self.size, call.device), call.key()
        known = self.choices.pop(key, None)
        if known is None or call.n > known.most or known.need > budget:
            known = self._measured(call, budget)
        self.choices[key] = known
        if len(self.choices) > KEPT:
            self.choices.pop(next(iter(self.choices)))
        return known

    def _measured(self, call: BudgetedCall, budget: int) -> Choice:
        """Chunks of the first axis that brings the call within the budget, on top of single entries of those before."""
        before, least, failed = Chunks(), list[tuple[int, Chunks]](), None
        for axis in [axis for axis in _ORDER if axis in self.axes]:
            try:
                search = _Search(self, call, axis, before, (budget - RESERVE) / MARGIN)
                found = search.run()
            except InvFuncError as error:  # it cannot be divided so
                failed = failed or error
                continue
            if found is not None:
                return found
            least += [(needed(peak), {**before, axis: size}) for size, peak in search.peaks.items()]
            before[axis] = 1
        if not least:
            assert failed is not None
            raise failed
        need, sizes = min(least, key=lambda each: each[0])
        raise _too_little(budget, need, Choice(sizes, call.lengths, need, call.n).chunks(call.n))

    def peak(self, call: BudgetedCall, chunks: Chunks, n: int) -> int:
        """Bytes that the call takes in some chunks on its first n samples; random numbers come again behind it."""
        drawn = [d.generator for d in self.f.drawings] if isinstance(self.f, Statistic) else []
        before, f = [(g, state_of(g)) for g in (*torchs_own(), *drawn)], self.make(chunks, False)
        given = call.first(n) if n < call.n else call.args
        try:
            return peak_of(lambda: f.compute(given, call.kwargs, call.names), call.device)
        finally:
            set_states(before)


class _Search:
    """A search for the largest chunk along an axis with which a call has room, by measured calls.

    Over samples these are calls on two chunks. Results and columns of the samples behind them come on top: twice the
    bytes that a third sample brings, as what is joined is there twice.
    """

    def __init__(self, t: Budgeted, call: BudgetedCall, axis: str, before: Chunks, room: float) -> None:
        self.t, self.call, self.axis, self.before, self.room = t, call, axis, before, room
        self.peaks: dict[int, float] = {}
        """Bytes that the call takes with chunks of a size."""
        self._known: dict[Any, int] = {}
        few = axis == "samples" or "samples" in before
        self.growth = max(0, self._measured(1, 3) - self._measured(1, 2)) if few and call.n > 2 else 0

    def run(self) -> Choice | None:
        """The largest size that was tried and for which there is room, if there is any."""
        size, large, length = 1, self.call.lengths[self.axis] + 1, self.call.lengths[self.axis]
        if self._peak(size) > self.room:
            return None
        for _ in range(TRIES):
            tried = self._next(size, large)
            if tried < min(GAIN * size, length) or tried == size:
                break
            if self._peak(tried) <= self.room:
                size = tried
            else:
                large = tried
        need, most = needed(self.peaks[size]), self._most(size)
        if self.axis == "samples" and size >= length:
            size = int(most)
        return Choice({**self.before, self.axis: size}, self.call.lengths, need, most)

    def _next(self, size: int, large: int) -> int:
        """The size that should take the room, as bytes grow from one measured size to the next; first, at least 2."""
        other = large if large in self.peaks else max([s for s in self.peaks if s < size], default=0)
        slope = (self.peaks[size] - self.peaks.get(other, 0)) / (size - other)
        more = (self.room - self.peaks[size]) / slope if slope > 0 else large
        return max(size, min(large - 1, int(size + max(min(more, large), not other))))

    def _most(self, size: int) -> float:
        """The largest batch for which there is room with a size; of one in a single chunk, at most twice as many."""
        n, left = self.call.n, self.room - self.peaks[size]
        if self.axis == "samples" and size >= n:
            return n + min(n, left * n // max(1, self.peaks[size]))
        if self.axis != "samples" and "samples" not in self.before:
            return n
        return n + left / (2 * self.growth) if self.growth else math.inf

    def _peak(self, size: int) -> float:
        if size not in self.peaks:
            n = self.call.n
            few = min(n, 2 * size if self.axis == "samples" else 2 if "samples" in self.before else n)
            self.peaks[size] = self._measured(size, few) + 2 * self.growth * (n - few)
        return self.peaks[size]

    def _measured(self, size: int, n: int) -> int:
        chunks = Choice({**self.before, self.axis: size}, self.call.lengths, 0, 0).chunks(n)
        key = n, *chunks.items()
        if key not in self._known:
            self._known[key] = self.t.peak(self.call, chunks, n)
        return self._known[key]


class BudgetedStatistic(Budgeted):
    """A statistic in the chunks that its arguments ask for."""

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """Explains how it would be computed at these arguments, and in how much memory."""
        call = self.call(args, kwargs, names)
        found, budget = self.choice(call), in_bytes(self.size, call.device)
        chunks = found.chunks(call.n)
        why = f"{_spelled(chunks)}, at most {told(found.need)} of {told(budget)}"
        return replace(self.make(chunks, False).explanation(args, kwargs, names), name=repr(self), why=why)


def _spelled(chunks: Chunks) -> str:
    """Chunks in words."""
    divided = [f"{n} chunks of {axis}" for axis, n in chunks.items()]
    return "in " + " and ".join(divided) if divided else "in one piece"


def _too_little(budget: int, need: int, chunks: Chunks) -> BudgetError:
    error = BudgetError(
        f"the call does not fit {told(budget)}. The least that it takes in up to {thresholds.TRIED_PASSES} chunks of "
        f"an axis is {told(need)}, {_spelled(chunks)}. Give memory={told(need)!r}, or a smaller batch."
    )
    error.least = need
    return error
