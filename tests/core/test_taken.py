"""Programs that the core takes itself: each result is that of a plain loop, and no other engine was asked."""

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F

import invfunc
from invfunc import batch_grad, chunked, clipped_grad, compiled, functional, gram, streamed, testing
from invfunc.core.ways import known_way
from invfunc.testing import assert_trees_close
from invfunc.testing.memory import peak_memory
from tests.crossed import thresholds_at
from tests.rows import ROWS, in_blocks
from tests.strategies import Numbers

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


# Weighted sums of the per-sample gradients of convolutions, by the convolution's own backward pass and by patches


@pytest.mark.parametrize("side", [0, 2**40])
def test_of_half_precision_are_added_up_in_single(side):
    """One addend of 2048 and many of 1: float16 would lose each of these."""

    def losses(w, x):
        return F.conv1d(x, w).flatten(1).sum(1)

    x = torch.ones(1, 1, 1000).half()
    x[..., 0] = 2048
    with thresholds_at(TOTAL_POSITIONS=side):
        found = clipped_grad(losses, 1e5)(torch.ones(1, 1, 1).half(), x)[0]
    assert found.item() == 3048


# Products and moments of the shares of a table: those of a loop, without a number for each of its rows

EXACT = 1e-10


def table(count, n=6, positions=3, padding=None):
    """A function, its parameters, tokens of which samples share some, and targets."""
    layers = nn.Embedding(count, 4, padding_idx=padding), nn.Tanh(), nn.Flatten(), nn.Linear(4 * positions, 2)
    f, params = functional(nn.Sequential(*layers).double())
    rand = Numbers(1)
    return f, {k: rand(*p.shape) for k, p in params.items()}, Numbers(2).below(min(count, 9), n, positions), rand(n, 2)


def losses(f):
    return lambda p, x, y: (f(p, x) - y).square().sum(1)


def products(trees, others=None):
    flat = [torch.cat([g.flatten(1) for g in t.values()], 1) for t in (trees, others or trees)]
    return flat[0] @ flat[1].T


@pytest.mark.parametrize("padding", [None, 1])
@pytest.mark.parametrize("count", [2, 9, 4_000])
class TestGram:
    def test_of_a_loss_is_the_loop(self, count, padding):
        f, *args = table(count, padding=padding)
        t, wanted = gram(losses(f)), products(batch_grad(losses(f))(*args))
        for path in (t, chunked(t, 3, over="params"), compiled(t), in_blocks(t)):
            assert_trees_close(path(*args), wanted, EXACT)

    def test_with_others_is_the_loop(self, count, padding):
        f, params, x, y = table(count, padding=padding)
        each = batch_grad(losses(f))
        wanted = products(each(params, x[:4], y[:4]), each(params, x[4:], y[4:]))
        assert_trees_close(gram(losses(f), others=(x[4:], y[4:]))(params, x[:4], y[:4]), wanted, EXACT)
        loader = [(x[i : i + 2], y[i : i + 2]) for i in (0, 2, 4)]
        assert_trees_close(streamed(gram(losses(f)))(params, loader), products(each(params, x, y)), EXACT)


def test_gram_of_a_large_table_does_not_form_the_gradients():
    f, *args = table(400_000, n=64, positions=8)
    t = gram(losses(f))
    t(*args)
    assert peak_memory(lambda: t(*args))[1] < 64 * 400_000 * 4 * 8 / 10  # of the gradients, were they formed
