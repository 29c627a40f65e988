"""Every lesson runs from its first cell to its last; what it claims stands there as asserts."""

from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_lessons():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_lesson_runs(path):
    lesson = nbformat.read(path, as_version=4)
    NotebookClient(lesson, timeout=300, kernel_name="python3", resources={"metadata": {"path": path.parent}}).execute()


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_lesson_is_numbered_small_and_shown_with_its_results(path):
    lesson = nbformat.read(path, as_version=4)
    assert path.stem.split("_")[0].isdecimal()
    assert path.stat().st_size < 200_000
    assert any(cell.get("outputs") for cell in lesson.cells)
    assert not any(out.output_type == "error" for cell in lesson.cells for out in cell.get("outputs", []))
