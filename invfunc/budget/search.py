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

STEP = 2
"""By how many times smaller chunks are from one trial to the next."""
REFINED, ENOUGH = 3, 0.85
"""How many trials there are between the last two, as long as less than this part of the budget is used."""
NO_BETTER = 2
"""After how many trials that save nothing an axis is divided no further."""
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


class Measured:
    """What calls take with some chunks: each is measured once, unless it ended early below a limit of today."""

    def __init__(self, predict: Predict) -> None:
        self.predict = predict
        self._known: dict[tuple, Footprint | None] = {}

    def __call__(self, chunks: Chunks, limit: int | None = None) -> Trial | None:
        """The trial; None where it takes more than the limit, or cannot be divided so."""
        key = tuple(sorted(chunks.items()))
        known = self._known.get(key)
        if key not in self._known or (known is not None and known.over and (limit is None or known.peak <= limit)):
            known = self._known[key] = self.predict(chunks, limit)
        if known is None or known.over or (limit is not None and known.peak > limit):
            return None
        return Trial(chunks, known)

    def divisible(self, chunks: Chunks) -> bool:
        """Whether a call that was measured can be divided so."""
        return self._known[tuple(sorted(chunks.items()))] is not None


def search(measured: Measured, lengths: Lengths, budget: int) -> Trial | None:
    """The trial that is within the budget and takes the shortest time, if any.

    The axes are divided in their order, each on top of the chunks with which those before take the least.
    """
    if (whole := measured({}, budget)) is not None:
        return whole
    for axis, base in _bases(measured, lengths):
        before = 1
        for n in _counts(base, axis, lengths):
            if (trial := measured({**base, axis: n}, budget)) is not None:
                found = [trial, *_fewer(measured, trial, axis, before, lengths, budget)]
                for other in base:
                    found += _fewer(measured, found[-1], other, 0, lengths, budget)
                return min(found, key=lambda t: t.footprint.work)
            if not measured.divisible({**base, axis: n}):
                break
            before = n
    return None


def least(measured: Measured, lengths: Lengths) -> Trial:
    """The trial that takes the least memory. The search finds it, too: it tries no fewer chunks."""
    *_, (axis, base) = _bases(measured, lengths)
    return _best(measured, base, axis, lengths)


def _bases(measured: Measured, lengths: Lengths) -> Iterator[tuple[AxisName, Chunks]]:
    """The axes, and the chunks on top of which each is divided, which are looked for when they are needed."""
    base: Chunks = {}
    for k, axis in enumerate(lengths):
        yield axis, base
        if k + 1 < len(lengths):
            base = _best(measured, base, axis, lengths).chunks


def _best(measured: Measured, base: Chunks, axis: AxisName, lengths: Lengths) -> Trial:
    """The number of chunks of an axis with which the least is taken: most of them, or as far as dividing it saves."""
    best, idle, counts = measured(base), 0, [*_counts(base, axis, lengths)]
    assert best is not None
    for n in counts if lengths[axis] is None else counts[::-1]:
        found = measured({**base, axis: n}, int(SAVES * best.peak))
        if found is not None and lengths[axis] is not None:
            return found
        best, idle = (best, idle + 1) if found is None else (found, 0)
        if idle == NO_BETTER:
            break
    return best


def _counts(base: Chunks, axis: AxisName, lengths: Lengths) -> Iterator[int]:
    """More and more chunks of an axis, up to one for each of its entries, in so many passes as are tried."""
    most = thresholds.TRIED_PASSES // math.prod(base.values())
    length, n = lengths[axis], 1
    while length is None or n < length:
        n = STEP * n if length is None else math.ceil(length / max(1, math.ceil(length / n) // STEP))
        if n > most:
            return
        yield n


def _fewer(measured: Measured, within: Trial, axis: AxisName, few: int, lengths: Lengths, budget: int) -> list[Trial]:
    """Fewer chunks of an axis that are within the budget, too, but more than `few`, which are not."""
    found, many = [], within.chunks[axis]
    for _ in range(REFINED):
        peak = (found[-1] if found else within).peak
        n = _between(few, many, lengths[axis])
        if peak >= ENOUGH * budget or n is None:
            break
        chunks = {**within.chunks, axis: n}
        trial = measured(chunks if n > 1 else {a: k for a, k in chunks.items() if a != axis}, budget)
        few, many = (n, many) if trial is None else (few, n)
        found += [] if trial is None else [trial]
    return found


def _between(few: int, many: int, length: int | None) -> int | None:
    """A number of chunks between two, of a size between theirs; None where there is none."""
    if length is None:
        n = math.isqrt(max(few, 1) * many) if few else many // STEP
        return n if few < n < many else None
    small, large = math.ceil(length / many), math.ceil(length / few) if few else length + 1
    size = min(max(math.isqrt(small * large), small + 1), large - 1)
    n = math.ceil(length / size)
    return n if small < size < large and few < n < many else None
