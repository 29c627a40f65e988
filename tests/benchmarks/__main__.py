"""The command: `python -m tests.benchmarks --help`."""

from __future__ import annotations

import argparse
import math
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import NoReturn

import torch

from .anchors import ANCHORS, anchors
from .budgets import MEMORY_BUDGET, budgets
from .chain_ways import INSTALL_PEERS, missing
from .first_order import FIRST_ORDER
from .graphs import GRAPHS, graphs
from .measure import difference, medians, peak_here, peak_in_a_process
from .module_blocks import MODULE_BLOCKS, module_blocks
from .peers import FUNC, INSTALL, OURS, Call, Problem, Result, has, plain_gradient
from .plans import PLANS, plans
from .processes import PROCESSES, processes
from .readme import CASES as README_CASES
from .readme import README_TABLE, numbers, peak
from .report import announce, difference_cell, mebibytes, memory_cells, print_table, time_cells, verdict
from .reversible import MEMORY_CASES, MEMORY_TABLE, REVERSIBLE, activation_memory
from .second_order import DRAWN
from .structure import MEMORY, STRUCTURE, memory, structure
from .tables import BEHIND, GRADIENT, TABLES, Case, Table
from .thresholds import THRESHOLDS, measured

_EXPECTED = "Full backward hook is firing", "There is a performance drop"  # BackPACK's first layer; vmap of attention
_FAILS = "Extension saving to"  # BackPACK leaves out a module that it does not know
_OTHERS = REVERSIBLE | {STRUCTURE: structure, THRESHOLDS: measured, PROCESSES: processes, MEMORY_BUDGET: budgets}
_OTHERS |= {MODULE_BLOCKS: module_blocks, PLANS: plans, GRAPHS: graphs, ANCHORS: anchors, README_TABLE: numbers}
_OF_ONE_CASE = {MEMORY_TABLE: activation_memory, STRUCTURE: memory, README_TABLE: peak}


def main(argv: Sequence[str] | None = None) -> None:
    """Print the tables, or with `--memory-case` the bytes of one case."""
    options = _parse(argv)
    torch.set_num_threads(1)
    for text in _EXPECTED:
        warnings.filterwarnings("ignore", text)
    warnings.filterwarnings("error", _FAILS)
    if options.memory_case:
        name, row, peer = options.memory_case
        if name in _OF_ONE_CASE:
            print(_OF_ONE_CASE[name]((row, peer), options.device))
            return
        problem = TABLES[name].problem().to(options.device)
        print(peak_here(TABLES[name].peers()[row, peer](problem), options.device))
        return
    for peer, install in INSTALL.items():
        if not has(peer) and set(options.only) & {*TABLES, STRUCTURE}:
            print(f"{peer} is missing, its columns stay empty: {install}\n")
    if missing() and set(options.only) & set(REVERSIBLE):
        print(f"{' and '.join(missing())}: missing, the rows stay empty: {INSTALL_PEERS}\n")
    if options.device.type == "cuda":
        print(f"{options.device}: {torch.cuda.get_device_name(options.device)}, torch {torch.__version__}\n")
    behind: dict[str, float] = {}
    for name in options.only:
        if name in TABLES:
            behind |= _run(name, TABLES[name], options)
        else:
            _OTHERS[name](name, options)
    if behind:
        row = max(behind, key=behind.__getitem__)
        slowest = verdict(behind[row] * 1e3, BEHIND)
        print_table([{"": "the most that ours is slower than vmap(grad)", "row": row, "ms to reach": slowest}])


def _run(name: str, table: Table, options: argparse.Namespace) -> dict[str, float]:
    """Measure a table and print it; returns how many seconds statistics of shares are slower than `vmap(grad)`."""
    announce(name, "do they agree?")
    calls, differences, failures = _first_calls(table, table.problem().to(options.device))
    failed = dict.fromkeys(failures, math.nan)
    repeats = table.repeats(options.repeats)
    times = medians(calls, {case: repeats[case[0]] for case in calls}, options.device, partial(announce, name)) | failed
    peaks: dict[Case, float] = {}
    if table.memory and not options.no_memory:
        announce(name, "memory")
        with ThreadPoolExecutor(2) as pool:  # what is beside a process does not change its size
            sizes = pool.map(lambda case: peak_in_a_process("/".join((name, *case)), options.device), calls)
            peaks = dict(zip(calls, sizes, strict=True)) | failed
    announce(name, "")

    most = max(repeats.values())
    few = [f"{repeats[row.name]} of {row.name}" for row in table.rows if repeats[row.name] < most]
    print(f"{name}: {table.title}; {options.device}, one thread, median of {'; '.join([f'{most} calls', *few])}")
    lines = []
    for row in table.rows:
        line = {"": row.name} | time_cells(row, times, table) | memory_cells(row, peaks)
        lines.append(line | {"difference": difference_cell(differences[row.name])})
    print_table(lines)
    print(f"{GRADIENT[0]}: {times[GRADIENT]:.4f} s" + (f", {mebibytes(peaks[GRADIENT])} MiB" if peaks else ""))
    for failure in dict.fromkeys((peer, words) for (_, peer), words in failures.items()):
        rows_of = [row for (row, peer), words in failures.items() if (peer, words) == failure]
        print(f"{failure[0]} fails in {', '.join(rows_of)}: {failure[1]}")
    print(table.legend)
    print("difference: ours and each peer's, the largest, relative to the largest entry of the peer's leaf\n")
    beside = [row.name for row in table.rows if row.name in FIRST_ORDER and (row.name, FUNC) in calls]
    return {f"{name}/{row}": times[row, OURS] - times[row, FUNC] for row in beside}


def _first_calls(table: Table, problem: Problem) -> tuple[dict[Case, Call], dict[str, float | None], dict[Case, str]]:
    """The calls, warm; how far ours and the others are apart in each row; and why another peer fails, where it does."""
    calls: dict[Case, Call] = {GRADIENT: plain_gradient(problem)}
    calls[GRADIENT]()
    differences: dict[str, float | None] = {}
    failures: dict[Case, str] = {}
    for row in table.rows:
        results: dict[str, Result] = {}
        for name, peer in row.peers.items():
            if not has(name):
                continue
            try:
                call = peer(problem)
                results[name], calls[row.name, name] = call(), call
            except Exception as error:
                if name == OURS:
                    raise
                failures[row.name, name] = str(error).partition("\n")[0]
        ours = results.pop(OURS)
        others = () if row.name in DRAWN else results.values()
        differences[row.name] = max((difference(ours, other) for other in others), default=None)
    return calls, differences, failures


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")  # one line, without the usage in front


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _Parser(
        prog="python -m tests.benchmarks",
        description="Time and peak memory of invfunc, BackPACK, Opacus and plain vmap, and of reversible chains beside "
        "MemCNN and invtorch: seconds from interleaved calls in one process on one thread, memory from a process a "
        f"case. {'; '.join(f'{peer}: {text}' for peer, text in INSTALL.items())}; MemCNN and invtorch: {INSTALL_PEERS}",
    )
    names = [*TABLES, *_OTHERS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="TABLE", help=", ".join(names))
    parser.add_argument("--device", type=_device, default="cpu", help="cpu or a CUDA device (default: cpu)")
    parser.add_argument("--repeats", type=_count("rounds"), default=7, help="rounds of each median (default: 7)")
    parser.add_argument("--depth", type=_count("blocks"), default=8, help="blocks of the table chain (default: 8)")
    parser.add_argument("--part", type=_part, metavar="I/K", help="of memory-budget, part I of K of all cases")
    parser.add_argument("--limit", type=_count("seconds"), default=600, help="for a case of memory-budget (600)")
    parser.add_argument("--inductor", action="store_true", help="of plans, every case by inductor, not one model's")
    parser.add_argument("--readme", action="store_true", help="measure README's numbers alone, and write them there")
    parser.add_argument("--no-memory", action="store_true", help="measure seconds only")
    parser.add_argument("--memory-case", type=_case, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.readme:
        options.only = [README_TABLE]
    return options


def _device(text: str) -> torch.device:
    try:
        device = torch.device(text)
        torch.zeros(1, device=device)
    except (RuntimeError, AssertionError):
        raise argparse.ArgumentTypeError(f"torch cannot compute on {text!r} here") from None
    if device.type not in ("cpu", "cuda"):
        raise argparse.ArgumentTypeError(f"cpu or a CUDA device is wanted, not {text!r}")
    return device


def _count(things: str) -> Callable[[str], int]:
    def count(text: str) -> int:
        if not (text.isdecimal() and int(text) >= 1):
            raise argparse.ArgumentTypeError(f"a number of {things} from 1 on is wanted, not {text!r}")
        return int(text)

    return count


def _part(text: str) -> tuple[int, int]:
    part, _, parts = text.partition("/")
    if not (part.isdecimal() and parts.isdecimal() and 1 <= int(part) <= int(parts)):
        raise argparse.ArgumentTypeError(f"a part as 2/5 is wanted, not {text!r}")
    return int(part), int(parts)


def _case(text: str) -> tuple[str, str, str]:
    table, row, peer = (text.split("/") + ["", ""])[:3]
    of_tables = {MEMORY_TABLE: MEMORY_CASES, STRUCTURE: MEMORY, README_TABLE: README_CASES} | {
        name: TABLES[name].peers() for name in TABLES
    }
    cases = of_tables.get(table, ())
    if (row, peer) not in cases:
        raise argparse.ArgumentTypeError(f"TABLE/ROW/PEER is wanted, not {text!r}")
    return table, row, peer


if __name__ == "__main__":
    main()
