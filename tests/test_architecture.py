"""The house: imports go down, private torch calls live in one file, import has no effects, the site tells of all."""

import ast
import inspect
import re
import subprocess
import sys
import tomllib
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import kronecker, pairs
from tests.rows import BOTH, LOSS, ROWS
from tests.size import CALLS, CEILINGS, NAMES, cost

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "invfunc"
SITE = ROOT / "notebooks" / "site"
FLOORS = [
    {"thresholds"},
    {"errors", "tree", "_torch", "_extras", "plan"},
    {"linear_algebra"},
    {"kronecker"},
    {"operations"},
    {"problem"},
    {"loss"},
    {"reductions"},
    {"budget"},
    {"core", "structure"},
    {"evaluation"},
    {"callables", "functional", "transform", "statistic", "around", "operation"},
    {"statistics", "products", "pairs", "spectra"},
    {"chunks", "compiled", "data_sets", "loaded", "plans"},
    {"blocks"},
    {"invertible"},
    {"layers", "laplace"},
    {"__init__", "certified", "testing", "__main__"},
]
NAMESPACES = {"invfunc.kronecker.__init__", "invfunc.layers.__init__", "invfunc.pairs.__init__"}
FILES = sorted(PACKAGE.rglob("*.py"))
LONGEST = 790
"""Lines of a file, which are 150 to 500 where it can be: a run of f (core/run.py), its evaluation, blocks/run.py."""


def each_file(check):
    """One test of all files: there are hundreds, and a test of its own takes longer than the look at a file."""

    def test(self):
        wrong = []
        for file in FILES:
            try:
                check(self, file)
            except AssertionError as error:
                wrong.append(f"{file.relative_to(PACKAGE)}: {error}")
        assert not wrong, "\n\n".join(wrong)

    test.__doc__ = check.__doc__
    return test


def name_of(file):
    """`invfunc.evaluation.engine`; a package is its `__init__`."""
    return ".".join(["invfunc", *file.relative_to(PACKAGE).with_suffix("").parts])


MODULES = {name_of(f): f for f in FILES}


def floor(module):
    """The place in FLOORS; a namespace brings together what its users look for, of all floors."""
    part = "__init__" if module in NAMESPACES else module.split(".")[1]
    return next(i for i, parts in enumerate(FLOORS) if part in parts)


@cache
def parsed(file):
    return ast.parse(file.read_text())


def imported(file):
    """All that a file imports, wherever in it, as full names: `(module, name)`, name None for a whole module."""
    for node in ast.walk(parsed(file)):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{file} imports relatively"
            yield from ((node.module, alias.name) for alias in node.names)


def inner_imports(file):
    """The modules of ours that a file imports."""
    for module, name in imported(file):
        if module.split(".")[0] == "invfunc":
            for full in (f"{module}.{name}", f"{module}.{name}.__init__", module, f"{module}.__init__"):
                if full in MODULES:
                    yield full
                    break


@pytest.mark.quick
class TestImports:
    @each_file
    def test_go_down(self, file):
        own = name_of(file)
        upwards = [other for other in inner_imports(file) if floor(other) > floor(own)]
        assert not upwards

    def test_every_file_stands_on_a_floor(self):
        assert {name.split(".")[1] for name in MODULES} <= set().union(*FLOORS)

    def test_have_no_cycles(self):
        graph = {name: set(inner_imports(file)) - {name} for name, file in MODULES.items()}
        assert len(list(TopologicalSorter(graph).static_order())) >= len(MODULES)

    @each_file
    def test_of_torchs_pytrees_are_in_one_file(self, file):
        used = [m for m, name in imported(file) if "_pytree" in f"{m}.{name}" or m.split(".")[0] == "optree"]
        assert not used or name_of(file) == "invfunc.tree"

    @each_file
    def test_and_uses_of_private_torch_are_in_one_file(self, file):
        """Imports of private names, `torch._anything`, and private attributes that tensors have."""
        if name_of(file) in ("invfunc._torch.functorch", "invfunc.tree"):
            return
        names = [f"{m}.{name}" for m, name in imported(file) if m.split(".")[0] == "torch"]
        attributes = [n for n in ast.walk(parsed(file)) if isinstance(n, ast.Attribute)]
        names += [ast.unparse(n) for n in attributes if n.attr.startswith("_")]
        private = [name for name in names if name.startswith("torch.") and re.search(r"\._[a-zA-Z]", name)]
        tensors = {name for name in dir(torch.Tensor) if re.match(r"_[a-z]", name)}
        own = {"self", "cls"}
        for node in attributes:
            if node.attr in tensors and ast.unparse(node.value) not in own:
                private.append(ast.unparse(node))
        assert not private

    @pytest.mark.parametrize("called", ["testing/oracles", "testing/laws/loops"])
    def test_of_oracles_have_nothing_of_what_they_judge(self, called):
        """Plain loops and torch's own derivatives: of the package they take trees, errors, a tuple and one another."""
        allowed = (
            "invfunc.tree",
            "invfunc.errors",
            "invfunc.__init__",
            "invfunc.testing.",
            "invfunc.reductions.estimates",
        )
        assert all(other.startswith(allowed) for other in inner_imports(PACKAGE / f"{called}.py"))

    @each_file
    def test_at_run_time_need_torch_and_opt_einsum_only(self, file):
        """Imports of an extra are inside of the functions that use them."""
        if name_of(file).split(".")[1] in ("testing", "__main__"):
            return
        outer = {m.split(".")[0] for m, _ in imported(file)} - set(sys.stdlib_module_names)
        assert outer <= {"invfunc", "torch", "opt_einsum"}

    def test_have_no_effects(self):
        code = """
import logging, random, warnings
import torch, opt_einsum

def state():
    return (
        torch.get_default_dtype(), torch.get_num_threads(), torch.get_num_interop_threads(), torch.is_grad_enabled(),
        torch.initial_seed(), torch.get_rng_state().tolist(), random.getstate(), list(warnings.filters),
        list(logging.root.handlers), torch._C._len_torch_function_stack(), torch.get_float32_matmul_precision(),
        torch.are_deterministic_algorithms_enabled(), torch.backends.opt_einsum.enabled, torch.cuda.is_initialized(),
    )

before = state()
import invfunc
assert state() == before, [(a, b) for a, b in zip(before, state()) if a != b]
"""
        run = subprocess.run([sys.executable, "-W", "error::UserWarning", "-c", code], capture_output=True, text=True)
        assert run.returncode == 0 and run.stdout == "", run.stdout + run.stderr

    def test_take_little_time(self):
        """Of the processor: 0.3 of torch's own import on a quiet machine, about a half on a busy one."""
        code = """
import time
start = time.process_time()
import torch, opt_einsum
between = time.process_time()
import invfunc
print((time.process_time() - between) / (between - start))
"""
        runs = [subprocess.run([sys.executable, "-c", code], capture_output=True, text=True) for _ in range(3)]
        assert min(float(run.stdout) for run in runs) < 0.8


FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@pytest.mark.quick
class TestFiles:
    @each_file
    def test_are_short_enough_to_hold_in_the_head(self, file):
        assert len(file.read_text().splitlines()) <= LONGEST

    @each_file
    def test_say_what_they_are(self, file):
        assert ast.get_docstring(parsed(file)) or file.stem == "__main__"

    def test_init_has_no_logic(self):
        kinds = (ast.Expr, ast.ImportFrom, ast.Assign)
        body = parsed(PACKAGE / "__init__.py").body
        assert all(isinstance(node, kinds) for node in body)
        named = [node.targets[0].id for node in body if isinstance(node, ast.Assign)]
        assert named == ["__version__", "__all__", "__dir__"]


@pytest.mark.quick
class TestCeilings:
    @pytest.mark.parametrize("name", CEILINGS)
    def test_are_not_passed(self, name):
        ceiling = CEILINGS[name]
        lines, files = ceiling.measured()
        assert lines <= ceiling.lines and files <= ceiling.files, f"{lines} in {files} files; {ceiling.reason}"

    @pytest.mark.parametrize("name", CALLS)
    def test_a_warm_call_is_short(self, name):
        found = cost(name)
        assert all(x <= most for x, most in zip(found, CALLS[name][1:], strict=True)), found


@pytest.mark.quick
class TestRows:
    """In `invfunc.testing.laws.rows`, from which the laws of all statistics take them."""

    def test_every_public_statistic_has_one(self):
        public = {f.__name__ for f in TestPublicNames.FUNCTIONS.values() if _statistic(f)}
        defined = [node for file in (PACKAGE / "statistics").glob("[a-z]*.py") for node in parsed(file).body]
        assert public == {f.name for f in defined if isinstance(f, ast.FunctionDef) and f.name[0] != "_"}
        assert {name.split()[0] for name in ROWS} == public

    @pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
    def test_say_what_chunked_divides(self, row):
        assert row.make(F.mse_loss).axes[:1] == row.axes[:1] and {*row.make(F.mse_loss).axes} == {*row.axes}

    @pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
    def test_of_a_loss_alone_say_what_it_is_of_the_shares(self, row):
        assert (row.of_shares is not None) == (LOSS in row.forms and BOTH not in row.forms)
        assert row.of_shares is None or row.loop is not None


def _statistic(f):
    return f.__module__.startswith("invfunc.statistics.")


FOLDERS = sorted({f.parent.name for f in PACKAGE.glob("*/__init__.py")} - {"testing"})  # its oracles are in every law


@pytest.mark.quick
@pytest.mark.parametrize("folder", FOLDERS)
def test_every_folder_has_laws_and_quick_ones(folder):
    laws = [file.read_text() for file in (ROOT / "tests" / folder).glob("test_*.py")]
    assert any("@pytest.mark.quick\n" in text for text in laws)


def functions(namespace, prefix=""):
    """The public functions of a namespace, by their names."""
    named = {prefix + name: getattr(namespace, name) for name in namespace.__all__}
    return {name: f for name, f in named.items() if not isinstance(f, (type, ModuleType))}


@pytest.mark.quick
class TestPublicNames:
    FUNCTIONS = functions(invfunc) | functions(pairs, "pairs.") | functions(kronecker, "kronecker.")

    def test_are_sorted_and_all_that_is_imported(self):
        imports = [node for node in parsed(PACKAGE / "__init__.py").body if isinstance(node, ast.ImportFrom)]
        names = [alias.name for node in imports for alias in node.names]
        assert invfunc.__all__ == sorted(names)

    def test_are_few(self):
        assert len(invfunc.__all__) <= NAMES

    def test_functions_are_those_of_the_sites_tables(self):
        cells = re.findall(r"^\| ([^|]*\(.*?) \|", (SITE / "transforms.md").read_text(), flags=re.MULTILINE)
        told = set(re.findall(r"`((?:pairs\.|kronecker\.)?\w+)\(", " ".join(cells)))
        assert told == {*self.FUNCTIONS}

    def test_extras_that_are_told_of_exist(self):
        extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        text = "".join(file.read_text() for file in FILES)
        assert {"progress", "notebooks"} <= set(re.findall(r"invfunc\[(\w+)\]", text)) <= set(extras)
        assert set(re.findall(r'extra\("[\w.]+", "(\w+)"\)', text)) <= set(extras)

    def test_errors_are_those_of_the_family(self):
        assert "invfunc.errors.InvFuncError" in (SITE / "conventions.md").read_text()
        classes = {name for name in invfunc.__all__ if isinstance(getattr(invfunc, name), type)}
        assert classes == {"InvFuncError", "InvFuncWarning", "Invertible"}

    @pytest.mark.parametrize("name", FUNCTIONS)
    def test_docstrings_have_all_parts(self, name):
        doc = inspect.getdoc(self.FUNCTIONS[name]) or ""  # Python 3.13 takes indents away by itself
        parts = ["Args:", "Returns:", "Example:", "Composes with:", "Cost:", "Source:"]
        places = [doc.find(f"\n{part}") for part in parts]
        assert -1 not in places and places == sorted(places)
        assert ">>> " in doc and re.match(r"[A-Z][^\n]*[.:`]", doc)
