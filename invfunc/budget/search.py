"""The fewest chunks with which a call stays within a budget."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from invfunc import thresholds
from invfunc.budget.footprint import Footprint
from invfunc.plan import AxisName

Chunks = dict[AxisName, int]
"""Into how many each axis is divided."""
Lengths = Mapping[AxisName, int | None]
"""How long each axis is that can be divided, None where nobody knows."""
Predict = Callable[[Chunks, int | None], Footprint | None]
"""What a call takes with some chunks; None where it cannot be divided so. Above a limit it ends early."""

TRIES = 4
"""How many trials there are at most between chunks that fit and chunks that do not."""
USED, SLOWER = 0.6, 1.1
"""Which part of a budget is enough to use, and how many times as long as another way a call may take to be as good."""
_ALONE: tuple[AxisName, ...] = ("outputs", "samples")
"""What is divided by itself first: with chunks of columns, what is read and written more than once is the least."""
SAVES = 0.95
"""What part of the memory is to be left at most for more chunks to count as better."""


@dataclass(frozen=True)
class Trial:
    """Some chunks, and what a call takes with them."""

    chunks: Chunks
    footprint: Footprint

    @property
    def peak(self) -> int:
        return self.footprint.peak

    @property
    def work(self) -> float:
        return self.footprint.work


class Measured:
    """What calls take with some chunks: each is measured once, unless it ended early below a limit of today."""

    def __init__(self, predict: Predict, known: dict[tuple, Footprint | None] | None = None) -> None:
        self.predict = predict
        self._known = {} if known is None else known

    def __call__(self, chunks: Chunks, limit: int | None = None) -> Trial | None:
        """The trial; None where it takes more than the limit, or cannot be divided so."""
        key = tuple(sorted(chunks.items()))
        known = self._known.get(key)
        if key not in self._known or (known is not None and known.over and (limit is None or known.peak <= limit)):
            known = self._known[key] = self.predict(chunks, limit)
        if known is None or known.over or (limit is not None and known.peak > limit):
            return None
        return Trial(chunks, known)

    @property
    def finished(self) -> list[Trial]:
        """All trials that did not end early."""
        return [Trial(dict(key), known) for key, known in self._known.items() if known is not None and not known.over]


def search(measured: Measured, lengths: Lengths, budget: int) -> Trial | None:
    """The trial that is within the budget and takes the shortest time, if any.

    First columns, then samples are divided by themselves. Where that is not enough, each axis is divided on top of the
    chunks with which those before take the least.
    """
    if (whole := measured({})) is None or whole.peak <= budget:
        return whole
    found: list[Trial] = []
    for axis in _ALONE:
        if axis in lengths and (within := _fewest(measured, whole, axis, lengths, budget)) is not None:
            found.append(within)
            if within.work <= SLOWER * whole.work:
                break
    for axis, base in () if found else _bases(measured, lengths):
        if (within := _fewest(measured, base, axis, lengths, budget)) is not None:
            found.append(within)
            for other in base.chunks:
                found.append(_fewer(measured, found[-1], other, lengths, budget))
            break
    if not found and (last := least(measured, lengths)).peak <= budget:
        found.append(last)
    return min(found, key=lambda t: t.work, default=None)


def least(measured: Measured, lengths: Lengths) -> Trial:
    """The trial that takes the least memory, with most chunks, with fewer, and of all that was tried."""
    *_, (axis, base) = _bases(measured, lengths)
    found = _best(measured, base, axis, lengths)
    for axis in lengths:  # what each chunk leaves may add up to more than it saves
        n = math.isqrt(found.chunks.get(axis) or _most(found, axis, lengths))
        found = (measured({**found.chunks, axis: n}, found.peak - 1) if n > 1 else None) or found
    return min(found, *measured.finished, key=lambda t: t.peak)


def _bases(measured: Measured, lengths: Lengths) -> Iterator[tuple[AxisName, Trial]]:
    """The axes, and the chunks on top of which each is divided, which are looked for when they are needed."""
    base = measured({})
    assert base is not None
    for k, axis in enumerate(lengths):
        yield axis, base
        if k + 1 < len(lengths):
            base = _best(measured, base, axis, lengths)


def _best(measured: Measured, base: Trial, axis: AxisName, lengths: Lengths) -> Trial:
    """The trial with most chunks of an axis, where that takes less than without."""
    n = _most(base, axis, lengths)
    return (measured({**base.chunks, axis: n}, int(SAVES * base.peak)) if n > 1 else None) or base


def _most(base: Trial, axis: AxisName, lengths: Lengths) -> int:
    """The most chunks of an axis to try beside those of others: one for each of its entries, if they are few."""
    most, length = thresholds.TRIED_PASSES // math.prod(base.chunks.values()), lengths[axis]
    return most if length is None else min(most, length)


def _fewest(measured: Measured, base: Trial, axis: AxisName, lengths: Lengths, budget: int) -> Trial | None:
    """The fewest chunks of an axis, beside those of others, with which the budget is kept, if it is."""
    n = _most(base, axis, lengths)
    found = measured({**base.chunks, axis: n}, budget) if n > 1 else None
    if found is None:
        return None
    n = min(n, found.footprint.parts.get(axis, n))
    return _fewer(measured, Trial({**base.chunks, axis: n}, found.footprint), axis, lengths, budget, base)


def _fewer(
    measured: Measured, found: Trial, axis: AxisName, lengths: Lengths, budget: int, base: Trial | None = None
) -> Trial:
    """Fewer chunks of an axis, as long as a call with them may be faster, or uses little of the budget.

    Without `base`, which takes too much with one chunk, one chunk may be enough.
    """
    many, length = found, lengths[axis] or found.chunks[axis]
    small, large = math.ceil(length / found.chunks[axis]), length + (base is None)
    over = base and base.peak + base.footprint.results  # what the chunks before have brought is there, too
    for _ in range(TRIES):
        size = _between(small, large, found.peak, over, budget)
        n = math.ceil(length / size)
        if not small < math.ceil(length / n) < large or (
            found.peak >= USED * budget and found.work <= SLOWER * _fastest(found, many, axis, length, large, base)
        ):
            break
        chunks = {**found.chunks, axis: n}
        trial = measured(chunks if n > 1 else {a: k for a, k in chunks.items() if a != axis}, budget)
        if trial is None:
            large, over = math.ceil(length / n), None
        else:
            small, found = math.ceil(length / n), trial
    return found


def _between(small: int, large: int, peak: int, over: int | None, budget: int) -> int:
    """A size between one with which a call takes `peak` and one with which it takes `over`, if that is known: the most
    that grows with the size takes the budget there, or less."""
    size = (small + large) // 2 if over is None else small + (budget - peak) * (large - small) // (over - peak)
    return max(small + 1, min(size, large - 1))


def _fastest(found: Trial, many: Trial, axis: AxisName, length: int, large: int, base: Trial | None) -> float:
    """What a call would take with the largest chunks that are left to try, if each chunk costs the same beside the
    rest."""
    n, few = found.chunks[axis], math.ceil(length / max(1, large - 1))
    other, k = (many, many.chunks[axis]) if many is not found else (base, 1)
    if other is None:
        return 0.0
    return found.work - (n - few) * max(0.0, (other.work - found.work) / (k - n))
