"""Draws of the public strategies: small, of every family, in any precision, printed as code that makes them again."""

import subprocess
import sys

import pytest
import torch
from hypothesis import find, given, settings
from hypothesis import strategies as st

import invfunc
from invfunc import tree
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


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=3)
@given(data=st.data())
def test_take_a_dtype(dtype, data):
    for of in (strategies.models, strategies.pairs):
        found = tree.tensors(numbers(data.draw(of(dtype=dtype))))
        assert {x.dtype for x in found if x.is_floating_point()} <= {dtype}


def test_shrink_to_the_simplest():
    model = find(strategies.models(), lambda model: True)
    assert (model.family, model.n, model.seed) == ("affine", 1, 0)
    model = find(strategies.models(), lambda model: len(tree.tensors(model.params)) > 4)
    assert model.n == 1 and model.seed == 0
    assert find(strategies.splits(5), lambda lengths: len(lengths) > 1) in ([1, 4], [4, 1])


@settings(max_examples=8)
@given(st.data())
def test_splits_and_chunkings_fit(data):
    lengths = data.draw(strategies.splits(data.draw(st.integers(1, 6))))
    assert min(lengths) >= 1
    model = data.draw(strategies.models(["affine"]))
    t = invfunc.batch_grad(lambda p, x: model.f(p, x).square().sum(1))
    found = invfunc.chunked(t, **data.draw(strategies.chunkings()))(model.params, model.x)
    assert_trees_close(found, t(model.params, model.x), 1e-12)


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
