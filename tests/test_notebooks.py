"""Every lesson runs from its first cell to its last; what it claims stands there as asserts, in folded cells."""

import ast
import base64
import importlib.util
import io
import re
from multiprocessing import forkserver

import nbformat
import pytest
from PIL import Image

from tests.lessons import NOTEBOOKS, pictures, run

CHECKS = {"assert_equal", "assert_close"}
lessons = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


@pytest.fixture(scope="module", autouse=True)
def lessons_have_ended():
    """Stops the fork server, so that the next file may fork from a process with other imports."""
    yield
    forkserver._forkserver._stop()


def test_there_are_lessons():
    assert NOTEBOOKS


def code(lesson):
    return [cell for cell in lesson.cells if cell.cell_type == "code"]


def folded(cell):
    """On the site, and in JupyterLab."""
    hidden = cell.metadata.get("jupyter", {}).get("source_hidden", False)
    return hidden and "hide-input" in cell.metadata.get("tags", [])


def name_of(call):
    return getattr(call.func, "id", getattr(call.func, "attr", ""))


def of_checks(cell):
    """The asserts of a cell, and its calls of functions that assert."""
    nodes = list(ast.walk(ast.parse(cell.source)))
    calls = [node for node in nodes if isinstance(node, ast.Call) and name_of(node) in CHECKS]
    return calls + [node for node in nodes if isinstance(node, ast.Assert)]


SHORT = "1_chunked_ggn", "6_invertible"
RUN = [path if path.stem in SHORT else pytest.param(path, marks=pytest.mark.slow) for path in NOTEBOOKS]


@pytest.mark.parametrize("path", RUN, ids=[path.stem for path in NOTEBOOKS])
def test_lesson_runs_and_its_axes_have_names(path):
    for package in re.findall(r'"\s*(?:import|from) (transformers|opacus)\b', path.read_text()):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    run(path)


@lessons
def test_lesson_is_numbered_small_and_shown_with_its_results(path):
    lesson = nbformat.read(path, as_version=4)
    assert path.stem.split("_")[0].isdecimal()
    assert path.stat().st_size < 200_000
    assert any(cell.get("outputs") for cell in lesson.cells)
    outputs = [out for cell in code(lesson) for out in cell.outputs]
    assert not [out for out in outputs if out.output_type == "error" or "Warning:" in out.get("text", "")]


@lessons
def test_what_a_lesson_checks_is_folded(path):
    """So that what is read is how the library is used."""
    cells = code(nbformat.read(path, as_version=4))
    assert any(of_checks(cell) for cell in cells)
    assert not [cell.source for cell in cells if of_checks(cell) and not folded(cell)]


@lessons
def test_pictures_are_sharp_and_nothing_else_of_matplotlib_is_printed(path):
    lesson = nbformat.read(path, as_version=4)
    for data in pictures(lesson):
        assert round(Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).info["dpi"][0]) == 144
    assert not [out for cell in code(lesson) for out in cell.outputs if out.output_type == "execute_result"]
    for cell in code(lesson):  # which `tests.lessons.AXES_HAVE_NAMES` looks at
        drawn = any(name in cell.source for name in ("plt.subplots(", "plt.figure("))
        assert not drawn or "\nplt.show()" in cell.source


@pytest.mark.parametrize("name", ["1_chunked_ggn", "20_memory"])
def test_first_cell_installs_what_is_missing_from_the_clone(name, monkeypatch):
    """As on a hosted notebook service; `run` installs nothing, as the package is there."""
    path, asked = next(path for path in NOTEBOOKS if path.stem == name), []
    first = code(nbformat.read(path, as_version=4))[0]
    monkeypatch.chdir(path.parent)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("subprocess.run", lambda command, check: asked.append(command))
    exec(first.source, {})
    assert folded(first) and asked[0][1:4] == ["-m", "pip", "install"]
    assert asked[0][-1] == f"{path.parents[1]}[notebooks]"
