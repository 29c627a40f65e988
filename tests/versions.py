"""The site's table of versions on which the default suite was run; `python -m tests.versions 2.14.1` adds to it.

It also writes the list of the private names of torch that the package uses. Each version of torch gets an environment,
which takes gigabytes and some minutes: in a folder that `--keep` names, where the next call finds it, or else for as
long as it is needed. `--python 3.12` makes it with another Python. A version that `pyproject.toml` does not allow can
be tried as well. What stands behind `--` goes to pytest, as `-- -m quick tests/kronecker`; the table stays as it is.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "notebooks" / "site" / "policy.md"
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->\n"
NAMES, NAMED = "<!-- names: begin -->\n", "<!-- names: end -->\n"
HEAD = "| torch | Python | default suite |\n| --- | --- | --- |\n"
PROBE = "import platform, torch; print(torch.__version__.partition('+')[0], platform.python_version())"


def interpreter(given: str) -> str:
    """The interpreter of this name, or of a version of Python, as 3.12: pyenv's, or the one on the path."""
    if not re.fullmatch(r"[\d.]+", given):
        return given
    of_pyenv = sorted((Path.home() / ".pyenv" / "versions").glob(f"{given}*/bin/python"))
    found = str(of_pyenv[-1]) if of_pyenv else shutil.which(f"python{given}")
    if found is None:
        raise SystemExit(f"--python {given}: neither pyenv nor the path has one. Give the file of its interpreter.")
    return found


def requirements(torch: str) -> Iterator[str]:
    """The version of torch, and all else that the package and its tests need, of whatever version of torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    wanted, extras = [*project["dependencies"], f"{project['name']}[dev]"], project["optional-dependencies"]
    yield f"torch=={torch}"
    while wanted:
        own = re.fullmatch(rf"{project['name']}\[(.*)\]", each := wanted.pop())
        if own is not None:
            wanted += [need for extra in own[1].split(",") for need in extras[extra]]
        elif not each.startswith("torch>"):
            yield each


def environment(folder: Path, python: str, torch: str) -> Path:
    """The interpreter of an environment with a version of torch, and all that the tests need: made, or made ready."""
    subprocess.run([python, "-m", "venv", folder], check=True)
    found = folder / "bin" / "python"
    subprocess.run([found, "-m", "pip", "install", "-q", *requirements(torch)], check=True)
    return found


def line(python: Path, chosen: Iterable[str] = ()) -> tuple[str, str, str]:
    """The versions of torch and Python of an environment, and how the default suite, or chosen tests, ended there."""
    settings = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    settings = {**os.environ, **settings}
    versions = subprocess.run([python, "-c", PROBE], check=True, capture_output=True, text=True, env=settings)
    torch, interpreter = versions.stdout.split()
    command, output = [python, "-m", "pytest", *chosen], list[str]()
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True, env=settings) as tests:
        for text in tests.stdout or ():
            print(text, end="", file=sys.stderr, flush=True)
            output.append(text)
    return torch, interpreter, counts("".join(output))


def counts(output: str) -> str:
    """The numbers of tests that failed, passed and were skipped, from what pytest prints."""
    *_, last = output.strip().splitlines() or [""]
    return ", ".join(re.findall(r"\d+ (?:failed|passed|skipped|error\w*)", last)) or f"no result: {last}"


def used() -> list[str]:
    """The private names of torch that the package uses: by a door, whose name is one everywhere, or imported."""
    texts = [file.read_text() for file in sorted((ROOT / "invfunc").rglob("*.py"))]
    doors = {found for text in texts for found in re.findall(r'^(\w+)(?:: Any)? = door\("(.*)"\)', text, re.MULTILINE)}
    names = {
        f"{path}.{name}"
        for door, path in doors
        for text in texts
        for name in re.findall(rf"(?<![\w.]){door}\.(\w+)", text)
    }
    for text in texts:
        names |= {".".join(found) for found in re.findall(r'\b(?:entry|holder)\("([\w.]+)", "(\w+)"\)', text)}
        names |= {
            ".".join(found) for found in re.findall(r"from (torch\S*) import (\w+)", text) if "._" in ".".join(found)
        }
    return sorted(names)


def listed() -> str:
    """The private names of torch that the package uses, in Markdown: a line for each module of torch."""
    of: dict[str, list[str]] = {}
    for name in used():
        module, _, own = name.rpartition(".")
        of.setdefault(module, []).append(f"`{own}`")
    return "".join(f"* `{module}`: {', '.join(own)}.\n" for module, own in of.items())


def between(page: str, begin: str, end: str, text: str) -> str:
    """The page with a text between two marks."""
    return page.partition(begin)[0] + begin + text + end + page.partition(end)[2]


def rewritten(page: str, lines: list[tuple[str, str, str]]) -> str:
    """The page with these lines in its table, in place of those of the same versions."""
    table = page.partition(BEGIN)[2].partition(END)[0]
    known = [tuple(cell.strip() for cell in row.split("|")[1:-1]) for row in table.splitlines()[2:]]
    every = {row[:2]: row for row in [*known, *lines]}
    rows = sorted(every.values(), key=lambda row: [[int(n) for n in re.findall(r"\d+", cell)] for cell in row[:2]])
    page = between(page, BEGIN, END, HEAD + "".join(f"| {' | '.join(row)} |\n" for row in rows))
    return between(page, NAMES, NAMED, listed())


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, usage="%(prog)s [options] [torch ...] [-- pytest's arguments]"
    )
    parser.add_argument("torch", nargs="*", help="a version, as 2.14.1")
    parser.add_argument("--python", default=sys.executable, help="the environments' version of Python, or interpreter")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where environments stay")
    ours, chosen = sys.argv[1:], list[str]()
    if "--" in ours:
        ours, chosen = ours[: ours.index("--")], ours[ours.index("--") + 1 :]
    given = parser.parse_args(ours)
    python = interpreter(given.python)
    version = subprocess.run([python, "-V"], check=True, capture_output=True, text=True).stdout.split()[1]
    with tempfile.TemporaryDirectory() as spare:
        for torch in given.torch:
            folder = (given.keep or Path(spare)) / f"torch{torch}-python{version}"
            found = line(environment(folder, python, torch), chosen)
            print(*found)
            if not chosen:
                PAGE.write_text(rewritten(PAGE.read_text(), [found]))
    PAGE.write_text(rewritten(PAGE.read_text(), []))


if __name__ == "__main__":
    main()
