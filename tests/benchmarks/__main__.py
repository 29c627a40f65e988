"""The command: `python -m tests.benchmarks --help`."""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from typing import NoReturn

import torch

from .measure import difference, medians, peak_here, peak_in_a_process
from .peers import BACKPACK, INSTALL_BACKPACK, OURS, PEERS, has_backpack
from .tables import TABLES, UNIT, Row, Table, Times

Peaks = dict[tuple[str, str], int | None]


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, or with `--memory-case` the bytes of one case."""
    options = _parse(argv)
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", "Full backward hook is firing")  # BackPACK's first layer
    if options.memory_case:
        name, row, peer = options.memory_case
        problem = TABLES[name].problem().to(options.device)
        print(peak_here(TABLES[name].peers()[row, peer](problem), options.device))
        return
    if not has_backpack():
        print(f"BackPACK is missing, its columns stay empty: {INSTALL_BACKPACK}\n")
    for name in options.only:
        _run(name, TABLES[name], options)


def _run(name: str, table: Table, options: argparse.Namespace) -> None:
    """Measure a table and print it."""

    def announce(text: str) -> None:
        if sys.stderr.isatty():
            print(f"\r\x1b[K{text and f'{name}: {text}'}", end="", file=sys.stderr, flush=True)

    problem = table.problem().to(options.device)
    peers = {key: peer for key, peer in table.peers().items() if key[1] != BACKPACK or has_backpack()}
    calls = {key: peer(problem) for key, peer in peers.items()}
    announce("do they agree?")
    differences = {row.name: _disagreement(row, calls) for row in table.rows}
    times = medians(calls, options.repeats, options.device, announce)
    peaks: Peaks = {}
    for row, peer in () if options.no_memory else calls:
        announce(f"memory of {peer}, {row}")
        peaks[row, peer] = peak_in_a_process(f"{name}/{row}/{peer}", options.device)
    announce("")

    print(f"{name}: {table.title}; {options.device}, one thread, median of {options.repeats}")
    unit = times[UNIT] if table.unit else 1.0
    lines = []
    for row in table.rows:
        line = {"": row.name} | _times(row, times, unit, "gradients" if table.unit else "s")
        line |= _memory(row, peaks) if peaks else {}
        lines.append(line | {"difference": f"{differences[row.name]:.0e}"})
    _print(lines)
    if table.unit:
        print(f"{UNIT[0]}: {unit:.4f} s" + (f", {_mebibytes(peaks[UNIT])} MiB" if peaks else ""))
    print(table.legend)
    print("difference: ours and each peer's, the largest, relative to the largest entry of the peer's leaf\n")


def _disagreement(row: Row, calls: dict) -> float:
    """How far our result is from the other peers'; this first call also warms each of them."""
    results = {peer: calls[row.name, peer]() for peer in row.peers if (row.name, peer) in calls}
    ours = results.pop(OURS)
    return max((difference(ours, other) for other in results.values()), default=float("nan"))


def _times(row: Row, times: Times, unit: float, name: str) -> dict[str, str]:
    seconds = {peer: times.get((row.name, peer)) for peer in PEERS}
    cells = {f"{peer} {name}": _number(_over(t, unit), 3) for peer, t in seconds.items()}
    return cells | {
        "time / BackPACK": _number(_over(seconds[OURS], seconds[BACKPACK])),
        "time to reach": _verdict(_over(seconds[OURS], row.base(times, row)), row.time),
    }


def _memory(row: Row, peaks: Peaks) -> dict[str, str]:
    sizes = {peer: peaks.get((row.name, peer)) for peer in PEERS}
    over = _over(sizes[OURS], sizes[BACKPACK])
    cells = {f"{peer} MiB": _mebibytes(size) for peer, size in sizes.items()}
    return cells | {"memory / BackPACK": _number(over), "memory to reach": _verdict(over, row.memory)}


def _over(value: float | None, base: float | None) -> float | None:
    return value / base if value is not None and base else None


def _number(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def _mebibytes(size: int | None) -> str:
    return "-" if size is None else f"{size / 2**20:.1f}"


def _verdict(value: float | None, limit: float | None) -> str:
    if value is None or limit is None:
        return "-"
    return f"{value:.2f} <= {limit:g} {'yes' if value <= limit else 'NO'}"


def _print(lines: list[dict[str, str]]) -> None:
    """Print the lines as a Markdown table, each column as wide as it needs to be."""
    columns = [[name, *[line[name] for line in lines]] for name in lines[0]]
    for column in columns:
        width = max(map(len, column))
        pad = str.rjust if column[0] else str.ljust
        column[:] = [pad(cell, width) for cell in column]
        column.insert(1, "-" * (width - 1) + (":" if column[0].strip() else "-"))
    for cells in zip(*columns, strict=True):
        print(f"| {' | '.join(cells)} |")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")  # one line, without the usage in front


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m tests.benchmarks",
        description="Time and peak memory of invfunc, BackPACK and plain vmap: seconds from interleaved "
        f"calls in one process on one thread, memory from a process a case. BackPACK: {INSTALL_BACKPACK}",
    )
    names = list(TABLES)
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="TABLE", help=", ".join(names))
    parser.add_argument("--device", type=_device, default="cpu", help="cpu or a CUDA device (default: cpu)")
    parser.add_argument("--repeats", type=_repeats, default=7, help="rounds of each median (default: 7)")
    parser.add_argument("--no-memory", action="store_true", help="measure seconds only")
    parser.add_argument("--memory-case", type=_case, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise argparse.ArgumentTypeError(f"torch cannot compute on {text!r} here") from None
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"cpu or a CUDA device is wanted, not {text!r}")
    return device


def _repeats(text: str) -> int:
    if not (text.isdecimal() and int(text) >= 1):
        raise argparse.ArgumentTypeError(f"a number of rounds from 1 on is wanted, not {text!r}")
    return int(text)


def _case(text: str) -> tuple[str, str, str]:
    table, row, peer = (text.split("/") + ["", ""])[:3]
    if table not in TABLES or (row, peer) not in TABLES[table].peers():
        raise argparse.ArgumentTypeError(f"TABLE/ROW/PEER is wanted, not {text!r}")
    return table, row, peer


if __name__ == "__main__":
    main()
