"""Whether a tensor that is computed again is what it was: some of its entries are kept, and compared."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from functools import lru_cache
from itertools import compress
from typing import Any

import torch

from invfunc import thresholds
from invfunc._functorch import batch_first, dispatched, is_zero, unwatched
from invfunc.invertible.rounding import Error, known_at_once, largest, mean_size, precision
from invfunc.invertible.sums import Sum


class Probe:
    """Some entries of tensors.

    Args:
        tensors: they are not kept.
        most: how many entries of all of them.
        without: the places of those that are not looked at.
        sums: also compare the sums of all entries, which tell of a few that are far off, as of one sample.
    """

    def __init__(
        self,
        tensors: Sequence[torch.Tensor],
        most: int | None = None,
        without: Sequence[int] = (),
        sums: bool = False,
    ) -> None:
        self._most = max(8, (most or thresholds.PROBED) // max(1, len(tensors)))
        self._without = without
        self._turn = next(_TURNS)
        self._then = [] if dispatched() else self._entries(tensors)
        self._sums: list[Sum | None] = [None] * len(tensors)
        if sums and self._then:
            self._sums = [
                None if e is None else Sum.of(t, self._most) for t, e in zip(tensors, self._then, strict=True)
            ]

    def errors(self, tensors: Sequence[torch.Tensor]) -> list[Error]:
        """How far the tensors are from those that there were; 0 where nothing can be said."""
        if not self._then or dispatched():
            return [0.0] * len(tensors)
        faint = min(1.0, _ROUNDINGS * precision(t.dtype for t in tensors) ** 0.5)
        errors = _errors(self._then, self._entries(tensors), faint)
        if not any(self._sums):
            return errors
        sizes = [_size(e) if s is None else s.size for e, s in zip(self._then, self._sums, strict=True)]
        return [
            e if s is None else largest([e, s.error(t, faint, sizes)])
            for e, s, t in zip(errors, self._sums, tensors, strict=True)
        ]

    def hidden(self, tensors: Sequence[torch.Tensor]) -> Error:
        """How far the entries of ordinary size are from what they were, where a few are so large that they hide it."""
        if not self._then or dispatched():
            return 0.0
        pairs = zip(self._then, self._entries(tensors), strict=True)
        both = [(a[1], b[1]) for a, b in pairs if a is not None and b is not None and a[0] == b[0]]
        return largest([_hidden(a, b) for a, b in both if isinstance(a, list) == isinstance(b, list)])

    def size(self) -> float:
        """The mean size of the entries, which errors are relative to."""
        numbers = [a for entries in self._then if entries for a in torch.as_tensor(entries[1]).tolist()]
        return mean_size(torch.tensor(numbers, dtype=torch.float64)) or 1.0

    def _entries(self, tensors: Sequence[torch.Tensor]) -> list[_Entries | None]:
        with unwatched():
            return [None if i in self._without else _entries(t, self._most, self._turn) for i, t in enumerate(tensors)]


_Entries = tuple[torch.Size, "list[float] | torch.Tensor"]
"""The shape of a tensor, and some of its entries: numbers, or where these are not known yet another tensor."""


_TURNS = itertools.count()
"""Each probe looks at other places than the one before."""


def _entries(tensor: torch.Tensor, most: int, turn: int) -> _Entries | None:
    tensor = batch_first(tensor)
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    shape = tensor.shape
    count, step, left = _places(shape, most)
    if count == 0 or tensor.is_quantized or is_zero(tensor):
        return None
    start = turn * _FAR % left
    if tensor.is_contiguous():
        part = tensor.as_strided((count,), (step,), tensor.storage_offset() + start)
    else:
        part = tensor[torch.unravel_index(torch.arange(count, device=tensor.device) * step + start, shape)]
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj()).flatten()
    if known_at_once(tensor.device):
        return shape, part.tolist()
    if _capturing(tensor.device):
        return None
    return shape, part.to(torch.float32 if part.dtype.itemsize < 4 else part.dtype, copy=True)


def _capturing(device: torch.device) -> bool:
    """Whether what runs on a device is recorded in a graph, so that nobody may wait for it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


_FAR = 10007
"""A prime number: how far apart the places are at which probes begin, and the steps that are tried."""


@lru_cache(1024)
def _places(shape: torch.Size, most: int) -> tuple[int, int, int]:
    """How many entries, how far apart, and how many places there are to begin."""
    number = shape.numel()
    if number <= most:
        return number, 1, 1
    widest = number // most
    steps = {widest - i * _FAR % (widest // 8 + 1) | 1 for i in range(24)}  # odd ones, as most sizes are even
    places = (range(0, number, step)[:most] for step in sorted(steps))
    best = max(places, key=lambda places: _spread(shape, places))
    return len(best), best.step, number - best[-1]


def _spread(shape: torch.Size, places: Sequence[int]) -> float:
    """The fraction of all rows, columns, channels ... that places lie in: the product over the axes."""
    spread, inner = 1.0, 1
    for size in reversed(shape):
        parts = min(size, len(places))
        spread *= len({place // inner % size * parts // size for place in places}) / parts
        inner *= size
    return spread


def _errors(then: Sequence[_Entries | None], now: Sequence[_Entries | None], faint: float) -> list[Error]:
    """The errors of tensors; what is that faint beside all of them may be nothing but rounding, as the log-determinant
    of rotations is, and is measured by them."""
    kept = [entries[1] for entries in then if entries is not None]
    return [_error(was, came, kept, faint) for was, came in zip(then, now, strict=True)]


def _error(was: _Entries | None, came: _Entries | None, kept: Sequence[Any], faint: float) -> Error:
    """The error of one tensor, of which there were some entries beside all that were `kept`."""
    if was is None or came is None or was[0] != came[0]:
        return 0.0
    a, b = was[1], came[1]
    if isinstance(a, list) and isinstance(b, list):
        if a == b:
            return 0.0
        distance, size = _apart(a, b)
        whole = sum(_apart(entries, entries)[1] for entries in kept if isinstance(entries, list))
        return distance / (max(size, faint * whole) or whole or 1.0)
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        distance, size = _apart_on_device(a, b)
        there = [entries for entries in kept if isinstance(entries, torch.Tensor) and entries.device == a.device]
        whole = torch.stack([_apart_on_device(entries, entries)[1] for entries in there]).sum()
        size = torch.maximum(size, faint * whole)
        return torch.where(distance == 0, 0.0, distance / torch.where(size > 0, size, 1.0))
    return 0.0


_ROUNDINGS = 16.0
"""How many roundings of all tensors an error of a faint one may be."""


def _size(entries: _Entries | None) -> Any:
    if entries is None:
        return 0.0
    there = entries[1]
    return _apart(there, there)[1] if isinstance(there, list) else _apart_on_device(there, there)[1]


def _apart(then: list, now: list) -> tuple[float, float]:
    """The distance of some numbers from what they were, and the size of that, over those that were finite."""
    size, distance = math.hypot(*then), math.dist(then, now)
    if math.isfinite(size) and not math.isnan(distance):
        return distance, size
    finite = [math.isfinite(a) for a in then]
    then, now = list(compress(then, finite)), list(compress(now, finite))
    return math.dist(then, now) if all(map(math.isfinite, now)) else math.inf, math.hypot(*then)


def _apart_on_device(then: torch.Tensor, now: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    finite = then.isfinite()
    distance = torch.where(finite, now - then, 0).float().norm()
    return distance.nan_to_num(math.inf, math.inf), torch.where(finite, then, 0).float().norm()


def _hidden(then: Any, now: Any) -> Error:
    if not isinstance(then, torch.Tensor):
        sizes = [abs(a) for a in then]
        ranked = sorted(size for size in sizes if 0 < size < math.inf)
        if not ranked or max(sizes) <= (most := _ORDINARY * ranked[(len(ranked) - 1) // 2]):
            return 0.0
        ordinary = [(a, b) for a, b, size in zip(then, now, sizes, strict=True) if size <= most and math.isfinite(b)]
        distance, size = _apart([a for a, _ in ordinary], [b for _, b in ordinary])
        return distance / size if distance and size else 0.0
    sizes = then.abs()
    most = _ORDINARY * torch.where(sizes > 0, sizes, math.nan).nanmedian()
    ordinary = (sizes <= most) & now.isfinite()
    distance, size = (torch.where(ordinary, t, 0).float().norm() for t in (now - then, then))
    return torch.where((sizes > most).any() & (distance > 0), distance / size, 0.0)


_ORDINARY = 16.0
"""How many times the median of all sizes an entry may have that does not hide others."""
