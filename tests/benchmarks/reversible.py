"""The tables of a reversible chain: time, and memory at two depths."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import torch

from invfunc.testing import peak_memory, return_freed_memory

from . import chain_ways as ways
from .chain_ways import missing
from .chains import BACKWARD, GRAD, Chain, Kind, Way, leaves, one_tensor
from .measure import difference, medians, peak_in_a_process
from .report import Cells, announce, difference_cell, mebibytes, number, over, print_table, verdict

WIDTH, ROWS = 512, 4096
SMALL = 4, WIDTH, ROWS // 4
"""Depth, width and rows of a chain whose gradients are compared."""
WARM = 2
"""Number of calls before those that are timed."""
SHALLOW, DEEP = 8, 64
GROWTH = 5
"""Per cent more memory that the deep chain may take."""


@dataclass(frozen=True)
class Row:
    """A kind of derivative, a way to run the chain, and what it is to reach."""

    kind: Kind
    way: Way
    most: float | None = None
    """Times the plain way, or MiB, according to the table."""
    deep: bool = True
    """True if a deep chain is worth its time."""

    @property
    def name(self) -> str:
        return f"{self.kind.name} {self.way.name}"

    @property
    def plain(self) -> str:
        """The row that this one is a multiple of: the same kind and state."""
        plain = ways.PLAIN_ONE if self.way.enter is one_tensor else ways.PLAIN
        return f"{self.kind.name} {plain.name}"


SMALL_TIMES = [
    *[Row(BACKWARD, way) for way in (ways.PLAIN, ways.PLAIN_ONE, ways.CHECKPOINT, ways.MEMCNN, ways.INVTORCH)],
    *[Row(BACKWARD, way, 2.4) for way in (ways.MERGED, ways.MERGED_ONE, ways.MODULES)],
    *[Row(BACKWARD, way, 2.9) for way in (ways.GENERIC, ways.GENERIC_MODULES)],
    *[Row(BACKWARD, way, 2.2) for way in (ways.CHAINED, ways.REPEATED)],
    Row(GRAD, ways.PLAIN),
    *[Row(GRAD, way, 3) for way in (ways.MERGED, ways.GENERIC, ways.CHAINED)],
]


@dataclass(frozen=True)
class Timed:
    """A chain whose rows are timed."""

    rows: list[Row]
    width: int
    batch: int
    depth: int


TIMED = {
    "small_chain": Timed(SMALL_TIMES, 64, 32, 64),
}
MEMORY = [
    Row(BACKWARD, ways.PLAIN),
    Row(BACKWARD, ways.CHECKPOINT),
    Row(BACKWARD, ways.MEMCNN),
    Row(BACKWARD, ways.INVTORCH),
    Row(BACKWARD, ways.MERGED_ONE, 60),
    *[Row(BACKWARD, way) for way in (ways.MERGED, ways.GENERIC, ways.CHAINED, ways.MODULES)],
    Row(GRAD, ways.PLAIN, deep=False),
    *[Row(GRAD, way, 85) for way in (ways.MERGED, ways.CHAINED)],
]
MEMORY_CASES = {(row.name, str(d)): row for d in (DEEP, SHALLOW) for row in MEMORY if row.deep or d == SHALLOW}
"""The long ones first."""
MEMORY_TABLE = "chain_memory"
_ON_SMALL = f"gradients are compared on {SMALL[0]} blocks and {SMALL[2]} rows"


def activation_memory(case: tuple[str, str], device: torch.device) -> int:
    """The peak of one call in bytes, over what was there before, without the gradients.

    Those of `.backward()` are there before, those of torch.func are the result, whose bytes are subtracted.
    """
    row, depth = MEMORY_CASES[case], int(case[1])
    return_freed_memory()
    row.kind.build(row.way, Chain(2, WIDTH, ROWS, device))()  # the first call loads libraries
    chain = Chain(depth, WIDTH, ROWS, device)
    call = row.kind.build(row.way, chain)
    given = set()
    if row.kind is BACKWARD:
        for w in leaves(chain.blocks):
            w.grad = torch.zeros_like(w)
            given.add(w.grad.data_ptr())
    result, peak = peak_memory(call, device=device)
    return peak - sum(leaf.nbytes for leaf in leaves(result) if leaf.data_ptr() not in given)


@dataclass(frozen=True)
class Compared:
    """Differences between the gradients of the rows of a table."""

    rows: list[Row]
    """Rows that neither fail nor are missing."""
    differences: dict[str, float]
    failures: dict[str, str]
    """The words of a peer that fails."""

    def failed(self) -> dict[str, float]:
        """Their rows have no numbers."""
        return dict.fromkeys(self.failures, math.nan)

    def cell(self, row: Row) -> Cells:
        """The last one of a line."""
        return {"difference": difference_cell(self.differences.get(row.name))}

    def print_rest(self, *remarks: str) -> None:
        """Print the remarks below a table."""
        for row, words in self.failures.items():
            print(f"{row} fails: {words}")
        print(
            *remarks,
            "difference: of the gradient, relative to the largest entry of each leaf of the first row's\n",
            sep="\n",
        )


def _compare(name: str, rows: Sequence[Row], chain: Chain) -> Compared:
    """Call each row once. The first is what the others are compared with."""
    announce(name, "do they agree?")
    compared, first, absent = Compared([], {}, {}), None, missing()
    for row in rows:
        if row.way.needs in absent:
            continue
        try:
            gradient = [*leaves(row.kind.build(row.way, chain)())]
        except Exception as error:
            if row.way.ours:
                raise
            compared.failures[row.name] = str(error).partition("\n")[0]
            for w in leaves(chain.blocks):
                w.grad = None
            continue
        compared.rows.append(row)
        if first is None:
            first = gradient
        else:
            compared.differences[row.name] = difference(gradient, first)
    return compared


def _seconds(name: str, compared: Compared, chain: Chain, rounds: int, device: torch.device) -> dict[str, float]:
    """The median of each row."""
    calls = {row.name: row.kind.build(row.way, chain) for row in compared.rows}
    for call in [*calls.values()] * WARM:
        call()
    seconds = medians(calls, dict.fromkeys(calls, rounds), device, lambda text: announce(name, text))
    announce(name, "")
    return seconds | compared.failed()


def _times(name: str, options: argparse.Namespace) -> None:
    """Seconds of a chain, as multiples of the plain way."""
    timed, device, calls = TIMED[name], options.device, options.repeats
    depth, width, batch = timed.depth, timed.width, timed.batch
    compared = _compare(name, timed.rows, Chain(SMALL[0], width, min(batch, SMALL[2]), device))
    seconds = _seconds(name, compared, Chain(depth, width, batch, device), calls, device)
    title = f"{depth} additive couplings, width {width}, N = {batch}"
    print(f"{name}: forward and backward of {title}; {device}, one thread, median of {calls} calls")
    lines = []
    for row in timed.rows:
        second, plain = seconds.get(row.name), seconds[row.plain]
        ratio = over(second, plain)
        cells = {"": row.name, "s": number(second, 3), "over plain": number(ratio)}
        cells["ms a block more"] = number(None if second is None else (second - plain) / depth * 1e3)
        cells["to reach"] = "-" if row.most is None else verdict(ratio, row.most)
        lines.append(cells | compared.cell(row))
    print_table(lines)
    compared.print_rest(
        "over plain: of the same kind and state",
        f"gradients are compared on {SMALL[0]} blocks and at most {SMALL[2]} rows",
    )


def _memory(name: str, options: argparse.Namespace) -> None:
    """The memory of a chain at two depths, a process a case."""
    if options.no_memory:
        return
    device = options.device
    compared = _compare(name, MEMORY, Chain(*SMALL, device))
    cases = [case for case, row in MEMORY_CASES.items() if row in compared.rows]
    announce(name, "memory")
    with ThreadPoolExecutor(2) as pool:  # what is beside a process does not change its size
        sizes = pool.map(lambda case: peak_in_a_process("/".join((name, *case)), device), cases)
        peaks = dict(zip(cases, sizes, strict=True))
    announce(name, "")
    title = f"{SHALLOW} and {DEEP} additive couplings, width {WIDTH}, N = {ROWS}"
    print(f"{name}: activation memory of forward and backward of {title}; {device}")
    lines = []
    for row in MEMORY:
        shallow, deep = (peaks.get((row.name, str(d)), compared.failed().get(row.name)) for d in (SHALLOW, DEEP))
        ratio = over(deep, shallow)
        growth = None if ratio is None else 100 * (ratio - 1)
        cells = {"": row.name, f"MiB at {SHALLOW}": mebibytes(shallow), f"MiB at {DEEP}": mebibytes(deep)}
        cells["% more"] = verdict(growth, GROWTH) if row.way.ours else number(growth)
        cells["MiB to reach"] = "-" if row.most is None else verdict(over(deep, 2**20), row.most)
        lines.append(cells | compared.cell(row))
    print_table(lines)
    compared.print_rest(
        "MiB: the peak over what was there before, without the bytes of the gradients, with a copy of the input",
        f"the plain ways of torch.func are left out at {DEEP}; {_ON_SMALL}",
    )


REVERSIBLE: dict[str, Callable[[str, argparse.Namespace], None]] = {
    **dict.fromkeys(TIMED, _times),
    MEMORY_TABLE: _memory,
}
"""Functions that print each table."""
