"""The tables of a reversible chain: time, memory at two depths, and what a block costs at least."""

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
from .chains import BACKWARD, GRAD, GRAD_VMAP, JACREV, VMAP_GRAD, Chain, Kind, Way, leaves, one_tensor
from .measure import difference, medians, peak_in_a_process
from .peers import Call
from .report import announce, difference_cell, mebibytes, number, over, print_table, verdict

WIDTH, ROWS = 512, 4096
SMALL = 4, WIDTH, ROWS // 4
"""Depth, width and rows of a chain whose gradients are compared before memory is measured."""
TINY = 10, 8, 4
TINY_ROUNDS = 30
"""Of calls, for each round that is asked for."""
SHALLOW, DEEP = 8, 64
GROWTH = 1.05
"""How many times the memory of the shallow chain the deep one may take."""


@dataclass(frozen=True)
class Row:
    """A kind of derivative, a way to run the chain, and what it is to reach."""

    kind: Kind
    way: Way
    most: float | None = None
    """Times the plain way, or MiB, according to the table."""
    deep: bool = True
    """Whether a deep chain is worth its time."""

    @property
    def name(self) -> str:
        return f"{self.kind.name} {self.way.name}"

    @property
    def plain(self) -> str:
        """The row that this one is a multiple of: the same kind and state."""
        plain = ways.PLAIN_ONE if self.way.enter is one_tensor else ways.PLAIN
        return f"{self.kind.name} {plain.name}"


TIMES = [
    Row(BACKWARD, ways.PLAIN),
    Row(BACKWARD, ways.PLAIN_ONE),
    Row(BACKWARD, ways.CHECKPOINT),
    Row(BACKWARD, ways.SEQUENTIAL),
    Row(BACKWARD, ways.MEMCNN),
    Row(BACKWARD, ways.INVTORCH),
    Row(BACKWARD, ways.MERGED, 1.33),
    Row(BACKWARD, ways.MERGED_ONE),
    Row(BACKWARD, ways.GENERIC, 1.75),
    Row(BACKWARD, ways.GENERIC_ONE),
    Row(BACKWARD, ways.REPEATED),
    Row(BACKWARD, ways.CHAINED),
    Row(BACKWARD, ways.EXACT, 1.6),
    Row(GRAD, ways.PLAIN),
    Row(GRAD, ways.MERGED, 1.5),
    Row(GRAD, ways.GENERIC),
]
MEMORY = [
    Row(BACKWARD, ways.PLAIN),
    Row(BACKWARD, ways.CHECKPOINT),
    Row(BACKWARD, ways.SEQUENTIAL),
    Row(BACKWARD, ways.MEMCNN),
    Row(BACKWARD, ways.INVTORCH),
    Row(BACKWARD, ways.MERGED_ONE, 67),
    *[Row(BACKWARD, way) for way in (ways.MERGED, ways.GENERIC, ways.CHAINED)],
    Row(GRAD, ways.PLAIN, deep=False),
    *[Row(GRAD, way, 85) for way in (ways.MERGED, ways.CHAINED)],
    *[
        row
        for kind in (VMAP_GRAD, GRAD_VMAP, JACREV)
        for row in (Row(kind, ways.PLAIN, deep=False), Row(kind, ways.MERGED), Row(kind, ways.CHAINED))
    ],
]
TINIES = [
    *[Row(BACKWARD, way) for way in (ways.PLAIN, ways.CHECKPOINT, ways.MERGED, ways.GENERIC, ways.CHAINED)],
    *[Row(GRAD, way) for way in (ways.PLAIN, ways.CHECKPOINT, ways.MERGED, ways.GENERIC, ways.CHAINED)],
]
MEMORY_CASES = {(row.name, str(d)): row for d in (DEEP, SHALLOW) for row in MEMORY if row.deep or d == SHALLOW}
"""The long ones first."""
MEMORY_TABLE = "chain_memory"


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
    """The calls of a table, warm, and how far the gradients that they gave are apart."""

    calls: dict[str, Call]
    differences: dict[str, float]
    failures: dict[str, str]
    """The words of a peer that fails."""

    def failed(self) -> dict[str, float]:
        """Their rows have no numbers."""
        return dict.fromkeys(self.failures, math.nan)

    def print_rest(self, *remarks: str) -> None:
        """What is to be said below a table."""
        for row, words in self.failures.items():
            print(f"{row} fails: {words}")
        print(
            *remarks,
            "difference: of its gradient and the one of the first row, relative to the largest entry of each leaf\n",
            sep="\n",
        )


def _compare(rows: Sequence[Row], chain: Chain) -> Compared:
    """Call each row once. The first is what the others are compared with."""
    compared, first, absent = Compared({}, {}, {}), None, missing()
    for row in rows:
        if row.way.needs in absent:
            continue
        try:
            call = row.kind.build(row.way, chain)
            gradient = row.kind.gradient(call())
        except Exception as error:
            if row.way.ours:
                raise
            compared.failures[row.name] = str(error).partition("\n")[0]
            for w in leaves(chain.blocks):
                w.grad = None
            continue
        compared.calls[row.name] = call
        if first is None:
            first = gradient
        else:
            compared.differences[row.name] = difference(gradient, first)
    return compared


def _timed(
    name: str, rows: Sequence[Row], chain: Chain, rounds: int, device: torch.device
) -> tuple[dict[str, float], Compared]:
    announce(name, "do they agree?")
    compared = _compare(rows, chain)
    repeats = dict.fromkeys(compared.calls, rounds)
    seconds = medians(compared.calls, repeats, device, lambda text: announce(name, text))
    announce(name, "")
    return seconds | compared.failed(), compared


def _times(name: str, options: argparse.Namespace) -> None:
    """Seconds of a chain that fills the caches, as multiples of the plain way."""
    chain = Chain(options.depth, WIDTH, ROWS, options.device)
    seconds, compared = _timed(name, TIMES, chain, options.repeats, options.device)
    print(
        f"{name}: forward and backward of {options.depth} additive couplings, width {WIDTH}, N = {ROWS}; "
        f"{options.device}, one thread, median of {options.repeats} calls"
    )
    lines = []
    for row in TIMES:
        ratio = over(seconds.get(row.name), seconds[row.plain])
        lines.append(
            {
                "": row.name,
                "s": number(seconds.get(row.name), 3),
                "over plain": number(ratio),
                "to reach": "-" if row.most is None else verdict(ratio, row.most),
                "difference": difference_cell(compared.differences.get(row.name)),
            }
        )
    print_table(lines)
    compared.print_rest("over plain: of the same kind and state; checkpoint_sequential: in sqrt(depth) parts")


def _tiny(name: str, options: argparse.Namespace) -> None:
    """Seconds of a chain whose arithmetic takes no time."""
    depth, width, rows = TINY
    calls = options.repeats * TINY_ROUNDS
    seconds, compared = _timed(name, TINIES, Chain(*TINY, options.device), calls, options.device)
    micro = {row: second / depth * 1e6 for row, second in seconds.items()}
    print(
        f"{name}: what a block costs at least: {depth} additive couplings, width {width}, N = {rows}, forward and "
        f"backward; {options.device}, one thread, median of {calls} calls"
    )
    lines = []
    for row in TINIES:
        lines.append(
            {
                "": row.name,
                "us a block": number(micro[row.name], 1),
                "more than plain": number(micro[row.name] - micro[row.plain], 1),
                "difference": difference_cell(compared.differences.get(row.name)),
            }
        )
    print_table(lines)
    compared.print_rest()


def _memory(name: str, options: argparse.Namespace) -> None:
    """The memory of a chain at two depths, a process a case."""
    if options.no_memory:
        return
    announce(name, "do they agree?")
    compared = _compare(MEMORY, Chain(*SMALL, options.device))
    cases = [case for case in MEMORY_CASES if case[0] in compared.calls]
    announce(name, "memory")
    with ThreadPoolExecutor(2) as pool:  # what is beside a process does not change its size
        sizes = pool.map(lambda case: peak_in_a_process("/".join((name, *case)), options.device), cases)
        peaks = dict(zip(cases, sizes, strict=True))
    announce(name, "")
    print(
        f"{name}: activation memory of {SHALLOW} and {DEEP} additive couplings, width {WIDTH}, N = {ROWS}, forward and "
        f"backward; {options.device}"
    )
    lines = []
    for row in MEMORY:
        shallow, deep = (peaks.get((row.name, str(d)), compared.failed().get(row.name)) for d in (SHALLOW, DEEP))
        growth = over(deep, shallow)
        lines.append(
            {
                "": row.name,
                f"MiB at {SHALLOW}": mebibytes(shallow),
                f"MiB at {DEEP}": mebibytes(deep),
                f"{DEEP} over {SHALLOW}": verdict(growth, GROWTH) if row.way.ours else number(growth),
                "MiB to reach": "-" if row.most is None else verdict(over(deep, 2**20), row.most),
                "difference": difference_cell(compared.differences.get(row.name)),
            }
        )
    print_table(lines)
    compared.print_rest(
        "MiB: the peak over what was there before, less the bytes of the gradients; the copy of the input counts",
        f"difference: on {SMALL[0]} blocks and {SMALL[2]} rows",
    )


REVERSIBLE: dict[str, Callable[[str, argparse.Namespace], None]] = {
    "chain": _times,
    MEMORY_TABLE: _memory,
    "tiny_chain": _tiny,
}
"""What prints each table."""
