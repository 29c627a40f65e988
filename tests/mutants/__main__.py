"""Plant faults and see which of them the tests find."""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.fault import Fault, Outcome, copied, run
from tests.mutants.planted import FAULTS


def outcomes(faults: list[Fault], processes: int, every: bool) -> Iterator[Outcome]:
    """What comes of each fault; each process has a copy of its own."""
    with ExitStack() as stack:
        copies = SimpleQueue[Path]()
        for _ in range(processes):
            copies.put(copied(Path(stack.enter_context(tempfile.TemporaryDirectory()))))

        def one(fault: Fault) -> Outcome:
            where = copies.get()
            try:
                return run(fault, where, every)
            finally:
                copies.put(where)

        yield from stack.enter_context(ThreadPoolExecutor(processes)).map(one, faults)


def by_package(done: list[Outcome]) -> Iterator[str]:
    """The lines of a table: how many faults each package has, and how many of them are found."""
    yield f"{'package':14} {'faults':>6} {'found':>6} {'seconds':>8}"
    for package in sorted({outcome.fault.package for outcome in done}):
        of = [outcome for outcome in done if outcome.fault.package == package]
        found = sum(outcome.came == "found" for outcome in of)
        yield f"{package:14} {len(of):6} {found:6} {sum(outcome.seconds for outcome in of):8.0f}"


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--part", default="1/1", help="which part of all faults, as 1/4")
    parser.add_argument("--only", default="", help="faults whose name or file has this in it")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--all", action="store_true", help="with the tests that pytest leaves out unless it is told")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    chosen = [f for f in FAULTS if options.only in f.name or options.only in f.file]
    chosen = chosen[part - 1 :: parts]
    os.environ["OMP_NUM_THREADS"] = "1"  # there is a process for each core
    started, done = time.perf_counter(), []
    for outcome in outcomes(chosen, options.processes, options.all):
        done.append(outcome)
        fault = outcome.fault
        print(f"{outcome.came:8} {outcome.seconds:5.0f} s  {fault.name} ({fault.file})  {outcome.by}", flush=True)
    found, slow = (sum(outcome.came == came for outcome in done) for came in ("found", "slow"))
    print("", *by_package(done), "", sep="\n")
    print(f"{found} of {len(done)} found in {time.perf_counter() - started:.0f} s, and {slow} left to --all")
    return int(found + slow < len(done))


if __name__ == "__main__":
    sys.exit(main())
