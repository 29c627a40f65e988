"""Products and moments of the shares of a table: those of a loop, without a number for each of its rows."""

import pytest
import torch
from torch import nn

from invfunc import (
    batch_grad,
    chunked,
    compiled,
    functional,
    gram,
    streamed,
)
from invfunc.testing import assert_trees_close
from invfunc.testing.memory import peak_memory
from tests.rows import in_blocks
from tests.strategies import Numbers

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
