"""A batch of no samples, as Poisson sampling gives: sums are zeros, samples `[0, ...]`, and a mean stays an error."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc
from invfunc import chunked, compiled, functional, reduced, streamed, together, tree
from invfunc.errors import ArgumentError
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

F_, PARAMS = functional(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double())
X, Y = Numbers(2)(6, 4), Numbers(3).below(2, 6)
ZEROS = tree.map_leaves(torch.zeros_like, PARAMS)


def loss(reduction):
    return lambda p, x, y: F.cross_entropy(F_(p, x), y, reduction=reduction)


def generator():
    return torch.Generator().manual_seed(0)


STATISTICS = {
    "batch_grad": invfunc.batch_grad,
    "batch_l2_grad": invfunc.batch_l2_grad,
    "sum_grad_squared": invfunc.sum_grad_squared,
    "clipped_grad": lambda f: invfunc.clipped_grad(f, 1.0),
    "gram": invfunc.gram,
    "sketched_grad": lambda f: invfunc.sketched_grad(f, rows=2, columns=2, generator=generator()),
    "reduced": lambda f: reduced(invfunc.batch_grad(f), lambda g: g.sum(0)),
    "together": lambda f: together(invfunc.batch_grad(f), invfunc.clipped_grad(f, 1.0)),
}


def cut(result, n):
    """The result of n samples without them: axes of n become 0, and sums zeros."""
    return tree.map_leaves(lambda x: x.new_zeros([0 if d == n else d for d in x.shape]), result)


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("of", STATISTICS)
class TestNoSamples:
    def test_are_those_of_some_without_these(self, of, reduction):
        t = STATISTICS[of](loss(reduction))
        wanted = cut(t(PARAMS, X, Y), 6)
        assert_trees_close(t(PARAMS, X[:0], Y[:0]), wanted, 0)

    def test_in_all_modes(self, of, reduction):
        t = STATISTICS[of](loss(reduction))
        wanted, args = t(PARAMS, X[:0], Y[:0]), (PARAMS, X[:0], Y[:0])
        modes = [compiled, *[lambda t: chunked(t, 2, over="params")] * ("params" in t.axes)]
        modes += [lambda t: chunked(t, chunk_size=2, over="samples")] * (of not in ("gram", "together"))
        for mode in modes:
            assert_trees_close(mode(t)(*args), wanted, 0)
        if reduction == "none" and of not in ("reduced", "gram"):
            loader = [args[1:], args[1:]]
            assert_trees_close(streamed(t)(PARAMS, loader), wanted, 0)


class TestAMeanOfNothing:
    @pytest.mark.parametrize("of", STATISTICS)
    def test_is_an_error(self, of):
        with pytest.raises(ArgumentError, match=r"x has no samples \(N = 0\), of which a sum is 0, and a mean"):
            STATISTICS[of](loss("mean"))(PARAMS, X[:0], Y[:0])

    def test_as_is_a_variance(self):
        for of in (invfunc.variance, invfunc.grad_and_variance, invfunc.noise_scale):
            with pytest.raises(ArgumentError, match="0 sample"):
                of(loss("none"))(PARAMS, X[:0], Y[:0])

    def test_as_are_curvature_and_an_empty_loader(self):
        with pytest.raises(ArgumentError, match=r"no samples \(N = 0\)"):
            invfunc.diag_ggn(F_, F.cross_entropy)(PARAMS, X[:0], Y[:0])
        with pytest.raises(ArgumentError, match="the loader gave no samples"):
            streamed(invfunc.batch_grad(loss("none")))(PARAMS, [])


def test_a_step_of_private_training_goes_through_every_batch():
    t = invfunc.clipped_grad(loss("none"), 0.1, value=True)
    for n in (3, 0, 1):
        total, norms, value = t(PARAMS, X[:n], Y[:n])
        assert norms.shape == value.shape == (n,)
        assert_trees_close(total, total if n else ZEROS, 0)
