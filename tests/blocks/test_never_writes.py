"""Calls that write to the user's tensors, gradients or random numbers are not in the library's text."""

import ast
import re
from pathlib import Path

import invfunc

PACKAGE = Path(invfunc.__file__).parent
BANNED = {"resize_", "set_", "detach_", "manual_seed", "seed", "untyped_storage", "storage", "resize_as_"}
ALLOWED = {
    ("_torch/functorch.py", "untyped_storage"),  # its address is read
    ("invertible/checks.py", "manual_seed"),  # of a generator of its own
    ("loss/drawn.py", "manual_seed"),  # of generators of its own
    ("reductions/gradients.py", "manual_seed"),  # of generators of its own
    ("spectra.py", "manual_seed"),  # of a generator of its own
    ("laplace.py", "manual_seed"),  # of a generator of its own
    ("certified.py", "manual_seed"),  # of a generator of its own
    ("core/probe.py", "manual_seed"),  # of a generator that is put back
    ("certified.py", "seed"),  # which the error tells
}


def used(file):
    """Names in a file: `(name, True if it is assigned to)`."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Attribute):
            yield node.attr, isinstance(node.ctx, (ast.Store, ast.Del))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and re.fullmatch(r"\w+", node.value):
            yield node.value, False


def found(path):
    return [
        (name, stored)
        for name, stored in used(PACKAGE / path)
        if name in BANNED or (name in ("grad", "data") and stored) or name.endswith("set_rng_state")
    ]


def test_tensors_gradients_and_random_numbers_of_the_user_are_never_written():
    seen = {}
    for file in PACKAGE.rglob("*.py"):
        path = file.relative_to(PACKAGE).as_posix()
        if not path.startswith("testing/") and not path.startswith("__main__"):
            seen |= {(path, name): stored for name, stored in found(path)}
    states = {place for place in seen if place[1] == "set_rng_state"}
    assert {path for path, _ in states} == {"_torch/generators.py"}
    assert set(seen) - states == ALLOWED
