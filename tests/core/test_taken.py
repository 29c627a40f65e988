"""Programs that the core takes itself: each result is that of a plain loop, and no other engine was asked."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import invfunc
from invfunc import testing
from invfunc._ways import known_way
from invfunc.testing import assert_trees_close
from invfunc.testing.laws.rows import ROWS

X, Y = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)), torch.arange(5) % 3


def model(*more):
    torch.manual_seed(0)
    return invfunc.functional(nn.Sequential(nn.Linear(8, 6), nn.LayerNorm(6), nn.Tanh(), nn.Linear(6, 3), *more))


def by_the_core(statistic, *args):
    """The result, after which the statistic must still be one of the core."""
    found = statistic(*args)
    assert not known_way(statistic.f, statistic.called), "it is not followed as it is"
    return found


class TestHalfPrecision:
    @pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
    def test_of_curvature(self, low):
        f, params = model()
        given = {k: p.to(low) for k, p in params.items()}
        found = by_the_core(invfunc.diag_ggn(f, F.cross_entropy), given, X.to(low), Y)
        wanted = testing.dense_diag_ggn(f, F.cross_entropy)({k: p.float() for k, p in given.items()}, X, Y)
        assert_trees_close(found, wanted, 0.1)

    def test_a_parameter_that_is_cast_loses_no_small_gradient(self):
        """Entries of 2^-13 have squares of 0 in float16."""
        w, x = torch.zeros(64, 4).half(), torch.full((3, 64), 2.0**-13)
        found = by_the_core(invfunc.batch_l2_grad(lambda w, x: (x @ w.float()).sum(1)), w, x)
        assert_trees_close(found, torch.full((3,), 256 * 2.0**-26), 0.02)


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

    def test_are_many(self):
        f, params = invfunc.functional(nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 40)).double())
        y = torch.randn(5, 40).double()
        found = by_the_core(invfunc.diag_ggn(f, F.mse_loss, method="dense"), params, X.double(), y)
        assert_trees_close(found, testing.dense_diag_ggn(f, F.mse_loss)(params, X.double(), y), 1e-10)


class Sequences(nn.Module):
    """A table that is tied to the head, a layer used twice, groups, a depthwise convolution, and scales of two dims."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(7, 6, padding_idx=0), nn.LayerNorm([5, 8])
        self.groups, self.each = nn.Conv1d(6, 8, 3, padding=1, groups=2), nn.Conv1d(8, 8, 3, groups=8)
        self.twice, self.last = nn.Linear(8, 8), nn.Linear(8, 6)
        self.token = nn.Parameter(torch.linspace(-1, 1, 8).view(1, 1, 8))

    def forward(self, x):
        h = self.norm(self.groups(self.table(x).mT).mT)
        h = self.twice(self.twice(h).tanh()).tanh()
        h = self.each(torch.cat([self.token.expand(len(h), -1, -1), h], 1).mT).mT
        return self.last(h).mean(1) @ self.table.weight.T


class TestKroneckerFactors:
    @pytest.fixture
    def case(self):
        torch.manual_seed(0)
        f, params = invfunc.functional(Sequences().double())
        generator = torch.Generator().manual_seed(1)
        return f, params, torch.randint(7, (40, 5), generator=generator), torch.arange(40) % 7

    @pytest.mark.parametrize("joint", [False, True], ids=["bias apart", "bias joined"])
    @pytest.mark.parametrize("sharing", ["expand", "backpack"])
    def test_eigenbases(self, case, sharing, joint):
        f, params, *batch = case
        left_out = {k: p for k, p in params.items() if k.startswith("norm")}  # where eigenvalues are equal
        args = {k: p for k, p in params.items() if k not in left_out}, *batch

        def g(p, x):
            return f({**p, **left_out}, x)

        options = {"fisher": "exact", "weight_sharing": sharing, "joint": joint}
        statistic = invfunc.ekfac(g, F.cross_entropy, **options)
        found = by_the_core(statistic, *args)
        wanted = invfunc.chunked(statistic, 1)(*args)
        assert found.keys() == wanted.keys()
        for name, matrix in wanted.items():
            assert (matrix is None) == (found[name] is None)
            if matrix is not None:
                assert_trees_close(found[name].dense(), matrix.dense(), 1e-7)


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
