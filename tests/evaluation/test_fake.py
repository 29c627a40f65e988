"""FakeTensorMode, in which tensors have no numbers: shapes as outside of it, to find out what a statistic takes."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

import invfunc
from invfunc.testing.laws.rows import CASES
from tests.meter import Meter, nothing_collected
from tests.strategies import Numbers

N = 4
NUMBERS = 4 * 8
"""Bytes of the single numbers that FakeTensorMode keeps a little longer: fewer than the smallest parameter has."""


def model(p, x):
    return F.linear(torch.tanh(F.linear(x, p["w"], p["b"])), p["v"])


def loss(p, x, y):
    return F.cross_entropy(model(p, x), y)


def given():
    rand = Numbers()
    return {"w": rand(5, 3), "b": rand(5), "v": rand(3, 5)}, rand(N, 3), torch.arange(N) % 3


def shapes_and_bytes(t):
    """The shapes of a result, and the most bytes that were alive on the way."""
    args = given()
    with nothing_collected(), Meter() as meter:
        leaves = _pytree.tree_leaves(t(*args))
    return [tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor)], meter.peak()


@pytest.mark.parametrize("case", CASES)
def test_shapes_and_bytes_are_those_of_numbers(case):
    row, form = CASES[case]
    t = row.of(model, F.cross_entropy, form)
    chunks = [invfunc.chunked(t, 2)] if getattr(t, "axes", ()) else []
    for some in (t, *chunks):
        shapes, peak = shapes_and_bytes(some)
        with FakeTensorMode():
            found, predicted = shapes_and_bytes(some)
        assert found == shapes
        assert peak <= predicted <= peak + NUMBERS, some
