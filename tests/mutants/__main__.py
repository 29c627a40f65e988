"""Plant faults and see which of them the tests find."""

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from tests.mutants.fault import ROOT, Fault
from tests.mutants.planted import FAULTS

COPIED = ("invfunc", "tests", "notebooks", "pyproject.toml", "README.md", ".github")
LONGEST = 300
"""Seconds after which a test counts as one that never ends."""


def copied(to: Path) -> Path:
    """A copy of the library and its tests."""
    for name in COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    return to


def outcome(fault: Fault, where: Path) -> str:
    """Outcome of a fault in a copy: "found", "survived", or "broken" if its tests do not run or end."""
    file = where / "invfunc" / fault.file
    sound = file.read_text()
    file.write_text(fault.planted(sound))
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "-p", "no:cacheprovider"]
    process = subprocess.Popen(
        [*command, *(f"tests/{test}" for test in fault.tests.split())],
        cwd=where,
        env={**os.environ, "PYTHONPATH": str(where), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return {0: "survived", 1: "found"}.get(process.wait(LONGEST), "broken")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # with all that it has started
        process.wait()
        return "broken"
    finally:
        file.write_text(sound)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("--part", default="1/1", help="which part of all faults, as 1/4")
    parser.add_argument("--only", default="", help="faults whose name or file has this in it")
    options = parser.parse_args()
    part, parts = map(int, options.part.split("/"))
    chosen = [f for f in FAULTS if options.only in f.name or options.only in f.file][part - 1 :: parts]
    came = []
    with tempfile.TemporaryDirectory() as folder:
        where = copied(Path(folder))
        for fault in chosen:
            started = time.perf_counter()
            came.append(outcome(fault, where))
            print(f"{came[-1]:8} {time.perf_counter() - started:5.0f} s  {fault.name} ({fault.file})", flush=True)
    print(f"{came.count('found')} of {len(came)} found")
    return int(came.count("found") < len(came))


if __name__ == "__main__":
    sys.exit(main())
