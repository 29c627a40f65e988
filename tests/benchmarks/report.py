"""Numbers as the cells of a Markdown table."""

from __future__ import annotations

import math
import sys
from collections.abc import Mapping

from .peers import PEERS
from .tables import GRADIENT, Case

Cells = dict[str, str]


def announce(name: str, text: str) -> None:
    """Tell on a terminal what of a table is being measured; nothing once it is done."""
    if sys.stderr.isatty():
        print(f"\r\x1b[K{text and f'{name}: {text}'}", end="", file=sys.stderr, flush=True)


def cells(row: str, times: Mapping[Case, float], peaks: Mapping[Case, float]) -> Cells:
    """Gradients and MiB that each peer takes; a number is NaN where the peer fails."""
    found = {f"{peer} gradients": number(over(times.get((row, peer)), times[GRADIENT]), 3) for peer in PEERS}
    return found | {f"{peer} MiB": mebibytes(peaks.get((row, peer))) for peer in PEERS}


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
