"""Draws of the public strategies: small, of every family, in any precision, printed as code that makes them again."""

import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc.testing import assert_trees_close, strategies
from invfunc.testing.models import FAMILIES

DRAWN = {
    "models": strategies.models([*FAMILIES]),
    "models of other axes": strategies.models(["affine", "perceptron"], in_dims=(0, 1)),
    "losses": strategies.losses(),
    "problems": strategies.problems(),
    "pairs": strategies.pairs(),
    "chunkings": strategies.chunkings(),
    "splits": strategies.splits(5),
}


def numbers(value):
    """All that a value is made of."""
    if isinstance(value, strategies.Problem):
        return numbers(value.model), value.target
    if isinstance(value, strategies.Model):
        return value.params, value.x, value.f(value.params, value.x)
    if isinstance(value, strategies.Pair):
        return value.x, value.args, value.pair(value.x, *value.args)
    return torch.tensor(hash(str(value)) % 1000)


@pytest.mark.parametrize("what", DRAWN)
@settings(max_examples=8)
@given(data=st.data())
def test_values_print_as_code_that_makes_them_again(what, data):
    value = data.draw(DRAWN[what])
    names = {"torch": torch}
    exec(f"from invfunc.testing.strategies import *\nvalue = {value!r}", names)
    assert names["value"] == value
    assert_trees_close(numbers(names["value"]), numbers(value), 0.0)


@pytest.mark.slow
def test_without_hypothesis_there_are_laws_and_an_error_names_the_extra():
    code = """
import sys
sys.modules["hypothesis"] = None
import torch, invfunc
from invfunc.testing import laws
laws.check(lambda w, x: (x @ w).square(), torch.ones(2), torch.eye(2), only="per-sample gradients sum to the gradient")
try:
    from invfunc.testing import strategies
except invfunc.errors.MissingExtraError as error:
    assert "invfunc[testing]" in str(error)
else:
    raise AssertionError("no error")
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 0, run.stdout + run.stderr
