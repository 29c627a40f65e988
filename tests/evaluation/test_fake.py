"""FakeTensorMode, in which tensors have no numbers: shapes as outside of it, to find out what a statistic takes."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

import invfunc
from invfunc import explain
from invfunc.testing.laws.rows import CASES
from tests.strategies import Numbers

N = 4


def model(p, x):
    return F.linear(torch.tanh(F.linear(x, p["w"], p["b"])), p["v"])


def loss(p, x, y):
    return F.cross_entropy(model(p, x), y)


def given():
    rand = Numbers()
    return {"w": rand(5, 3), "b": rand(5), "v": rand(3, 5)}, rand(N, 3), torch.arange(N) % 3


def shapes(result):
    return [tuple(x.shape) for x in _pytree.tree_leaves(result) if isinstance(x, torch.Tensor)]


@pytest.mark.parametrize("case", CASES)
def test_shapes_are_those_of_numbers(case):
    row, form = CASES[case]

    def result():
        return shapes(row.of(model, F.cross_entropy, form)(*given()))

    wanted = result()
    with FakeTensorMode():
        assert result() == wanted


def test_columns_are_not_looked_at():
    with FakeTensorMode():
        assert "FakeTensorMode" in str(explain(invfunc.diag_ggn(loss))(*given()))
