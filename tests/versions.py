"""The site's table of versions on which the default suite was run; `python -m tests.versions 2.14.1` adds to it.

It also writes the list of the private names of torch that the package uses. Each version of torch gets an environment,
which takes gigabytes and some minutes: in a folder that `--keep` names, where the next call finds it, or else for as
long as it is needed. `--python 3.12` makes it with another Python. A version that `pyproject.toml` does not allow can
be tried as well. What stands behind `--` goes to pytest, as `-- -m quick tests/kronecker`; the table stays as it is.
"""

from __future__ import annotations

import argparse
import ast
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
PYTHON = "import platform; print(platform.python_version())"
PROBE = "import platform, torch; print(torch.__version__.partition('+')[0], platform.python_version())"


def interpreter(given: str) -> tuple[str, str]:
    """The interpreter of a version of Python, as 3.12, on the path or of pyenv, or of this name; and its version."""
    versions = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    names = [given]
    if re.fullmatch(r"[\d.]+", given):
        names = [f"python{given}", *map(str, sorted(versions.glob(f"{given}*/bin/python")))]
    for name in names:
        if shutil.which(name) is not None:
            told = subprocess.run([name, "-c", PYTHON], capture_output=True, text=True).stdout.strip()
            if told:  # one that pyenv puts on the path may tell nothing but that it is not installed
                return name, told
    raise SystemExit(f"--python {given}: none is on the path or in {versions}. Give the file of its interpreter.")


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
    settings = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
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


def doors(parsed: ast.AST) -> dict[str, str]:
    """The names in a file that are doors to private torch, `name = door("path")`, with the paths."""
    found = {}
    for node in ast.walk(parsed):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            target = node.targets[0] if isinstance(node, ast.Assign) else node.target
            pairs = zip(getattr(target, "elts", [target]), getattr(node.value, "elts", [node.value]), strict=False)
            for name, value in pairs:
                if isinstance(value, ast.Call) and ast.unparse(value.func) == "door":
                    found[ast.unparse(name)] = ast.literal_eval(value.args[0])
    return found


def private(file: Path, every: dict[str, str]) -> set[str]:
    """The names of torch with a part that begins with an underscore, in a file that may import some of all doors."""
    parsed, found = ast.parse(file.read_text()), set[str]()
    modules = doors(parsed)
    for node in ast.walk(parsed):
        match node:
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("torch"):
                found |= {f"{module}.{each.name}" for each in names}
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("invfunc._torch"):
                modules |= {each.name: every[each.name] for each in names if each.name in every}
            case ast.Call(func=ast.Name(id="entry" | "holder"), args=[ast.Constant(path), ast.Constant(name)]):
                found.add(f"{path}.{name}")
            case (
                ast.Attribute(value=ast.Name(id=opened), attr=name)
                | ast.Call(func=ast.Name(id="getattr"), args=[ast.Name(id=opened), ast.Constant(name), _])
            ) if opened in modules:
                found.add(f"{modules[opened]}.{name}")
    return {name for name in found if "._" in name}


def used() -> list[str]:
    """The private names of torch that the package uses."""
    files = sorted((ROOT / "invfunc").rglob("*.py"))
    every = {name: path for file in files for name, path in doors(ast.parse(file.read_text())).items()}
    return sorted(set[str]().union(*(private(file, every) for file in files)))


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
    python, version = interpreter(given.python)
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
