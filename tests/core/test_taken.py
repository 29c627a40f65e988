"""Programs that the core takes itself: each result is that of a plain loop, and no other engine was asked."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import invfunc
from invfunc import testing
from invfunc.core.ways import known_way
from invfunc.testing import assert_trees_close
from tests.rows import ROWS

X, Y = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 3


def by_the_core(statistic, *args):
    """The result, after which the statistic must still be one of the core."""
    found = statistic(*args)
    assert not known_way(statistic.f, statistic.called), "it is not followed as it is"
    return found


class Images(nn.Module):
    """Convolutions of which the cotangents of all columns are many numbers."""

    def __init__(self):
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(2, 8, 3), nn.Conv2d(8, 4, 3, groups=2), nn.Linear(4, 3)
        self.scale = nn.Parameter(torch.linspace(1, 2, 4))

    def forward(self, x):
        x = self.second(self.first(x).tanh()) * self.scale[:, None, None]
        return self.last(x.mean((2, 3)))


def images():
    """Images() with its params and batch."""
    torch.manual_seed(0)
    f, params = invfunc.functional(Images().double())
    return f, params, torch.randn(5, 2, 12, 12).double(), Y


class TestExactColumns:
    @pytest.fixture(params=["all at once", "one by one", "in groups"])
    def grouped(self, request, monkeypatch):
        monkeypatch.setattr(invfunc.thresholds, "APART", 1)
        numbers = {"all at once": 2**30, "one by one": 1, "in groups": 50_000}
        monkeypatch.setattr(invfunc.thresholds, "GROUPED", numbers[request.param])

    @pytest.mark.parametrize("name", ["diag_ggn", "diag_ggn of each", "ggn_trace", "sqrt_ggn", "kfac exact"])
    def test_of_large_layers(self, grouped, name):
        f, params, x, y = images()
        statistic = ROWS[name].make(f, F.cross_entropy)
        found = by_the_core(statistic, params, x, y)
        chunked = invfunc.chunked(statistic, 1)  # which the core does not take
        assert_trees_close(found, chunked(params, x, y), 1e-10)
        if name == "diag_ggn":
            assert_trees_close(found, testing.dense_diag_ggn(f, F.cross_entropy)(params, x, y), 1e-10)


@pytest.mark.quick
def test_marked_outputs_are_where_the_curvature_is_taken():
    f, params, x, _ = images()

    def loss(p, x, y, last):
        return F.cross_entropy(last(invfunc.outputs(f(p, x))), y)

    def exact(last):
        return invfunc.diag_ggn(lambda p, x, y: loss(p, x, y, last))

    found = by_the_core(exact(lambda z: z), params, x, Y)
    assert_trees_close(found, testing.dense_diag_ggn(f, F.cross_entropy)(params, x, Y), 1e-10)
    behind = exact(lambda z: torch.cat([2 * z, z], 1))(params, x, Y)  # of which the criterion has other columns
    wanted = testing.dense_diag_ggn(f, lambda z, y: F.cross_entropy(torch.cat([2 * z, z], 1), y))(params, x, Y)
    assert_trees_close(behind, wanted, 1e-8)
    with pytest.raises(invfunc.InvFuncError, match="not convex"):
        exact(lambda z: torch.tanh(5 * z) @ -torch.eye(3).double())(params, x, Y)
