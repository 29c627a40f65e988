"""The division of work: into exactly so many passes where the caller says so, else by bytes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Literal

AxisName = Literal["outputs", "samples", "params"]


@dataclass(frozen=True)
class ChunkSplit:
    """Into `n` chunks of nearly equal size, or into chunks of `size`."""

    n: int | None = None
    size: int | None = None

    def ranges(self, start: int, stop: int) -> list[tuple[int, int]]:
        length = stop - start
        if self.size is not None:
            edges = [*range(start, stop, self.size), stop]
        else:
            n = max(1, min(self.n or 1, length))
            edges = [start + length * i // n for i in range(n + 1)]
        return list(zip(edges[:-1], edges[1:], strict=True))


@dataclass(frozen=True)
class Plan:
    """The splits that the caller asked for along each axis, outermost first; they nest."""

    splits: dict[AxisName, tuple[ChunkSplit, ...]] = field(default_factory=dict)

    def split(self, over: AxisName, by: ChunkSplit) -> Plan:
        return replace(self, splits={**self.splits, over: (by, *self.splits.get(over, ()))})

    def without(self, over: AxisName) -> Plan:
        return replace(self, splits={axis: by for axis, by in self.splits.items() if axis != over})

    def asked(self, over: AxisName) -> bool:
        return bool(self.splits.get(over))

    def ranges(self, over: AxisName, length: int) -> list[tuple[int, int]]:
        found = [(0, length)]
        for split in self.splits.get(over, ()):
            found = [piece for start, stop in found for piece in split.ranges(start, stop)]
        return found


@dataclass(frozen=True)
class Options:
    """Options of a computation: `dense` takes every column by itself."""

    plan: Plan = field(default_factory=Plan)
    dense: bool = False
    reduce: Callable[[str, Any], Any] | None = None
    """What becomes of the result of a parameter (by its key path) as soon as it is known."""
    progress: str = ""
    """What a progress bar says, if there is one."""


def even(length: int, size: int) -> list[tuple[int, int]]:
    """Chunks of nearly equal size, none above `size`."""
    return [(0, length)] if length <= size else ChunkSplit(n=-(-length // max(1, size))).ranges(0, length)
