"""Small tensors of x that are looked at many at a time: a call of torch takes longer there than what it computes.

When a block takes them over they are held until there are some of them, and then seen by the same few calls. So are
those that inverses give back, which are compared when there are some, and at the latest when the backward pass ends.
One that may not be what it was is then compared once more by itself, as `probe` does.
"""

from __future__ import annotations

import itertools
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from invfunc import thresholds
from invfunc._torch.functorch import after_backward, backward_pass, is_zero, plainly, version
from invfunc.recomputation.places import places_of
from invfunc.recomputation.probe import ORDINARY_DTYPES, Comparison, Look, capturing, faint_of, most_of
from invfunc.recomputation.released import release
from invfunc.recomputation.rounding import precision
from invfunc.recomputation.sums import Sum

Tensors = Sequence[torch.Tensor]


class Seen(NamedTuple):
    """What is seen of some tensors, a row each."""

    entries: torch.Tensor
    """Some of each."""
    sums: torch.Tensor | None
    """The sum of all entries of each, if these are not all."""

    def of(self, row: int, shape: torch.Size, size: float) -> Look:
        """What is seen of one, by itself, whose size was this."""
        entries = self.entries[row]
        total = None if self.sums is None else Sum(entries.dtype, self.sums[row].item(), size)
        return Look(shape, entries.tolist(), total)


class Gathered:
    """Tensors of one shape, dtype and device, of blocks one after the other."""

    def __init__(self, like: torch.Tensor, most: int) -> None:
        self.shape, self._turn = like.shape, next(_TURNS)
        self._places = places_of(like.shape, most)
        self._number = min(_MOST, thresholds.GATHERED // like.numel())
        self._lock = threading.Lock()
        self._held: list[torch.Tensor] | None = []
        self._versions: list[int] = []
        self._written: set[int] = set()
        self._seen: Seen
        self._sizes: torch.Tensor
        """Of each, over all entries."""

    def add(self, x: torch.Tensor) -> int | None:
        """Hold one more; its row, or None if there is no place left."""
        with self._lock:
            if self._held is None:
                return None
            self._held.append(x.detach())
            self._versions.append(version(x))
            row = len(self._held) - 1
            if len(self._held) == self._number:
                self._let_go(self._held)
            return row

    def seen(self) -> tuple[Seen, torch.Tensor]:
        """What there was, with the sizes; no more is added."""
        with self._lock:
            if self._held is not None:
                self._let_go(self._held)
            return self._seen, self._sizes

    def _let_go(self, held: list[torch.Tensor]) -> None:
        self._written = {i for i, x in enumerate(held) if version(x) != self._versions[i]}
        with plainly(), torch.no_grad():
            flat = self._flat(held)
            seen, self._sizes = self._seen_of(flat), torch.linalg.vector_norm(flat, dim=1)
            self._seen, self._held = Seen(seen.entries.clone(), seen.sums), None

    def known(self, row: int) -> bool:
        """Whether one was not written by the caller before it was looked at, of those that were seen."""
        return row not in self._written

    def look(self, tensors: Tensors) -> Seen:
        """What is seen of tensors of this shape."""
        return self._seen_of(self._flat(tensors))

    def _flat(self, tensors: Tensors) -> torch.Tensor:
        return torch.stack(tuple(tensors)).reshape(len(tensors), -1)

    def _seen_of(self, flat: torch.Tensor) -> Seen:
        if self._places.count == flat.shape[1]:
            return Seen(flat, None)
        return Seen(self._places.of_rows(flat, self._turn), flat.sum(1))


class Glance:
    """The tensors of x of one block, each a row of what was gathered."""

    def __init__(self, rows: list[tuple[Gathered, int]]) -> None:
        self.rows = rows

    def wait(self, block: Any, xs: Tensors, slots: Sequence[Any]) -> None:
        """Compare what the inverse of a block gives, which is in some slots, with the others of its backward pass."""
        waiting = _waiting_now()
        waiting.blocks.append((block, self, xs, slots))
        waiting.number += len(xs)
        if self.rows[0][1] == 0 or waiting.number >= 2 * _MOST or not waiting.ends:  # the first one comes last
            waiting.settle()


def glanced(xs: Tensors) -> Glance | None:
    """Hold the tensors of x, which blocks gave out, where they are small; None where they are not."""
    most, open_ones, rows = len(xs), HERE.open, []
    if xs and xs[0].is_cuda and capturing(xs[0].device):
        return None
    for x in xs:
        if x.untyped_storage().nbytes() > _FEWEST * x.nbytes:  # which would be held too
            return None
        key = x.shape, x.dtype, x.device, most
        last = open_ones.get(key)
        gathered = None if last is None else last()
        row = None if gathered is None else gathered.add(x)
        if gathered is None or row is None:
            if not _is_small(x):
                return None
            gathered = Gathered(x, most_of(most))
            if len(open_ones) > _MOST:
                open_ones.clear()
            open_ones[key], row = weakref.ref(gathered), gathered.add(x)
        rows.append((gathered, row))
    return Glance(rows)


def _is_small(x: torch.Tensor) -> bool:
    return 0 < x.numel() * _FEWEST <= thresholds.GATHERED and x.dtype in ORDINARY_DTYPES and not is_zero(x)


_Blocks = list[tuple[Any, Glance, Tensors, Sequence[Any]]]
"""Blocks, what is known of their x, what came back, and where it is."""


class _Waiting:
    """What is to be compared in one backward pass, which alone keeps it: if it fails, nothing is, and no other pass may
    find it."""

    def __init__(self, ends: bool) -> None:
        self.ends, self.number = ends, 0
        self.blocks: _Blocks = []

    def settle(self) -> None:
        """Compare what there is."""
        blocks, self.blocks, self.number = self.blocks, [], 0
        if not blocks:
            return
        try:
            with plainly(), torch.no_grad():
                self._tell(blocks)
        finally:
            _forget(blocks)

    def _tell(self, blocks: _Blocks) -> None:
        for (block, _, xs, slots), (error, comparison) in zip(blocks, _compared(blocks), strict=True):
            tell = None
            if comparison is not None:
                error, tell = block.judged(comparison, xs)
            if tell is not None:
                tell()
            for slot in slots:
                slot.error, slot.waits = error, False

    def __del__(self) -> None:
        _forget(self.blocks)


def _forget(blocks: _Blocks) -> None:
    """Let go of what was given back and not compared."""
    for block, _, _, slots in blocks:
        unknown = [slot for slot in slots if slot.waits]
        release(unknown)
        for slot in unknown:
            slot.error, slot.waits = math.nan, False
        if unknown:
            block.forget()


def settle() -> None:
    """Compare what waits for that in the backward pass that is running."""
    waiting = HERE.waiting.get(backward_pass())
    if waiting is not None:
        waiting.settle()


def _compared(blocks: _Blocks) -> list[tuple[float, Comparison | None]]:
    """The error of each, and a comparison of those that may not be what they were."""
    by_gathered: dict[Gathered, tuple[list[int], list[torch.Tensor]]] = {}
    places: list[list[tuple[Gathered, int]]] = []
    for _, glance, xs, _ in reversed(blocks):  # the order in which they were held
        places.append([])
        for (gathered, row), x in zip(glance.rows, xs, strict=True):
            rows, tensors = by_gathered.setdefault(gathered, ([], []))
            places[-1].append((gathered, len(rows)))
            rows.append(row)
            tensors.append(x)
    found = {gathered: beside(gathered, *given) for gathered, given in by_gathered.items()}
    result: list[tuple[float, Comparison | None]] = []
    for (_, glance, xs, _), own in zip(blocks, reversed(places), strict=True):
        if all(found[gathered].bounds[i] <= found[gathered].most for gathered, i in own):
            result.append((max(found[gathered].errors[i] for gathered, i in own), None))
            continue
        pairs = [found[gathered].pair(i, row) for (gathered, i), (_, row) in zip(own, glance.rows, strict=True)]
        then, now = zip(*pairs, strict=True)
        result.append((0.0, Comparison(then, now, faint_of(xs))))
    return result


class _Beside(NamedTuple):
    gathered: Gathered
    now: Seen
    errors: list[float]
    """How far each is from what it was."""
    bounds: list[float]
    """None of which is less than any error that may be told of it."""
    most: float
    """Those up to this one are roundings."""

    def pair(self, i: int, row: int) -> tuple[Look | None, Look | None]:
        """What is seen of one, then and now."""
        if not self.gathered.known(row):
            return None, None
        (then, sizes), shape = self.gathered.seen(), self.gathered.shape
        return then.of(row, shape, sizes[row].item()), self.now.of(i, shape, 1.0)


def beside(gathered: Gathered, rows: list[int], tensors: list[torch.Tensor]) -> _Beside:
    """Tensors beside what they were.

    The largest difference of an entry stands for that of each, and the median for the size of all: half of them have
    that, also where a few large ones hide the others.
    """
    (then, sizes), now = gathered.seen(), gathered.look(tensors)
    in_order = rows == [*range(rows[0], rows[0] + len(rows))]
    at = slice(rows[0], rows[-1] + 1) if in_order else torch.tensor(rows, device=then.entries.device)
    entries = then.entries[at]
    apart = now.entries - entries
    errors = _relative(torch.linalg.vector_norm(apart, dim=1), torch.linalg.vector_norm(entries, dim=1))
    bounds = _relative(apart.abs().amax(1) * (2 * apart.shape[1] ** 0.5), entries.abs().median(1).values)
    if then.sums is not None and now.sums is not None:
        of_sums = _relative((now.sums - then.sums[at]).abs(), sizes[at])
        errors, bounds = torch.maximum(errors, of_sums), torch.maximum(bounds, 2 * of_sums)
    most = precision([entries.dtype]) ** 0.5
    return _Beside(gathered, now, errors.tolist(), bounds.tolist(), most)


def _relative(apart: torch.Tensor, sizes: torch.Tensor) -> torch.Tensor:
    return apart / sizes.clamp_min(torch.finfo(sizes.dtype).tiny)


class _Here(threading.local):
    """What a thread gathers."""

    def __init__(self) -> None:
        self.open: dict[Any, weakref.ref[Gathered]] = {}
        self.waiting: weakref.WeakValueDictionary[int, _Waiting] = weakref.WeakValueDictionary()


HERE = _Here()


def open_here() -> list[Gathered]:
    """What this thread goes on to gather."""
    return [gathered for one in HERE.open.values() if (gathered := one()) is not None]


_TURNS = itertools.count()


def _waiting_now() -> _Waiting:
    """What waits in the backward pass that is running."""
    running, waiting = backward_pass(), HERE.waiting
    found = waiting.get(running)
    if found is None:
        found = _Waiting(ends=running >= 0)
        if found.ends:
            waiting[running] = found
            after_backward(found.settle)
    return found


_FEWEST, _MOST = 16, 64
"""How many tensors are gathered at least, and at most."""
