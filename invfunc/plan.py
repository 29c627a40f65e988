"""The plan of a computation: its division into passes, and its explanation in words and numbers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
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
    """Function of the result of a parameter (by its key path), called as soon as it is known."""
    progress: str = ""
    """Text of a progress bar, if there is one."""


def even(length: int, size: int) -> list[tuple[int, int]]:
    """Chunks of nearly equal size, none above `size`."""
    return [(0, length)] if length <= size else ChunkSplit(n=-(-length // max(1, size))).ranges(0, length)


@dataclass(frozen=True)
class ReportPart:
    """Some parameters that are handled together."""

    way: str
    """"closed form", "local", "narrow", "dense" or "entry by entry"."""
    params: tuple[str, ...]
    columns: int
    """Number of columns of each sample that are pulled back to these parameters."""
    passes: int
    """Number of pullbacks of one column that it takes."""

    def __str__(self) -> str:
        passes = f"{_counted(self.passes, 'backward pass')} for {_counted(self.columns, 'column')}"
        of = "no backward pass" if self.way == "closed form" else passes
        return f"{self.way}: {of} ({', '.join(self.params)})"


@dataclass(frozen=True)
class Parameter:
    """A place where a parameter meets the samples, and the way its share is computed there."""

    name: str
    operations: tuple[str, ...]
    """The operations that read it; "f" where the function is evaluated on each sample alone."""
    generic: tuple[str, ...]
    """The operations among them without a fast rule: they run again with a copy of the parameter for each sample."""

    matrices: tuple[tuple[int, ...], ...] = ()
    """The shapes of its factors, of which a vector is a diagonal; a bias may come with its weight."""
    bytes: int = 0
    """Bytes of these."""

    @property
    def way(self) -> str:
        """ "fast", "generic" or "unread"."""
        return "unread" if not self.operations else "generic" if self.generic else "fast"

    def _matrices(self) -> str:
        """Its factors and what they take."""
        shapes = " and ".join(str([*x]) for x in self.matrices)
        return f"{shapes}, {self.bytes / 2**20:.1f} MiB" if shapes else ""


@dataclass(frozen=True, repr=False)
class Explanation:
    """An explanation of a statistic: print it."""

    name: str
    columns: int
    """Number of columns of each sample."""
    passes: int
    """Number of pullbacks of one column each; of several columns where `chunked` set the number of passes."""
    pullbacks: int
    """Number of pullbacks: of several columns at once, where memory allows."""
    bytes: int
    """About how much memory the result takes."""
    cost: float
    """The estimated time, as a fraction of that for pulling back every column."""
    why: str
    parts: tuple[ReportPart, ...] = ()
    """Steps for some parameters, where not every column is simply pulled back."""
    params: tuple[Parameter, ...] = ()
    members: tuple[Explanation, ...] = ()
    """An explanation for each statistic computed together; the numbers above are of all, with shared pullbacks once."""
    plan: str = ""
    """Work that is repeated in each call, and what is compared in it, if it is `compiled`."""
    code: str = ""
    """The operations of that, as Python."""
    checked: str = ""
    """Check of the result, if it is `certified`."""
    sweeps: int = 0
    """Number of passes through the loader, if it is `streamed`; the numbers above are those of its first batch."""
    batches: int | None = None
    """Number of batches of the loader, if it has a length."""
    tiles: int = 0
    """Number of pairs of batches that meet each other, if they do."""
    processes: int = 0
    """Number of processes, if it is `distributed`; all other numbers are those of this one."""

    def __str__(self) -> str:
        over = "the batches" if self.batches is None else _counted(self.batches, "batch")
        tiles = f", for {_counted(self.tiles, 'tile')}" if self.tiles else ""
        sweeps = f"{_counted(self.sweeps, 'sweep')} over {over}{tiles}; for the first batch, in all:"
        processes = f"{_counted(self.processes, 'process')}; in this one:"
        cost = f"about {self.bytes / 2**20:.1f} MiB for the result, {self.cost:.1%} of the work without structure"
        below = [processes] * bool(self.processes) + [sweeps] * bool(self.sweeps)
        if self.columns or not self.plan:  # else it is that of a product
            below += [self._passes(), *self._of_parts(), *self._table(), cost]
        below += [self.plan, self.checked]
        return "\n".join([f"{self.name}: {self.why}", *(f"  {line}" for line in below if line)])

    __repr__ = __str__

    def _passes(self) -> str:
        times = _counted(self.pullbacks, "pullback") if self.pullbacks else "no pullback"
        columns = f"{_counted(self.columns, 'column')} of a sample (vectors that are pulled back)"
        return f"{_counted(self.passes, 'backward pass')} for {columns}, in {times}"

    def _of_parts(self) -> list[str]:
        return [f"{m.name}: {m._passes()}; {m.why}" for m in self.members] or [str(part) for part in self.parts]

    def _table(self) -> list[str]:
        rows = [(p.name, p.way, ", ".join(p.generic or p.operations), p._matrices()) for p in self.params]
        widths = [max((len(row[k]) for row in rows), default=0) for k in (0, 1, 2)]
        return ["  ".join(f"{x:<{n}}" for x, n in zip(row, [*widths, 0], strict=True)).rstrip() for row in rows]


def _counted(count: int, what: str) -> str:
    return f"{count} {what}" + ("" if count == 1 else "es" if what.endswith(("s", "ch")) else "s")


def joined(name: str, each: Sequence[Explanation], columns: Sequence[Any]) -> Explanation:
    """One explanation of several statistics, of which those with the same key of `columns` share these."""
    own = [*dict(zip(columns, each, strict=True)).values()]
    count = sum(e.columns for e in own)
    return replace(
        each[0],
        name=name,
        columns=count,
        passes=sum(e.passes for e in own),
        pullbacks=sum(e.pullbacks for e in own),
        bytes=sum(e.bytes for e in each),
        cost=sum(e.cost * e.columns for e in own) / max(1, count),
        why="from one forward pass",
        parts=(),
        members=tuple(each),
    )
