"""README is short, its examples run, its numbers are of today's rows, and its links lead to files."""

import re
from pathlib import Path

import invfunc
from tests.benchmarks import readme

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
