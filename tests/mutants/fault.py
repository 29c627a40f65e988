"""One planted fault, and how it is looked for: in a copy of the library, by the tests that should find it."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from itertools import count
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_COPIED = ("invfunc", "tests", "notebooks", "pyproject.toml", "README.md", ".github")
_LONGEST = 150
"""Seconds after which a test counts as one that never ends."""

_LATER = count(10)
"""By how many seconds a file with a fault is younger: bytecode is known by the age of its file."""

_PROCESSES = get_context("forkserver")  # torch is imported once; each fault has a process of its own
_PROCESSES.set_forkserver_preload(["torch", "hypothesis", "pytest"])


@dataclass(frozen=True)
class Fault:
    """`new` in the place of `old` in a file of the library, and the tests that should fail."""

    name: str
    file: str
    old: str
    new: str
    tests: str
    """Files, folders and single tests (`file.py::Laws::test_one`) of `tests`: first the one that found it last."""
    endless: bool = False
    """Whether it is found by a test that does not end; of any other fault that says nothing."""

    def planted(self, source: str) -> str:
        """The source of the file with the fault."""
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name!r}: {self.file} has its text {source.count(self.old)} times: {self.old!r}")
        return source.replace(self.old, self.new)

    @property
    def package(self) -> str:
        """The folder of the library that its file is in, or the file at the top."""
        return self.file.split("/")[0]


@dataclass(frozen=True)
class Outcome:
    """What came of a fault: "found", by which test, "slow" where that is one for `--all` alone, "survived", or "broken"
    where a test never ends or none can run."""

    fault: Fault
    came: str
    by: str
    seconds: float
    """Of the processor, as others may use the machine too."""


def copied(to: Path) -> Path:
    """A copy of the library and its tests."""
    for name in _COPIED:
        source = ROOT / name
        if source.is_dir():
            shutil.copytree(source, to / name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copy(source, to / name)
    return to


def run(fault: Fault, where: Path, every: bool) -> Outcome:
    """Plant a fault in a copy, look for it, and take it out again."""
    file = where / "invfunc" / fault.file
    sound, times = file.read_text(), file.stat()
    file.write_text(fault.planted(sound))
    os.utime(file, (times.st_atime, times.st_mtime + next(_LATER)))
    try:
        return Outcome(fault, *_searched(fault, where, every))
    finally:
        file.write_text(sound)
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))


def tests(fault: Fault, every: bool, here: Connection) -> tuple[str, str]:
    """Run the tests of a fault until one fails: what came of it, and by which one."""
    import pytest
    from hypothesis import Phase, settings

    class Watch:
        failed = ""

        def pytest_collection(self):
            settings.register_profile("faults", settings(), phases=[Phase.explicit, Phase.generate])  # none is shrunk
            settings.load_profile("faults")

        def pytest_runtest_logstart(self, nodeid):
            here.send(("", nodeid.removeprefix("tests/"), time.process_time()))

        def pytest_runtest_logreport(self, report):
            if report.failed:
                self.failed = self.failed or report.nodeid.removeprefix("tests/")

    watch, (first, *rest) = Watch(), [f"tests/{file}" for file in fault.tests.split()]
    for files in [[first], rest] if rest else [[first]]:  # to collect all of them takes longer than to run the first
        options = ["-x", "-q", "-n0", "-p", "no:cacheprovider", *["--all"] * every]
        code = pytest.main([*options, *files], plugins=[watch])
        if code == pytest.ExitCode.TESTS_FAILED and watch.failed:
            return "found", watch.failed
        if code == pytest.ExitCode.NO_TESTS_COLLECTED:
            return "slow", files[0]
        if code != pytest.ExitCode.OK:
            return "broken", f"pytest: {code!r}"
    return "survived", ""


def _searched(fault: Fault, where: Path, every: bool) -> tuple[str, str, float]:
    there, here = _PROCESSES.Pipe(duplex=False)
    process = _PROCESSES.Process(target=_alone, args=(fault, where, every, here))
    process.start()
    here.close()
    at, spent = "", 0.0
    try:
        while there.poll(_LONGEST):
            came, at, spent = there.recv()
            if came:
                return came, at, spent
        return "found" if fault.endless else "broken", f"{at or 'the start'} (it does not end)", spent + _LONGEST
    except EOFError:
        return ("found", f"{at} (the process ends)", spent) if at else ("broken", "the process ends", spent)
    finally:
        try:
            os.killpg(process.pid or 0, signal.SIGKILL)  # with all that it has started
        except ProcessLookupError:
            pass
        process.join()


def _alone(fault: Fault, where: Path, every: bool, here: Connection) -> None:
    """Look for a fault in this process, which is the fault's own: the library is that of the copy from here on."""
    os.setsid()
    _move(where)
    with open(os.devnull, "w") as nowhere, redirect_stdout(nowhere), redirect_stderr(nowhere):
        came, by = tests(fault, every, here)
        here.send((came, by, time.process_time()))


def _move(where: Path) -> None:
    os.chdir(where)
    os.environ["PYTHONPATH"], sys.dont_write_bytecode = str(where), False
    sys.path[:] = [str(where), *(path for path in sys.path if path not in ("", str(ROOT)))]
    for name in [name for name in sys.modules if name.split(".")[0] in ("invfunc", "tests")]:
        del sys.modules[name]
