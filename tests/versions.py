"""The site's table of versions on which the default suite was run; `python -m tests.versions 2.14.1` adds to it.

Each version of torch gets an environment, which takes gigabytes and some minutes: in a folder that `--keep` names, and
that the next call finds, or else for as long as it is needed. `--python` says which interpreter makes it.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "notebooks" / "site" / "policy.md"
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->\n"
HEAD = "| torch | Python | default suite |\n| --- | --- | --- |\n"
PROBE = "import platform, torch; print(torch.__version__.partition('+')[0], platform.python_version())"


def environment(folder: Path, python: str, torch: str) -> Path:
    """The interpreter of an environment with a version of torch, and all that the tests need."""
    found = folder / "bin" / "python"
    if not found.exists():
        subprocess.run([python, "-m", "venv", folder], check=True)
        for wanted in ([f"torch=={torch}"], [f"torch=={torch}", "-e", f"{ROOT}[dev]"]):
            subprocess.run([found, "-m", "pip", "install", "-q", *wanted], check=True)
    return found


def line(python: Path) -> tuple[str, str, str]:
    """The versions of torch and Python of an environment, and how the default suite ended there."""
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    versions = subprocess.run([python, "-c", PROBE], check=True, capture_output=True, text=True, env=settings)
    torch, interpreter = versions.stdout.split()
    done = subprocess.run([python, "-m", "pytest", "-q"], cwd=ROOT, capture_output=True, text=True, env=settings)
    print(done.stdout, file=sys.stderr)
    ended = done.stdout.strip().splitlines()[-1]
    counts = re.findall(r"\d+ (?:failed|passed|skipped|error\w*)", ended)
    return torch, interpreter, ", ".join(counts) or ended


def rewritten(page: str, lines: list[tuple[str, str, str]]) -> str:
    """The page with these lines in its table, in place of those of the same versions."""
    before, rest = page.split(BEGIN)
    table, after = rest.split(END)
    known = [tuple(cell.strip() for cell in row.split("|")[1:-1]) for row in table.splitlines()[2:]]
    every = {row[:2]: row for row in [*known, *lines]}
    rows = sorted(every.values(), key=lambda row: [[int(n) for n in re.findall(r"\d+", cell)] for cell in row[:2]])
    return before + BEGIN + HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows) + END + after


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torch", nargs="+", help="a version, as 2.14.1")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environments")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where environments stay")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as spare:
        for torch in given.torch:
            folder = (given.keep or Path(spare)) / f"{Path(given.python).name}-{torch}"
            found = line(environment(folder, given.python, torch))
            print(*found)
            PAGE.write_text(rewritten(PAGE.read_text(), [found]))


if __name__ == "__main__":
    main()
