"""A statistic of two phases, written as a user of `Reduction` would: what is kept crosses chunks unrounded."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, vmap

from invfunc import chunked, clipped_grad, reduced, together, tree, variance
from invfunc.reductions import Reduction
from invfunc.statistic import Statistic
from invfunc.testing.laws.rows import generic, in_blocks
from invfunc.testing.oracles import assert_trees_close, loop_batch_grad
from tests.networks import LOSSES, networks, samples_loss
from tests.strategies import Numbers

EXACT = 1e-9


class Total(Reduction):
    """`sum_n G[n]`"""

    def step(self, shares):
        return (shares.weighted(),)


class Cosines(Reduction):
    """The cosine of each share with the mean share, over all parameters."""

    each, whole, before = (0,), True, Total()

    def __init__(self, total=None):
        self.total = total

    def learned(self, states, found):
        return {leaf: total for leaf, (total,) in states.items()}

    def knowing(self, learned):
        return Cosines(learned)

    def init(self, leaf, n, columns):
        return leaf.new_zeros(2, n), leaf.new_zeros(())

    def step(self, shares):
        total = self.total[shares.place]
        return torch.stack([shares.along(total), shares.norms()]), total.square().sum()

    def merge(self, a, b, over):
        if over != "samples":
            return super().merge(a, b, over)
        return torch.cat([a[0], b[0]], 1), torch.maximum(a[1], b[1])  # 0 where samples do not reach a parameter

    def finish(self, state, found):
        (along, squares), square = state
        return [along / squares.sqrt() / square.sqrt()]


batch_cosine = partial(Statistic, "batch_cosine", reduction=Cosines())


def cosines(flat, samples):
    flat = flat.reshape(len(flat), -1)[samples]
    return torch.mv(flat, flat.sum(0)) / flat.norm(dim=1) / flat.sum(0).norm()


def looped(f, samples=slice(None), shares=loop_batch_grad):
    """The same from the shares of all samples at once."""

    def oracle(*args):
        flat = [g.flatten(1) if g.ndim > 1 else g[:, None] for g in tree.leaves(shares(f)(*args))]
        return cosines(torch.cat(flat, 1), samples)

    return oracle


def arranged(net, loss):
    return samples_loss(net, loss), (net.params, net.x, loss.target(Numbers(1), net.n))


drawn = given(networks(low=2), st.sampled_from(LOSSES))
some = given(networks(low=2), st.sampled_from(LOSSES), st.integers(1, 4), st.sampled_from(["samples", "params"]))


@pytest.mark.quick
class TestCosine:
    @drawn
    def test_is_that_of_the_loop(self, net, loss):
        f, args = arranged(net, loss)
        assert_trees_close(batch_cosine(f)(*args), looped(f)(*args), EXACT)
        assert_trees_close(generic(batch_cosine(f))(*args), looped(f)(*args), EXACT)
        assert_trees_close(in_blocks(batch_cosine(f))(*args), looped(f)(*args), EXACT)

    @some
    def test_does_not_depend_on_chunks(self, net, loss, n, over):
        f, args = arranged(net, loss)
        assert_trees_close(chunked(batch_cosine(f), n, over=over)(*args), looped(f)(*args), EXACT)

    @drawn
    def test_of_some_samples_is_with_their_mean(self, net, loss):
        f, args = arranged(net, loss)
        chosen = [1, 0]
        expected = looped(f, chosen)(*args)
        assert_trees_close(batch_cosine(f, samples=chosen)(*args), expected, EXACT)
        assert_trees_close(chunked(batch_cosine(f, samples=chosen), 2, over="samples")(*args), expected, EXACT)

    @some
    def test_comes_together_with_others(self, net, loss, n, over):
        f, args = arranged(net, loss)
        asked = variance(f), batch_cosine(f), clipped_grad(f, 1.0)
        expected = variance(f)(*args), looped(f)(*args), clipped_grad(f, 1.0)(*args)
        assert_trees_close(together(*asked)(*args), expected, EXACT)
        assert_trees_close(chunked(together(*asked), n, over="samples")(*args), expected, EXACT)

    @drawn
    def test_of_each_parameter_is_given_to_a_function(self, net, loss):
        f, args = arranged(net, loss)
        found = reduced(batch_cosine(f), torch.Tensor.nan_to_num)(*args)
        expected = tree.map_leaves(partial(cosines, samples=slice(None)), loop_batch_grad(f)(*args))
        assert_trees_close(found, tree.map_leaves(torch.Tensor.nan_to_num, expected), 1e-6)


def f(w, x):
    return (x @ w["a"]).sin() + (x * w["b"]).sum(1)


def one_by_one(f):
    return vmap(grad(lambda w, x: f(w, x[None])[0]), (None, 0))


def test_composes_with_vmap_and_grad():
    rand = Numbers()
    w, x = {"a": rand(3), "b": rand(3)}, rand(4, 3)
    stacked = tree.map_leaves(lambda p: torch.stack([p, p + 1]), w)
    for made in (batch_cosine(f), chunked(batch_cosine(f), 2)):
        assert_trees_close(
            vmap(made, (0, None))(stacked, x), vmap(looped(f, shares=one_by_one), (0, None))(stacked, x), EXACT
        )
        slope, expected = (grad(lambda w, t=t: t(w, x).square().sum())(w) for t in (made, looped(f, shares=one_by_one)))
        assert_trees_close(slope, expected, EXACT)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("over", [None, "samples", "params"])
def test_is_not_rounded_between_the_phases(dtype, over):
    """A total and squares that half precision does not hold."""
    x = (3e4 * Numbers()(16, 3).abs()).clamp(max=6e4).to(dtype)
    w = {"a": torch.zeros(3, dtype=dtype), "b": torch.zeros(3, dtype=dtype)}
    made = batch_cosine(f) if over is None else chunked(batch_cosine(f), 3, over=over)
    wide = looped(f)(tree.map_leaves(torch.Tensor.double, w), x.double())
    found = made(w, x)
    assert found.dtype == dtype
    assert_trees_close(found.double(), wide, 2 * torch.finfo(dtype).eps)
