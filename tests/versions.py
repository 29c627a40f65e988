"""The site's table of versions on which the default suite was run; `python -m tests.versions 2.14.1` adds to it.

It also writes the list of the private names of torch that the package uses. Each version of torch gets an environment,
which takes gigabytes and some minutes: in a folder that `--keep` names, where the next call finds it, or else for as
long as it is needed. `--python` says which interpreter makes it.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "notebooks" / "site" / "policy.md"
BEGIN, END = "<!-- versions: begin -->\n", "<!-- versions: end -->\n"
NAMES, NAMED = "<!-- names: begin -->\n", "<!-- names: end -->\n"
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
    done = subprocess.run([python, "-m", "pytest"], cwd=ROOT, capture_output=True, text=True, env=settings)
    print(done.stdout, file=sys.stderr)
    return torch, interpreter, counts(done.stdout)


def counts(output: str) -> str:
    """The numbers of tests that failed, passed and were skipped, from what pytest prints."""
    *_, last = output.strip().splitlines() or [""]
    return ", ".join(re.findall(r"\d+ (?:failed|passed|skipped|error\w*)", last)) or f"no result: {last}"


def private(file: Path) -> set[str]:
    """The names of torch with a part that begins with an underscore, in a file."""
    parsed, modules, found = ast.parse(file.read_text()), {"torch": "torch"}, set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "torch":
            for name in node.names:
                modules[name.asname or name.name] = f"{node.module}.{name.name}"
                found.add(f"{node.module}.{name.name}")
        elif isinstance(node, ast.Call) and getattr(node.func, "id", "") == "import_module":
            found.add(ast.literal_eval(node.args[0]))
    for node in ast.walk(parsed):
        name, _, rest = ast.unparse(node).partition(".") if isinstance(node, ast.Attribute) else ("", "", "")
        if name in modules:
            found.add(f"{modules[name]}.{rest}")
    hidden = {name for name in found if re.fullmatch(r"torch[.\w]*\._[a-zA-Z][.\w]*", name)}
    return {name for name in hidden if not any(other.startswith(f"{name}.") for other in hidden)}


def listed() -> str:
    """The private names of torch that the package uses, in Markdown: a line for each module of torch."""
    every = set[str]().union(*(private(file) for file in (ROOT / "invfunc").rglob("*.py")))
    of: dict[str, list[str]] = {}
    for name in sorted(every):
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
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("torch", nargs="*", help="a version, as 2.14.1")
    parser.add_argument("--python", default=sys.executable, help="the interpreter of the environments")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="where environments stay")
    given = parser.parse_args()
    PAGE.write_text(rewritten(PAGE.read_text(), []))
    with tempfile.TemporaryDirectory() as spare:
        for torch in given.torch:
            folder = (given.keep or Path(spare)) / f"{Path(given.python).name}-{torch}"
            found = line(environment(folder, given.python, torch))
            print(*found)
            PAGE.write_text(rewritten(PAGE.read_text(), [found]))


if __name__ == "__main__":
    main()
