"""FakeTensorMode, in which tensors have no numbers: shapes as outside of it, to find out what a statistic takes."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree

import invfunc
from invfunc import explain
from tests.strategies import Numbers

OF_LOSSES = ["batch_grad", "batch_l2_grad", "variance", "gram", "sum_grad_squared"]
OF_BOTH = ["diag_ggn", "batch_diag_ggn", "ggn_trace", "kflr", "kfra", "sqrt_ggn", "diag_hessian", "batch_diag_hessian"]
DRAWN = ["kfac", "ekfac"]
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


STATISTICS = [(name, (loss,)) for name in OF_LOSSES + OF_BOTH + DRAWN]
STATISTICS += [(name, (model, F.cross_entropy)) for name in OF_BOTH + DRAWN]


@pytest.mark.parametrize(("name", "of"), STATISTICS, ids=lambda x: x if isinstance(x, str) else f"{len(x)}")
def test_shapes_are_those_of_numbers(name, of):
    def result():
        options = {"generator": torch.Generator().manual_seed(0)} if name in DRAWN else {}
        return shapes(getattr(invfunc, name)(*of, **options)(*given()))

    wanted = result()
    with FakeTensorMode():
        assert result() == wanted


def test_columns_are_not_looked_at():
    with FakeTensorMode():
        assert "FakeTensorMode" in str(explain(invfunc.diag_ggn(loss))(*given()))
