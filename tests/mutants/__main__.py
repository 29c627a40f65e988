"""Plant faults and see which of them the tests find."""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from queue import SimpleQueue

from tests.mutants.blocks import BLOCKS
from tests.mutants.fault import Fault, Outcome, copied, run
from tests.mutants.operations import OPERATIONS
from tests.mutants.statistics import STATISTICS

FAULTS = [*STATISTICS, *OPERATIONS, *BLOCKS]


def outcomes(faults: list[Fault], processes: int) -> Iterator[Outcome]:
    """What comes of each fault; each process has a copy of its own."""
    with ExitStack() as stack:
        copies = SimpleQueue[Path]()
        for _ in range(processes):
            copies.put(copied(Path(stack.enter_context(tempfile.TemporaryDirectory()))))

        def one(fault: Fault) -> Outcome:
            where = copies.get()
            try:
                return run(fault, where)
            finally:
                copies.put(where)

        yield from stack.enter_context(ThreadPoolExecutor(processes)).map(one, faults)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--part", default="1/1", help="which part of all faults, as 1/4")
    parser.add_argument("--only", default="", help="faults whose name or file has this in it")
    parser.add_argument("--processes", type=int, default=1)
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    chosen = [f for f in FAULTS if options.only in f.name or options.only in f.file][part - 1 :: parts]
    found = 0
    for outcome in outcomes(chosen, options.processes):
        found += outcome.came == "found"
        fault = outcome.fault
        print(f"{outcome.came:8} {outcome.seconds:5.0f} s  {fault.name} ({fault.file})  {outcome.by}", flush=True)
    print(f"{found} of {len(chosen)} found")
    return int(found < len(chosen))


if __name__ == "__main__":
    sys.exit(main())
