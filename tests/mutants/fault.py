"""One planted fault, and how it is run: in a copy of the library, by the tests that should find it."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_COPIED = ("invfunc", "tests", "notebooks", "pyproject.toml", "README.md")
_LONGEST = 600
"""Seconds after which the tests of a fault count as found: it never ends."""


@dataclass(frozen=True)
class Fault:
    """`old` in the place of `new` in a file of the library, and the tests that should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    """Files and folders of `tests`."""

    def planted(self, source: str) -> str:
        """The source of the file with the fault."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name!r}: {self.file} has its text {source.count(self.old)} times: {self.old!r}")
        return source.replace(self.old, self.new)


@dataclass(frozen=True)
class Outcome:
    """What came of a fault: "found", by which test, "survived", or "broken" where the tests could not run."""

    fault: Fault
    came: str
    by: str
    seconds: float


def copied(to: Path) -> Path:
    """A copy of the library and its tests."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    return to


def run(fault: Fault, where: Path) -> Outcome:
    """Plant a fault in a copy, run its tests, and take it out again."""
    file, started = where / "invfunc" / fault.file, time.perf_counter()
    sound = file.read_text()
    file.write_text(fault.planted(sound))
    try:
        came, by = _tested(fault, where)
    finally:
        file.write_text(sound)
    return Outcome(fault, came, by, time.perf_counter() - started)


def _tested(fault: Fault, where: Path) -> tuple[str, str]:
    files = [f"tests/{file}" for file in fault.tests.split()]
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-n0", "--no-header", "-p", "no:cacheprovider", *files]
    around = {"PYTHONPATH": str(where), "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}
    try:
        done = subprocess.run(
            command, cwd=where, env={**os.environ, **around}, capture_output=True, text=True, timeout=_LONGEST
        )
    except subprocess.TimeoutExpired:
        return "found", "it does not end"
    if done.returncode == 0:
        return "survived", ""
    failed = re.search(r"^FAILED (\S+)", done.stdout, re.MULTILINE)
    if done.returncode == 1 and failed:
        return "found", failed[1].removeprefix("tests/")
    last = (done.stdout + done.stderr).strip().splitlines()[-1:]
    return "broken", " ".join(last)
