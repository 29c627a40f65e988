"""The site: its code runs and gives what other libraries give, its tables are what the code does, it names all."""

import importlib
import inspect
import re
import runpy
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import invfunc
from invfunc import errors, kronecker, layers, pairs
from invfunc.__main__ import main
from invfunc.testing import assert_trees_close
from invfunc.testing.laws import LAWS
from tests import coverage, versions, where
from tests.benchmarks import readme
from tests.test_architecture import FLOORS

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


def test_examples_run():
    names = {}
    for example in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        exec(example, names)
    for name, leaf in names["ggn"].items():
        assert (leaf - names["again"][name]).abs().max() <= 1e-4 * leaf.abs().max()
    for name, step in names["step"].items():
        assert (step * names["total"][name]).sum() > 0  # downhill
    assert all(p.grad.abs().max() > 0 for p in names["deep"].parameters())


def test_commands_stand_on_lines_of_their_own():
    commands = re.findall(r"^python -m pip install -e .*$", README, flags=re.MULTILINE)
    assert commands == [
        'python -m pip install -e ".[notebooks]" && python -m invfunc',
        'python -m pip install -e ".[dev]" && python -m pytest',
    ]


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)", README)
    assert links and all((ROOT / link).exists() for link in links if "://" not in link)


def test_is_a_first_screen():
    assert len(README.split()) < 900
    assert (ROOT / "notebooks" / "site" / "_static" / "first.png").stat().st_size < 150_000


def test_numbers_are_those_of_the_rows_that_are_measured():
    """If not, `python -m tests.benchmarks --readme` measures them."""
    table = README.partition(readme.BEGIN)[2].partition(readme.END)[0]
    cells = [re.split(r" ?\| ?", line)[1:-1] for line in table.splitlines() if line.startswith("| ")][2:]
    size = r"[\d.e+-]+ s, \d+ MiB"
    assert [title for title, *_ in cells] == [row.title for row in readme.ROWS.values()]
    for (_, ours, theirs, peer), row in zip(cells, readme.ROWS.values(), strict=True):
        assert re.fullmatch(size, ours) and re.fullmatch(rf"{size}|fails \(\w+\)", theirs)
        assert peer.partition(";")[0] == row.peer
    assert table.splitlines()[-1].startswith("Median seconds")
    assert readme.written(README, table) == README


def test_names_in_the_table_of_others_exist():
    table = README.partition("## You have, you want")[2].partition("## ")[0]
    names = re.findall(r"\b([a-z_0-9]+)\((?!\.\.\.)", " ".join(re.findall(r"`[^`]*`", table)))
    assert len(names) > 10 and all(hasattr(invfunc, name) or hasattr(invfunc.pairs, name) for name in names)


PAGES = [coverage.SITE.parent / "index.md", *sorted(coverage.SITE.rglob("*.md"))]
BLOCK = re.compile(r"```(?:\{code-block\} )?python\n(?::caption: ([^\n]*)\n)?(.*?)```", re.DOTALL)
EXACT = 1e-4
"""Both sides are float32, as a newcomer's would be."""
PEERS = {"BackPACK": "backpack", "Opacus": "opacus", "curvlinops": "curvlinops", "Laplace": "laplace"}
PEERS |= {"torch.func": "torch", "MemCNN": "memcnn", "invtorch": "invtorch", "FrEIA": "FrEIA"}
PEERS |= {"torchdiffeq": "torchdiffeq", "transformers": "transformers", "Lightning": "lightning"}
PEERS |= {"linear_operator": "linear_operator"}


def blocks(page):
    """Each piece of Python with its title: None, `invfunc`, or the name of another library."""
    return BLOCK.findall(page.read_text())


def ran(page, title):
    """The names that a page's code leaves, of what has no title and of what has this one."""
    names = {}
    for name, code in blocks(page):
        if not name or name.partition(",")[0] == title:
            exec(code, names)
    return SimpleNamespace(**{name: value for name, value in names.items() if name.isidentifier()})


CODE = [page for page in PAGES if any(title in ("", "invfunc") for title, _ in blocks(page))]
NOT_SHOWN = {"Joint", "Origin", "Whole"}
"""Parts of results, with nothing for their users."""
NAMES = [name for name in invfunc.__all__ if not inspect.ismodule(getattr(invfunc, name))]
COMPARED = [page for page in CODE if "% same: " in page.read_text()]


class TestCode:
    @pytest.mark.parametrize("page", CODE, ids=lambda page: page.stem)
    def test_runs(self, page):
        ran(page, "invfunc")

    @pytest.mark.filterwarnings("ignore")  # what others do is not ours to warn of
    @pytest.mark.parametrize("page", COMPARED, ids=lambda page: page.stem)
    def test_gives_what_the_library_beside_it_gives(self, page):
        (title,) = {title.partition(",")[0] for title, _ in blocks(page)} - {"", "invfunc"}
        pytest.importorskip(PEERS[title], exc_type=ImportError)
        names = {"ours": ran(page, "invfunc"), "theirs": ran(page, title)}
        for both in re.findall(r"^% same: (.*)$", page.read_text(), flags=re.MULTILINE):
            ours, theirs = eval(both, names)
            assert_trees_close(ours, theirs.reshape(ours.shape), EXACT)

    def test_titles_are_of_libraries_that_are_told(self):
        titles = {title.partition(",")[0] for page in PAGES for title, _ in blocks(page)}
        assert titles - {"", "invfunc"} <= set(PEERS)


class TestTables:
    @pytest.mark.slow
    def test_of_layers_and_quantities_are_those_of_todays_code(self):
        """If not, `python -m tests.coverage` brings the table up to date."""
        page = coverage.PAGE.read_text()
        assert page == coverage.rewritten(page)

    def test_of_versions_and_private_names_are_those_of_today(self):
        """If not, `python -m tests.versions` brings the names up to date, and with a version as argument its line."""
        page = versions.PAGE.read_text()
        assert page == versions.rewritten(page, [])
        table = page.partition(versions.BEGIN)[2].partition(versions.END)[0]
        allowed = re.search(r'"torch>=(\d+\.\d+),<(\d+)\.(\d+)"', (versions.ROOT / "pyproject.toml").read_text())
        assert allowed is not None
        for first in (allowed[1], f"{allowed[2]}.{int(allowed[3]) - 1}"):
            assert f"| {first}." in table
        assert "passed" in table and "failed" not in table and "error" not in table
        ended = "FAILED tests/a.py\n1 failed, 12 passed, 3 skipped, 4 warnings in 5.06s\n"
        assert versions.counts(ended) == "1 failed, 12 passed, 3 skipped" and "no result" in versions.counts("")

    @pytest.mark.slow
    def test_of_where_statistics_work_is_that_of_todays_code(self):
        """If not, `python -m tests.where` brings the table up to date."""
        page = where.PAGE.read_text()
        assert page == where.rewritten(page)

    def test_of_laws_are_those_that_there_are(self):
        page = (coverage.SITE / "laws.md").read_text()
        listed = page.partition("<!-- laws: begin -->\n")[2].partition("<!-- laws: end -->")[0]
        names = [re.sub(r"\s+", " ", line).partition(": ")[2].rstrip(". ").split("; ") for line in listed.split("\n* ")]
        assert [name for of in names for name in of] == list(LAWS)


class TestReference:
    @pytest.mark.parametrize("name", NAMES)
    def test_loses_no_word_of_a_docstring(self, name):
        core, nodes = pytest.importorskip("docutils.core"), pytest.importorskip("docutils.nodes")
        pytest.importorskip("docutils.parsers.rst.roles").register_local_role(
            "py:obj", lambda role, raw, text, *rest: ([nodes.literal(raw, text.partition(" <")[0])], [])
        )
        doc = inspect.getdoc(getattr(invfunc, name))
        converted = runpy.run_path(str(coverage.SITE / "docstrings.py"))["converted"]
        page = core.publish_doctree("\n".join(converted(doc.split("\n"))), settings_overrides={"halt_level": 2})
        assert re.findall(r"\w+", page.astext()) == re.findall(r"\w+", doc)

    def test_draws_the_floors_that_are_checked(self):
        pytest.importorskip("docutils")
        drawn = runpy.run_path(str(coverage.SITE / "pictures.py"))["FLOORS"]
        floors = [name for parts in reversed(FLOORS) for name in parts]
        order = [next(i for i, parts in enumerate(FLOORS) if name in parts) for names, _ in drawn for name in names]
        assert {name for names, _ in drawn for name in names} <= set(floors) and order == sorted(order, reverse=True)
        folders = {file.parent.name for file in (coverage.SITE.parents[1] / "invfunc").glob("*/__init__.py")}
        assert folders <= {name for names, _ in drawn for name in names}

    def test_tells_the_version_to_be_cited(self):
        assert f"{{{invfunc.__version__}}}" in (coverage.SITE / "policy.md").read_text()

    def test_has_every_public_name_once(self):
        listed = []
        for page in (coverage.SITE / "api").glob("*.md"):
            for module, names in re.findall(r"```\{api\} (\S+)\n(.*?)```", page.read_text(), flags=re.DOTALL):
                listed += [f"{module}.{name}" for name in names.split()]
                assert all(hasattr(importlib.import_module(module), name) for name in names.split())
        assert len(listed) == len(set(listed))
        wanted = {f"invfunc.{name}" for name in NAMES}
        family = {f"invfunc.errors.{name}" for name, kind in vars(errors).items() if isinstance(kind, type)}
        wanted |= family - {"invfunc.errors.InvFuncError", "invfunc.errors.InvFuncWarning"}
        wanted |= {f"{m.__name__}.{name}" for m in (layers, pairs) for name in m.__all__}
        wanted |= {f"invfunc.kronecker.{name}" for name in kronecker.__all__ if name not in NOT_SHOWN}
        assert wanted <= set(listed)


# `python -m invfunc`: the table, and one clear line for whatever cannot be


@pytest.mark.slow
def test_tour_prints_a_table():
    command = [sys.executable, "-m", "invfunc", "--chunks", "8", "64"]
    tour = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert tour.returncode == 0, tour.stderr
    said = [line for line in tour.stderr.splitlines() if "font" not in line]  # of those that a machine lacks
    assert said == []  # no progress bar where there is no terminal
    for row in ("by structure", "8 chunks", "64 chunks", "variance", "norms", "64 reversible blocks", "plain autograd"):
        assert row in tour.stdout
    assert re.search(r"^\d+ times faster, \d+ times less memory, the same numbers \(to \de-0\d\)$", tour.stdout, re.M)


@pytest.mark.quick
def test_help_names_every_option(capsys):
    with pytest.raises(SystemExit) as left:
        main(["--help"])
    assert left.value.code == 0
    text = capsys.readouterr().out
    assert all(option in text for option in ("--device", "--chunks"))


@pytest.mark.parametrize("package", ["sklearn", "tqdm"])
def test_missing_package_names_the_extra(package, monkeypatch):
    for name in {package, *sys.modules}:
        if name.partition(".")[0] == package:
            monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(SystemExit) as left:
        main([])
    (line,) = left.value.code.splitlines()  # which Python prints, and ends with code 1
    assert package in line and "pip install 'invfunc[notebooks]'" in line
