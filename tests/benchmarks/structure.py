"""The table of exact GGN diagonals that use the structure of a net, beside those that pull back every column."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import nn

import invfunc

from .measure import difference, medians, once, peak_here, peak_in_a_process
from .peers import BACKPACK, OURS, Call, Problem, Result, backpack_diag_ggn, has, transformed
from .problems import (
    all_cnn_c,
    autoencoder,
    dense,
    lstm,
    mlp_autoencoder,
    part,
    three_c_three_d,
    transformer,
    u_net,
    vocabulary,
)
from .report import Cells, announce, difference_cell, mebibytes, number, over, print_table, verdict
from .tables import FEW

STRUCTURE = "structure"
DENSE = "dense path"
SLOW = 5
"""A call of more seconds is timed once, and takes a process for its memory only where that has a limit to reach."""
SECONDS = 10
"""About how many the calls of a median take."""

AUTO = transformed(lambda p: invfunc.diag_ggn(p.f, p.loss))
PULL_BACK_ALL = transformed(lambda p: invfunc.diag_ggn(p.f, p.loss, method="dense"))

METHODS = ("auto", "dense")
KFLR = {m: transformed(lambda p, m=m: invfunc.kfac(p.f, p.loss, method=m, fisher="exact")) for m in METHODS}
HESSIANS = {m: transformed(lambda p, m=m: invfunc.diag_hessian(p.f, p.loss, method=m)) for m in METHODS}

Build = Callable[[], Problem]


@dataclass(frozen=True)
class Row:
    """A problem, and how many times faster than a peer ours is to be."""

    name: str
    problem: Build
    least: float | None = None
    chunks: tuple[int, ...] = ()
    """BackPACK's, of which the fastest count."""
    parts: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    """In place of BackPACK the dense path: of few and of more columns, from which the time of all follows."""
    small: Build | None = None
    """Where the dense path has so few columns that its numbers can be compared."""
    mebibytes: float | None = None
    """What ours may take over what was there before."""


@dataclass(frozen=True)
class Measured:
    """The seconds of a row, and how far its numbers are apart."""

    ours: float
    peer: str
    theirs: float | None = None
    apart: float | None = None

    @property
    def faster(self) -> float | None:
        """How many times."""
        return over(self.theirs, self.ours)


def _side(pixels: int) -> str:
    return f"auto-encoder {pixels}x{pixels}"


SIDES = {16: (1, 4, 16, 64), 32: (1, 4, 16, 64, 256), 64: (64, 256, 768), 128: ()}
"""The chunks of BackPACK's calls, for each number of pixels a side."""
FASTER: dict[int, float] = {32: 40, 64: 250}
MOST_MEBIBYTES: dict[int, float] = {32: 25}
GROWTH = {32: 4.2, 64: 4.2, 128: 4.2}
"""How many times more seconds than half the side ours may take."""

ROWS = [
    *[
        Row(_side(n), partial(autoencoder, n), FASTER.get(n), chunks, mebibytes=MOST_MEBIBYTES.get(n))
        for n, chunks in SIDES.items()
    ],
    *[
        Row(f"U-Net {n}x{n}", partial(u_net, n), least, parts=((4, 2, 8), (4, 4, 16)), small=partial(u_net, 16))
        for n, least in ((32, 20), (64, 60))
    ],
    Row("MLP auto-encoder 784-256-32-256-784", mlp_autoencoder, 20, (1,)),
    *[
        Row(
            f"vocabulary of 5000, {name}",
            partial(vocabulary, 5000, attention),
            least,
            parts=((32, 1), (128, 1)),
            small=partial(vocabulary, 128, attention),
        )
        for name, attention, least in (("independent tokens", False, 300), ("attention", True, 100))
    ],
    Row(
        "vocabulary of 50000, independent tokens",
        partial(vocabulary, 50_000, False),
        parts=((32, 1), (128, 1)),
        small=partial(vocabulary, 128, False),
        mebibytes=300,
    ),
]
MEMORY = {(row.name, OURS): row for row in ROWS}
"""Whose memory can be measured in a process."""

NO_STRUCTURE: dict[str, Build] = {
    "3c3d": three_c_three_d,
    "all-cnn-c, N = 2": partial(all_cnn_c, 2),
    "transformer": transformer,
    "lstm": lstm,
    "eight layers 512 -> 512": dense,
}
FACTORED: dict[str, tuple[Build, float | None]] = {
    "auto-encoder 32x32": (partial(autoencoder, 32), 20),
    "U-Net 16x16": (partial(u_net, 16), None),
    "vocabulary of 200, independent tokens": (partial(vocabulary, 200, False), None),
    "vocabulary of 500, independent tokens": (partial(vocabulary, 500, False), 20),
}
"""Of which nets `kfac(fisher="exact")` is timed, and how many times faster than by all columns it is to be."""
BENT: dict[str, tuple[Build, float | None]] = {
    "auto-encoder 32x32, sigmoid": (partial(autoencoder, 32), 10),
    "auto-encoder 32x32, ReLU": (partial(autoencoder, 32, nn.ReLU), 10),
    "U-Net 32x32": (partial(u_net, 32), 10),
}
"""Of which nets `diag_hessian` is."""
SLOWER = 1.05
"""How many times the dense path's seconds ours may take where there is no structure."""
SHORT = 20e-3
"""A call of fewer seconds has nothing to reach."""
MORE_ROUNDS = 3
"""For each round that is asked for, where two times are nearly the same."""


def memory(case: tuple[str, str], device: torch.device) -> int:
    """The peak of one call in bytes, over what was there before."""
    return peak_here(AUTO(MEMORY[case].problem().to(device)), device)


def structure(name: str, options: argparse.Namespace) -> None:
    """Measure, and print: ours beside its peers, how it grows, and what it costs where there is no structure."""
    measured = {row.name: _measure(name, row, options) for row in ROWS}
    peaks = {} if options.no_memory else _memory(name, measured, options.device)
    announce(name, "")
    told = f"{options.device}, one thread, medians of up to {options.repeats} calls"
    print(f"{name}: exact GGN diagonals of nets with structure; {told}")
    print_table([_line(row, measured[row.name], peaks) for row in ROWS])
    print(
        "to reach: at least so many times the peer's speed, at most so many MiB over what was there before",
        f"BackPACK's: the fastest number of chunks, medians of {FEW}; a call of more than {SLOW} s is timed once",
        f"{DENSE}: extrapolated from the seconds of the columns of a few outputs and of more, through the whole net",
        f"difference: relative to the largest entry of the leaf; {DENSE}: of a U-Net 16x16, a vocabulary of 128\n",
        sep="\n",
    )
    print(f"{name}: how the auto-encoder grows; {told}")
    print_table(_growth(measured))
    print("a doubling: seconds over those of half the side\n")
    _by_method(name, "kfac", FACTORED, KFLR, options)
    _by_method(name, "diag_hessian", BENT, HESSIANS, options)
    _no_structure(name, options)


def _line(row: Row, measured: Measured, peaks: dict[str, float]) -> Cells:
    reached, peak = measured.faster, peaks.get(row.name)
    return {
        "": row.name,
        "invfunc s": number(measured.ours, 4),
        "peer s": number(measured.theirs, 3),
        "peer": measured.peer,
        "times faster": number(reached, 1),
        "to reach": "-" if row.least is None else _at_least(reached, row.least),
        "MiB": mebibytes(peak),
        "MiB to reach": "-" if row.mebibytes is None else verdict(over(peak, 2**20), row.mebibytes),
        "difference": difference_cell(measured.apart),
    }


def _at_least(value: float | None, limit: float) -> str:
    return "-" if value is None else f"{value:.1f} >= {limit:g} {'yes' if value >= limit else 'NO'}"


def _growth(measured: dict[str, Measured]) -> list[Cells]:
    """A line for each doubling of the side."""
    lines = []
    for half, side in pairwise(SIDES):
        small, large = measured[_side(half)], measured[_side(side)]
        lines.append(
            {
                "": f"{half} -> {side}",
                "invfunc, a doubling": verdict(over(large.ours, small.ours), GROWTH[side]),
                "BackPACK, a doubling": number(over(large.theirs, small.theirs), 1),
            }
        )
    return lines


def _measure(name: str, row: Row, options: argparse.Namespace) -> Measured:
    """Ours beside the fastest calls of BackPACK, or beside the dense path of a part of the columns."""
    announce(name, row.name)
    problem = row.problem().to(options.device)
    return _beside_dense(name, row, problem, options) if row.parts else _beside_backpack(name, row, problem, options)


def _beside_backpack(name: str, row: Row, problem: Problem, options: argparse.Namespace) -> Measured:
    calls = {OURS: AUTO(problem)}
    result, ours = _first(calls[OURS], options.device)
    firsts: dict[str, float] = {OURS: ours}
    differences: list[float] = []
    for n in row.chunks if has(BACKPACK) else ():
        peer = f"{BACKPACK}, chunks={n}"
        announce(name, f"{row.name}, {peer}")
        calls[peer] = backpack_diag_ggn(n)(problem)
        reference, firsts[peer] = _first(calls[peer], options.device)
        differences.append(difference(result, reference))
    peers = sorted(firsts.keys() - {OURS}, key=firsts.__getitem__)[:2]  # first calls are not told apart safely
    kept = {key: firsts[key] for key in (OURS, *peers)}
    times = _times(f"{name}: {row.name}", calls, kept, options.repeats, options.device)
    best = min(peers, key=times.__getitem__, default=None)
    return Measured(times[OURS], best or "-", times[best] if best else None, max(differences, default=None))


def _beside_dense(name: str, row: Row, problem: Problem, options: argparse.Namespace) -> Measured:
    assert row.parts and row.small
    small = row.small().to(options.device)
    apart = difference(AUTO(small)(), PULL_BACK_ALL(small)())
    few, more = (part(problem, *sizes) for sizes in row.parts)
    calls = {OURS: AUTO(problem), "few": PULL_BACK_ALL(few), "more": PULL_BACK_ALL(more)}
    firsts = {key: _first(call, options.device)[1] for key, call in calls.items()}
    times = _times(f"{name}: {row.name}", calls, firsts, options.repeats, options.device)
    at_few, at_more, at_all = (_outputs(p) for p in (few, more, problem))
    a_column = (times["more"] - times["few"]) / (at_more - at_few)
    theirs = times["few"] + a_column * (at_all - at_few)
    return Measured(times[OURS], f"{DENSE}, {at_few} and {at_more} of {at_all} outputs", theirs, apart)


def _outputs(problem: Problem) -> int:
    """How many a sample has."""
    with torch.no_grad():
        return problem.model(problem.x[:1]).numel()


def _first(call: Call, device: torch.device) -> tuple[Result, float]:
    """The result of a call, and its seconds."""
    results: list[Result] = []
    seconds = once(lambda: results.append(call()), device)
    return results[0], seconds


def _times(
    title: str, calls: dict[str, Call], firsts: dict[str, float], asked: int, device: torch.device
) -> dict[str, float]:
    """The medians of the calls of `firsts`, with fewer rounds where they are long; a slow one's is its first."""
    most = {key: min(asked, FEW) if key.startswith(BACKPACK) else asked for key in firsts}
    rounds = {key: max(1, min(most[key], int(SECONDS / first))) for key, first in firsts.items() if first <= SLOW}
    if not rounds:
        return firsts
    again = {key: calls[key] for key in rounds}
    return firsts | medians(again, rounds, device, partial(announce, title))


def _memory(name: str, measured: dict[str, Measured], device: torch.device) -> dict[str, float]:
    """The peaks of ours, a process a row."""
    announce(name, "memory")
    rows = [row.name for row in ROWS if measured[row.name].ours <= SLOW or row.mebibytes]
    with ThreadPoolExecutor(2) as pool:  # what is beside a process does not change its size
        peaks = pool.map(lambda row: peak_in_a_process("/".join((name, row, OURS)), device), rows)
        return dict(zip(rows, peaks, strict=True))


def _by_method(
    name: str,
    statistic: str,
    nets: dict[str, tuple[Build, float | None]],
    methods: dict[str, Callable[[Problem], Call]],
    options: argparse.Namespace,
) -> None:
    """Measure and print another statistic beside that of all columns."""
    lines = []
    for net, (build, least) in nets.items():
        announce(name, f"{statistic}, {net}")
        calls = {key: make(build().to(options.device)) for key, make in methods.items()}
        times = _times(net, calls, {k: _first(c, options.device)[1] for k, c in calls.items()}, FEW, options.device)
        ours, theirs = times["auto"], times["dense"]
        faster = "-" if least is None else _at_least(theirs / ours, least)
        of_both = {"invfunc s": number(ours, 4), "dense s": number(theirs, 3), "times faster": number(theirs / ours, 1)}
        lines.append({"": net, **of_both, "to reach": faster})
    announce(name, "")
    print(f"{name}: {statistic} by the structure and by all columns; {options.device}, one thread, medians of {FEW}")
    print_table(lines)
    print()


def _no_structure(name: str, options: argparse.Namespace) -> None:
    """Measure and print what looking for structure costs where none is found."""
    lines = []
    for net, build in NO_STRUCTURE.items():
        announce(name, net)
        problem = build().to(options.device)
        calls = {OURS: AUTO(problem), DENSE: PULL_BACK_ALL(problem)}
        (result, _), (reference, _) = (_first(call, options.device) for call in calls.values())
        firsts = {key: _first(call, options.device)[1] for key, call in calls.items()}
        times = _times(f"{name}: {net}", calls, firsts, options.repeats * MORE_ROUNDS, options.device)
        ratio = over(times[OURS], times[DENSE])
        lines.append(
            {
                "": net,
                "invfunc ms": number(times[OURS] * 1e3, 1),
                "dense ms": number(times[DENSE] * 1e3, 1),
                "over dense": verdict(ratio, SLOWER) if times[DENSE] >= SHORT else number(ratio),
                "difference": difference_cell(difference(result, reference)),
            }
        )
    announce(name, "")
    print(f"{name}: classifiers, whose outputs are few; {options.device}, one thread")
    print_table(lines)
    print(f'over dense: over method="dense"; calls below {SHORT * 1e3:g} ms have nothing to reach\n')
