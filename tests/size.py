"""The size of the library with its ceilings, as a table: `python -m tests.size`."""

import ast
import sys
import tokenize
from collections import Counter
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import invfunc

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "invfunc"
LAYOUT = {tokenize.ENCODING, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT}


@dataclass(frozen=True)
class Ceiling:
    """The code lines and files of some folders at most, and the reason."""

    folders: list[str]
    lines: int
    files: int
    reason: str

    def measured(self):
        """Code lines and files of today."""
        places = [ROOT / folder for folder in self.folders]
        files = [file for place in places for file in ([place] if place.is_file() else place.rglob("*.py"))]
        return sum(map(code_lines, files)), len(files)


CEILINGS = {
    "the package": Ceiling(
        ["invfunc"],
        25_735,
        134,
        "one core for all statistics; wanted are 20,000: what goes next is forward mode or padded plans",
    ),
    "invertible functions": Ceiling(
        ["invfunc/blocks", "invfunc/invertible", "invfunc/pairs"],
        3_800,
        19,
        "one engine for plain autograd and torch.func, by hooks on saved tensors; one recorded run finds inverses",
    ),
    "pairs": Ceiling(
        ["invfunc/pairs"], 1_475, 7, "a pair is data: moves, from which both directions come; and what others import"
    ),
    "functional": Ceiling(
        ["invfunc/functional.py"],
        190,
        1,
        "messages, copies, a mode of its own, kept tensors, the swap of parameters in half of torch's time",
    ),
    "the tests": Ceiling(
        ["tests"], 30_240, 198, "laws of what stands, and a test of each fault of torch; planted faults are data beside"
    ),
}
"""Ceilings: a change that needs more takes away elsewhere, or states a better reason here."""

NAMES = 50
"""Top-level names at most: peers have 5 to 35. What few look for is an option, or in `pairs`, `kronecker`, `errors`."""

CALLS = {
    "variance": (invfunc.variance, 239, 19, 14),
    "batch_l2_grad": (invfunc.batch_l2_grad, 223, 19, 14),
    "diag_ggn": (invfunc.diag_ggn, 313, 25, 16),
    "kfac": (lambda f: invfunc.kfac(f, mc_samples=1, generator=torch.Generator()), 384, 30, 17),
}
"""Python calls of the package in a warm call of a two-layer MLP, in how many files, and how deep, at most.

300, 20 and 14 of `variance`, and 400 calls of the others, were wanted: calls are most of a small model's time.
"""


def code_lines(file):
    """The number of lines of a file without blank ones, comments and docstrings."""
    found, begins = set(), True
    with file.open("rb") as text:
        tokens = [t for t in tokenize.tokenize(text.readline) if t.type not in (tokenize.COMMENT, tokenize.NL)]
    for token, after in pairwise(tokens):
        if token.type in LAYOUT:
            begins = True
            continue
        if not (begins and token.type == tokenize.STRING and after.type == tokenize.NEWLINE):
            found.update(range(token.start[0], token.end[0] + 1))
        begins = False
    return len(found)


def classes():
    """The names of all classes of the package, each as often as it is defined."""
    parsed = (ast.parse(file.read_text()) for file in PACKAGE.rglob("*.py"))
    return Counter(node.name for tree in parsed for node in ast.walk(tree) if isinstance(node, ast.ClassDef))


def cost(name):
    """The calls of the package in a warm call, in how many files, and how deep they are nested."""
    torch.manual_seed(0)
    f, params = invfunc.functional(nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3)))
    t = CALLS[name][0](lambda p, x, y: F.cross_entropy(f(p, x), y))
    args = params, torch.randn(5, 8), torch.randint(3, (5,))
    t(*args), t(*args)
    calls, files, depth, most = 0, set(), 0, 0

    def watch(frame, event, arg):
        nonlocal calls, depth, most
        file = frame.f_code.co_filename
        if file.startswith(str(PACKAGE)) and event in ("call", "return"):
            depth += 1 if event == "call" else -1
            most = max(most, depth)
            if event == "call":
                calls += 1
                files.add(file)

    before = sys.getprofile()
    sys.setprofile(watch)
    try:
        t(*args)
    finally:
        sys.setprofile(before)
    return calls, len(files), most


def main():
    """Print the table."""
    print(f"{'':24}{'today':>24}{'at most':>24}")
    for name, ceiling in CEILINGS.items():
        for what, found, most in zip(
            ("lines", "files"), ceiling.measured(), (ceiling.lines, ceiling.files), strict=True
        ):
            print(f"{name + ', ' + what:32}{found:>16}{most:>24}")
    named = classes()
    print(f"{'classes':32}{named.total():>16}\n{'class names used twice':32}{sum(n > 1 for n in named.values()):>16}")
    print(f"{'public names':32}{len(invfunc.__all__):>16}")
    for name, (_, *most) in CALLS.items():
        found, most = (" / ".join(map(str, x)) for x in (cost(name), most))
        print(f"{name + ': calls, files, depth':32}{found:>16}{most:>24}")


if __name__ == "__main__":
    main()
