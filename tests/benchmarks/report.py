"""Numbers as the cells of a Markdown table."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable

from .peers import BACKPACK, OURS, PEERS
from .tables import GRADIENT, Goal, Numbers, Row, Table

Cells = dict[str, str]


def announce(name: str, text: str) -> None:
    """Tell on a terminal what of a table is being measured; nothing once it is done."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text and f'{name}: {text}'}", end="", file=sys.stderr, flush=True)


def time_cells(row: Row, times: Numbers, table: Table) -> Cells:
    """What each peer takes, and whether ours reaches its goal."""
    unit = table.unit(times, row.name)
    cells = {f"{peer} {table.unit_name}": number(over(times.get((row.name, peer)), unit), 3) for peer in PEERS}
    return cells | _ratios("time", row, row.time, times)


def memory_cells(row: Row, peaks: Numbers) -> Cells:
    """The peak of each peer, and whether ours reaches its goal."""
    cells = {f"{peer} MiB": mebibytes(peaks.get((row.name, peer))) for peer in PEERS}
    plain = {"memory / gradient": number(over(peaks.get((row.name, OURS)), peaks.get(GRADIENT)))}
    return cells | plain | _ratios("memory", row, row.memory, peaks)


def _ratios(kind: str, row: Row, goal: Goal | None, numbers: Numbers) -> Cells:
    ours, theirs = numbers.get((row.name, OURS)), numbers.get((row.name, BACKPACK))
    reached = "-" if goal is None else verdict(over(ours, goal.base(numbers, row.name)), goal.most)
    return {f"{kind} / BackPACK": number(over(ours, theirs)), f"{kind} to reach": reached}


def verdict(value: float | None, limit: float) -> str:
    """Whether a value is within a limit."""
    if value is None or math.isnan(value):
        return number(value)
    return f"{value:.2f} <= {limit:g} {'yes' if value <= limit else 'NO'}"


def difference_cell(value: float | None) -> str:
    """A relative difference, where two results were compared."""
    return "-" if value is None else f"{value:.0e}"


def mebibytes(size: float | None) -> str:
    """Bytes as MiB."""
    return number(over(size, 2**20), 1)


def over(value: float | None, base: float | None) -> float | None:
    """The ratio of two numbers, where there are both."""
    return value / base if value is not None and base else None


def number(value: float | None, digits: int = 2) -> str:
    """A number, where there is one; NaN is that of a peer that fails."""
    return "-" if value is None else "fails" if math.isnan(value) else f"{value:.{digits}f}"


def print_as_they_come(lines: Iterable[Cells]) -> list[Cells]:
    """Print the lines as a Markdown table that takes long, each when it is there; return them."""
    printed = []
    for line in lines:
        if not printed:
            print(f"| {' | '.join(line)} |\n|{' --- |' * len(line)}")
        printed.append(line)
        print(f"| {' | '.join(line.values())} |", flush=True)
    return printed


def print_table(lines: list[Cells]) -> None:
    """Print the lines as a Markdown table, each column as wide as it needs to be; without those that say nothing."""
    columns = [[name, *[line[name] for line in lines]] for name in lines[0]]
    columns = [column for column in columns if set(column[1:]) != {"-"}]
    for column in columns:
        width = max(map(len, column))
        pad = str.rjust if column[0] else str.ljust
        column[:] = [pad(cell, width) for cell in column]
        column.insert(1, "-" * (width - 1) + (":" if column[0].strip() else "-"))
    for cells in zip(*columns, strict=True):
        print(f"| {' | '.join(cells)} |")
