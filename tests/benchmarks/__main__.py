"""The command: `python -m tests.benchmarks --help`."""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import torch

from .chains import INSTALL_PEERS, SMALL_CHAIN, small_chain
from .graphs import GRAPHS, graphs
from .measure import difference, medians, peak_here, peak_in_a_process
from .module_blocks import MODULE_BLOCKS, module_blocks
from .peers import INSTALL, OURS, Call, Problem, Result, has, plain_gradient
from .plans import PLANS, plans
from .readme import README_TABLE, numbers, peak
from .report import announce, cells, difference_cell, mebibytes, print_table
from .tables import DRAWN, GRADIENT, TABLES, Case, Table

_EXPECTED = "Full backward hook is firing", "There is a performance drop"  # BackPACK's first layer; vmap of attention
_FAILS = "Extension saving to"  # BackPACK leaves out a module that it does not know
_OTHERS = {SMALL_CHAIN: small_chain, MODULE_BLOCKS: module_blocks, PLANS: plans, GRAPHS: graphs, README_TABLE: numbers}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, or with `--memory-case` the bytes of one case."""
    options = _parse(argv)
    torch.set_num_threads(1)
    for text in _EXPECTED:
        warnings.filterwarnings("ignore", text)
    warnings.filterwarnings("error", _FAILS)
    if options.memory_case:
        name, row, peer = options.memory_case.split("/")
        if name == README_TABLE:
            print(peak((row, peer), options.device))
            return
        problem = TABLES[name].problem().to(options.device)
        print(peak_here(TABLES[name].peers()[row, peer](problem), options.device))
        return
    for peer, install in INSTALL.items():
        if not has(peer) and set(options.only) & set(TABLES):
            print(f"{peer} is missing, its columns stay empty: {install}\n")
    if options.device.type == "cuda":
        print(f"{options.device}: {torch.cuda.get_device_name(options.device)}, torch {torch.__version__}\n")
    for name in options.only:
        if name in TABLES:
            _run(name, TABLES[name], options)
        else:
            _OTHERS[name](name, options)


def _run(name: str, table: Table, options: argparse.Namespace) -> None:
    """Measure a table and print it."""
    announce(name, "do they agree?")
    calls, differences, failures = _first_calls(table, table.problem().to(options.device))
    failed = dict.fromkeys(failures, math.nan)
    repeats = options.repeats * table.rounds
    times = medians(calls, dict.fromkeys(calls, repeats), options.device, partial(announce, name)) | failed
    peaks: dict[Case, float] = {}
    if not options.no_memory:
        announce(name, "memory")
        with ThreadPoolExecutor(2) as pool:  # what is beside a process does not change its size
            sizes = pool.map(lambda case: peak_in_a_process("/".join((name, *case)), options.device), calls)
            peaks = dict(zip(calls, sizes, strict=True)) | failed
    announce(name, "")

    print(f"{name}: {table.title}; {options.device}, one thread, median of {repeats} calls")
    of_peers = {row: cells(row, times, peaks) | {"difference": difference_cell(differences[row])} for row in table.rows}
    print_table([{"": row} | line for row, line in of_peers.items()])
    print(f"{GRADIENT[0]}: {times[GRADIENT]:.4f} s" + (f", {mebibytes(peaks[GRADIENT])} MiB" if peaks else ""))
    for failure in dict.fromkeys((peer, words) for (_, peer), words in failures.items()):
        rows_of = [row for (row, peer), words in failures.items() if (peer, words) == failure]
        print(f"{failure[0]} fails in {', '.join(rows_of)}: {failure[1]}")
    print("difference: ours and each peer's, the largest, relative to the largest entry of the peer's leaf\n")


def _first_calls(table: Table, problem: Problem) -> tuple[dict[Case, Call], dict[str, float | None], dict[Case, str]]:
    """The calls, warm; how far ours and the others are apart in each row; and why another peer fails, where it does."""
    calls: dict[Case, Call] = {GRADIENT: plain_gradient(problem)}
    calls[GRADIENT]()
    differences: dict[str, float | None] = {}
    failures: dict[Case, str] = {}
    for row, peers in table.rows.items():
        results: dict[str, Result] = {}
        for name, peer in peers.items():
            if not has(name):
                continue
            try:
                call = peer(problem)
                results[name], calls[row, name] = call(), call
            except Exception as error:
                if name == OURS:
                    raise
                failures[row, name] = str(error).partition("\n")[0]
        ours = results.pop(OURS)
        others = () if row in DRAWN else results.values()
        differences[row] = max((difference(ours, other) for other in others), default=None)
    return calls, differences, failures


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks",
        description="Time and peak memory of invfunc, BackPACK, Opacus and plain vmap, and of reversible chains beside "
        "MemCNN and invtorch: seconds from interleaved calls in one process on one thread, memory from a process a "
        f"case. {'; '.join(f'{peer}: {text}' for peer, text in INSTALL.items())}; MemCNN and invtorch: {INSTALL_PEERS}",
    )
    names = [*TABLES, *_OTHERS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="TABLE", help=", ".join(names))
    parser.add_argument("--device", type=torch.device, default="cpu", help="cpu or a CUDA device (default: cpu)")
    parser.add_argument("--repeats", type=int, default=7, help="rounds of each median (default: 7)")
    parser.add_argument("--readme", action="store_true", help="measure README's numbers alone, and write them there")
    parser.add_argument("--no-memory", action="store_true", help="measure seconds only")
    parser.add_argument("--memory-case", help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.readme:
        options.only = [README_TABLE]
    return options


if __name__ == "__main__":
    main()
