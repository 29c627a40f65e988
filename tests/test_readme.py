"""The README's examples run, its table is what the code does, and its two commands stand where tools find them."""

import re
from pathlib import Path

from invfunc.testing.laws import LAWS
from tests import coverage, where

README = (Path(__file__).parents[1] / "README.md").read_text()


def test_examples_run():
    names = {}
    for example in re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL):
        exec(example, names)
    for name, leaf in names["ggn"].items():
        assert (leaf - names["again"][name]).abs().max() <= 1e-4 * leaf.abs().max()
    for name, step in names["step"].items():
        assert (step * names["gradient"][name]).sum() > 0  # downhill
    assert all(w.grad.abs().max() > 0 for pair in names["weights"] for w in pair)


def test_commands_stand_on_lines_of_their_own():
    commands = re.findall(r"^python -m pip install -e .*$", README, flags=re.MULTILINE)
    assert commands == [
        'python -m pip install -e ".[notebooks]" && python -m invfunc',
        'python -m pip install -e ".[dev]" && python -m pytest',
    ]


def test_layers_and_quantities_are_those_of_todays_code():
    """If not, `python -m tests.coverage` brings the table up to date."""
    assert README == coverage.rewritten(README)


def test_where_statistics_work_is_that_of_todays_code():
    """If not, `python -m tests.where` brings the table up to date."""
    assert README == where.rewritten(README)


def test_the_laws_are_those_that_there_are():
    listed = README.partition("<!-- laws: begin -->\n")[2].partition("<!-- laws: end -->")[0]
    names = [re.sub(r"\s+", " ", line).partition(": ")[2].rstrip(". ").split("; ") for line in listed.split("\n* ")]
    assert [name for of in names for name in of] == list(LAWS)
