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
Measure = Callable[[Chunks], Footprint | None]
"""What a call takes with some chunks; None where it cannot be divided so."""

STEP, REFINED = 4, 2
"""By how many times more chunks the next trial has, and how many trials there are between the last two."""
NO_BETTER = 2
"""After how many trials that save nothing an axis is divided no further."""
SAVES = 0.99


@dataclass(frozen=True)
class Trial:
    """Some chunks, and what a call takes with them."""

    chunks: Chunks
    footprint: Footprint

    @property
    def peak(self) -> int:
        return self.footprint.peak


def search(measure: Measure, lengths: Mapping[AxisName, int | None], budget: int) -> tuple[Trial | None, Trial]:
    """The trial that is within the budget and takes the shortest time, if any, and the one that takes the least memory.

    The axes are divided in their order, each on top of the best that those before gave. Which trials there are does not
    depend on the budget, until one is within it: so the least that is told can be had.
    """
    whole = measure({})
    assert whole is not None
    least = Trial({}, whole)
    if least.peak <= budget:
        return least, least
    for axis, length in lengths.items():
        base, before = least.chunks, least
        for trial in _divided(measure, base, axis, length, least.peak):
            least = min(least, trial, key=lambda t: t.peak)
            if trial.peak <= budget:
                found = [trial, *_refined(measure, axis, before, trial, budget)]
                return min(found, key=lambda t: t.footprint.work), least
            before = trial
    return None, least


def _divided(measure: Measure, base: Chunks, axis: AxisName, length: int | None, least: int) -> Iterator[Trial]:
    """More and more chunks of an axis, as long as that saves memory; of an axis of unknown length, too."""
    n, idle = 1, 0
    while idle < NO_BETTER and (length is None or n < length):
        n = n * STEP if length is None else min(n * STEP, length)
        if n * math.prod(base.values()) > thresholds.TRIED_PASSES:
            return
        found = measure({**base, axis: n})
        if found is None:
            return
        idle = 0 if found.peak < SAVES * least else idle + 1
        least = min(least, found.peak)
        yield Trial({**base, axis: n}, found)


def _refined(measure: Measure, axis: AxisName, above: Trial, within: Trial, budget: int) -> Iterator[Trial]:
    """Fewer chunks that are within the budget, too: the peak is nearly affine in their size."""
    few, many = above.chunks.get(axis, 1), within.chunks[axis]
    high, low = above.peak, within.peak
    for _ in range(REFINED):
        if many - few < 2 or high <= low:
            return
        size = 1 / many + (1 / few - 1 / many) * (budget - low) / (high - low)
        n = min(max(math.ceil(1 / size), few + 1), many - 1)
        found = measure({**within.chunks, axis: n})
        if found is None:
            return
        if found.peak > budget:
            few, high = n, found.peak
        else:
            many, low = n, found.peak
            yield Trial({**within.chunks, axis: n}, found)
