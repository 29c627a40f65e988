"""Explanations of statistics, in words and numbers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from invfunc._shown import axes, table


@dataclass(frozen=True)
class ReportPart:
    """Some parameters that are handled together."""

    way: str
    """"closed form", "local", "narrow", "dense" or "entry by entry"."""
    params: tuple[str, ...]
    columns: int
    """How many columns of each sample are pulled back to these parameters."""
    passes: int
    """How many pullbacks of one column that takes."""

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
    """What these take."""

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
    """How many columns each sample has."""
    passes: int
    """How many pullbacks of one column each; of several columns where `chunked` set the number of passes."""
    pullbacks: int
    """How often something is pulled back: of several columns at once, where memory allows."""
    bytes: int
    """About how much memory the result takes."""
    cost: float
    """The estimated time, as a fraction of that for pulling back every column."""
    why: str
    parts: tuple[ReportPart, ...] = ()
    """What is done for which parameters, where not every column is simply pulled back."""
    params: tuple[Parameter, ...] = ()
    members: tuple[Explanation, ...] = ()
    """An explanation for each statistic computed together; the numbers above are of all, with shared pullbacks once."""
    plan: str = ""
    """What is repeated in each call, and what is compared in it, if it is `compiled`."""
    code: str = ""
    """The operations of that, as Python."""
    checked: str = ""
    """What is checked of the result, if it is `certified`."""
    sweeps: int = 0
    """How often a loader is gone through, if it is `streamed`; the numbers above are those of its first batch."""
    batches: int | None = None
    """How many batches the loader gives, if it has a length."""
    tiles: int = 0
    """How many pairs of batches meet each other, if they do."""
    processes: int = 0
    """How many there are, if it is `distributed`; all other numbers are those of this one."""

    def __str__(self) -> str:
        how = [self._passes(), *self._of_parts(), *self._table(), self._cost()]
        plan_only = self.plan and not self.columns  # of a product
        below = [self._processes(), self._sweeps(), *([] if plan_only else how), self.plan, self.checked]
        return "\n".join([f"{self.name}: {self.why}", *(f"  {line}" for line in below if line)])

    __repr__ = __str__

    def _repr_html_(self) -> str:
        title, below = f"{self.name}: {self.why}", (self.plan, self.checked)
        above = [self._processes(), self._sweeps(), "" if self.plan and not self.columns else self._passes()]
        if self.members:
            rows = [(m.name, m.columns, m.passes, m.why) for m in self.members]
            return table(title, ["statistic", "columns", "passes", "how"], rows, *above, self._cost(), *below)
        ways = {name: part.way for part in self.parts for name in part.params}
        rows = [
            (
                p.name,
                ways.get(p.name, "all"),
                f"{p.way} rule" * bool(p.operations),
                ", ".join(p.generic or p.operations),
                p._matrices(),
            )
            for p in self.params
        ]
        return table(
            title, ["parameter", "columns", "per sample", "read by", "factors"], rows, *above, *self._of_parts(), *below
        )

    def plot(self, ax: Any = None) -> Any:
        """Draw for each part, or each of several statistics, its columns and the backward passes that they take.

        Args:
            ax: the axes of matplotlib to draw into; by default those of a new figure.

        Returns:
            The axes.

        Raises:
            MissingExtraError: without matplotlib: `pip install 'invfunc[notebooks]'`.
        """
        shown = [(m.name, m.columns, m.passes) for m in self.members]
        shown = shown or [(f"{p.way}: {', '.join(p.params)}", p.columns, p.passes) for p in self.parts]
        shown = shown or [("all parameters", self.columns, self.passes)]
        ax, places = axes(ax, 1.2 + 0.5 * len(shown)), range(len(shown))
        for name, heights, color, at in (
            ("columns of a sample", [columns for _, columns, _ in shown], "#c9c9c9", 0.2),
            ("backward passes", [passes for *_, passes in shown], "#2f6db3", -0.2),
        ):
            bars = ax.barh([i + at for i in places], heights, height=0.38, color=color, label=name)
            ax.bar_label(bars, padding=3, fontsize=8)
        ax.set_yticks(places, [_short(name) for name, *_ in shown])
        ax.set_xlabel("how many")
        ax.margins(x=0.12)
        ax.legend(frameon=False, fontsize=8, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
        ax.spines[["top", "right"]].set_visible(False)
        return ax

    def _processes(self) -> str:
        if not self.processes:
            return ""
        return f"{self.processes} process{'es' * (self.processes > 1)}; in this one:"

    def _sweeps(self) -> str:
        over = "the batches" if self.batches is None else _counted(self.batches, "batch")
        tiles = f", for {_counted(self.tiles, 'tile')}" if self.tiles else ""
        return (
            f"{_counted(self.sweeps, 'sweep')} over {over}{tiles}; for the first batch, in all:" if self.sweeps else ""
        )

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

    def _cost(self) -> str:
        return f"about {self.bytes / 2**20:.1f} MiB for the result, {self.cost:.1%} of the work without structure"


def _short(name: str, most: int = 40) -> str:
    return name if len(name) <= most else name[: most - 1] + "\u2026"


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
