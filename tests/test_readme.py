"""The README's examples run, its two commands stand where tools find them, and its links lead to files."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()


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


def test_links_lead_to_files():
    links = re.findall(r"\]\(([^)#]+)", README)
    assert links and all((ROOT / link).exists() for link in links if "://" not in link)
