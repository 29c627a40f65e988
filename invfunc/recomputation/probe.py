"""Whether a tensor that is computed again is what it was: some of its entries are kept, and compared."""

from __future__ import annotations

import itertools
import math
from array import array
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from itertools import compress
from typing import Any, NamedTuple

import torch

from invfunc import thresholds
from invfunc._torch.functorch import batch_first, dispatched, is_zero, plainly, transforming, unwatched, unwrapped
from invfunc._torch.levels import watching
from invfunc.recomputation.places import places_of
from invfunc.recomputation.rounding import Error, known_at_once, largest, mean_size, precision
from invfunc.recomputation.sums import Sum


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
        self._most = most_of(len(tensors), most)
        self._without, self._sums = without, sums
        self._turn = next(_TURNS)
        self._then = self._look(tensors, sized=True)

    def _look(self, tensors: Sequence[torch.Tensor], sized: bool) -> list[Look | None]:
        if dispatched():
            return [None] * len(tensors)
        how = self._most, self._turn, self._sums, sized
        if all(map(_is_ordinary, tensors)):
            return [None if i in self._without else _look_at_once(t, *how) for i, t in enumerate(tensors)]
        with unwatched(), plainly() if transforming() else nullcontext():
            return [None if i in self._without else _look(t, *how) for i, t in enumerate(tensors)]

    def compare(self, tensors: Sequence[torch.Tensor]) -> Comparison:
        """The tensors beside those that there were."""
        return Comparison(self._then, self._look(tensors, sized=False), faint_of(tensors))

    def errors(self, tensors: Sequence[torch.Tensor]) -> list[Error]:
        """How far the tensors are from those that there were; 0 where nothing can be said."""
        return self.compare(tensors).errors()

    def size(self) -> float:
        """The mean size of the entries, which errors are relative to."""
        numbers = [a for look in self._then if look for a in torch.as_tensor(look.entries).tolist()]
        return mean_size(torch.tensor(numbers, dtype=torch.float64)) or 1.0


def most_of(number: int, most: int | None = None) -> int:
    """How many entries are looked at of each of so many tensors, where it is said of all of them."""
    return max(8, (most or thresholds.PROBED) // max(1, number))


def faint_of(tensors: Sequence[torch.Tensor]) -> float:
    """The size beside all of them up to which a tensor is `faint`."""
    return min(1.0, _ROUNDINGS * precision(t.dtype for t in tensors) ** 0.5)


def probed(xs: Sequence[torch.Tensor], values: Sequence[torch.Tensor] | None, without: Sequence[int]) -> Probe:
    """That of x, whose `values` may be at hand without the wrappers of the transforms of torch.func around us."""
    with nullcontext() if values is None else plainly():
        return Probe(values or xs, without=without, sums=True)


class Look(NamedTuple):
    """What is seen of a tensor."""

    shape: torch.Size
    entries: Any
    """Some of them: numbers, or where these are not known yet another tensor."""
    sum: Sum | None
    """That of all, where it is asked for and these are not all."""


class Comparison:
    """What is seen of tensors, beside what was seen of others.

    What is `faint` beside all of them may be nothing but rounding, as the log-determinant of rotations is, and is
    measured by them.
    """

    def __init__(self, then: Sequence[Look | None], now: Sequence[Look | None], faint: float) -> None:
        self._kept = [look for look in then if look is not None]
        self._pairs = [_pair(was, came) for was, came in zip(then, now, strict=True)]
        self._faint = faint

    def errors(self) -> list[Error]:
        """How far each tensor is from the other; 0 where nothing can be said."""
        sizes = [_size(look.entries) for look in self._kept]
        whole = [s if look.sum is None else look.sum.size for s, look in zip(sizes, self._kept, strict=True)]
        return [0.0 if pair is None else self._error(*pair, sizes, whole) for pair in self._pairs]

    def _error(self, was: Look, came: Look, sizes: list[Any], whole: list[Any]) -> Error:
        error = _error(was.entries, came.entries, sizes, self._faint)
        if was.sum is None or came.sum is None:
            return error
        return largest([error, was.sum.error(came.sum, self._faint, whole)])

    def hidden(self) -> Error:
        """How far the entries of ordinary size are from what they were, where a few are so large that they hide it."""
        return largest([_hidden(was.entries, came.entries) for was, came in filter(None, self._pairs)])

    def crossed(self) -> tuple[int, int]:
        """How many entries, such as zeros, are on another side of zero than they were, of how many."""
        both = [ab for was, came in filter(None, self._pairs) for ab in _numbers(was, came)]
        return sum((a > 0) != (b > 0) for a, b in both), len(both)


def _numbers(was: Look, came: Look) -> Iterable[tuple[float, float]]:
    return zip(*(torch.as_tensor(look.entries).tolist() for look in (was, came)), strict=True)


def _pair(was: Look | None, came: Look | None) -> tuple[Look, Look] | None:
    if was is None or came is None or was.shape != came.shape:
        return None
    return (was, came) if isinstance(was.entries, torch.Tensor) == isinstance(came.entries, torch.Tensor) else None


_TURNS = itertools.count()
"""Each probe looks at other places than the one before."""


def _look(tensor: torch.Tensor, most: int, turn: int, sums: bool, sized: bool) -> Look | None:
    """What is seen of a tensor; None if nothing can be said of it."""
    tensor = batch_first(tensor)
    if type(tensor) is not torch.Tensor or tensor.layout is not torch.strided or tensor.is_meta:
        return None
    shape, at_once = tensor.shape, known_at_once(tensor.device)
    places = places_of(shape, most)
    if places.count == 0 or tensor.is_quantized or is_zero(tensor) or (not at_once and capturing(tensor.device)):
        return None
    part = places.of(tensor, turn)
    if part.is_complex():
        part = torch.view_as_real(part.resolve_conj()).flatten()
    total = Sum.of(tensor, sized) if sums and shape.numel() > most else None
    if at_once:
        return Look(shape, part.tolist(), total)
    return Look(shape, part.to(torch.float32 if part.dtype.itemsize < 4 else part.dtype, copy=True), total)


def _is_ordinary(tensor: torch.Tensor) -> bool:
    """Whether a tensor is as most are: what takes the others a while is nothing to look for in it."""
    if type(tensor) is not torch.Tensor or tensor.dtype not in ORDINARY_DTYPES or unwrapped(tensor) is not None:
        return False
    strided = (
        known_at_once(tensor.device)
        and tensor.layout is torch.strided
        and tensor.is_contiguous()
        and not is_zero(tensor)
    )
    return strided and tensor.numel() > 0 and not watching()


ORDINARY_DTYPES = (torch.float32, torch.float64)


def _look_at_once(tensor: torch.Tensor, most: int, turn: int, sums: bool, sized: bool) -> Look:
    """What is seen of an ordinary tensor."""
    tensor, shape = tensor.detach(), tensor.shape
    entries = array("d", places_of(shape, most).of(tensor, turn).tolist())  # a quarter of the memory of a list
    if not sums or tensor.numel() <= most:
        return Look(shape, entries, None)
    size = torch.linalg.vector_norm(tensor).item() if sized else 1.0
    return Look(shape, entries, Sum(tensor.dtype, tensor.sum().item(), size))


def capturing(device: torch.device) -> bool:
    """Whether what runs on a device is recorded in a graph, so that nobody may wait for it."""
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _error(then: Any, now: Any, sizes: Sequence[Any], faint: float) -> Error:
    """The error of some entries, beside the sizes of all that were kept."""
    if isinstance(then, torch.Tensor):
        distance, size = _apart_on_device(then, now)
        there = [s for s in sizes if isinstance(s, torch.Tensor) and s.device == then.device]
        whole = torch.stack(there).sum()
        size = torch.maximum(size, faint * whole)
        return torch.where(distance == 0, 0.0, distance / torch.where(size > 0, size, 1.0))
    if then == now:
        return 0.0
    distance, size = _apart(then, now)
    whole = sum(s for s in sizes if isinstance(s, float))
    return distance / (max(size, faint * whole) or whole or 1.0)


_ROUNDINGS = 16.0
"""How many roundings of all tensors an error of a faint one may be."""


def _size(entries: Any) -> Any:
    """The root of the sum of squares of entries that are finite."""
    if isinstance(entries, torch.Tensor):
        return _apart_on_device(entries, entries)[1]
    size = math.hypot(*entries)
    return size if math.isfinite(size) else math.hypot(*filter(math.isfinite, entries))


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
        sizes = list(map(abs, then))
        ranked = sorted(sizes)
        if not (math.isfinite(sum(ranked)) and ranked[0]):
            ranked = sorted(filter(math.isfinite, filter(None, sizes)))
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
