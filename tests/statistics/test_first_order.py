"""The statistics of the shares of a loss function against a plain loop."""

from itertools import combinations
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import invfunc
from invfunc import clipped_grad, noise_scale, streamed, tree
from invfunc.core.shares import Shares
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing.oracles import assert_trees_close, loop_batch_grad, loop_clipped_grad, loop_sum_grad_squared
from tests.laws import OF_LOSSES
from tests.networks import LOSSES, network, networks, samples_loss
from tests.strategies import Numbers

EXACT = 1e-10
statistics = pytest.mark.parametrize("kind", OF_LOSSES.values(), ids=OF_LOSSES)
losses = st.sampled_from(LOSSES)
reductions = st.sampled_from([None, torch.sum, torch.mean])


def reduced(f, reduction):
    return f if reduction is None else lambda *args: reduction(f(*args))


def drawn(net, loss):
    return net.params, net.x, loss.target(Numbers(1), net.n)


@pytest.mark.quick
class TestShares:
    @given(networks(), losses)
    def test_carry_the_scale_of_the_loss(self, net, loss):
        f, args = samples_loss(net, loss), drawn(net, loss)
        each = loop_batch_grad(f)(*args)
        assert_trees_close(invfunc.batch_grad(f)(*args), each, EXACT)
        assert_trees_close(invfunc.batch_grad(reduced(f, torch.sum))(*args), each, EXACT)
        mean = tree.map_leaves(lambda g: g / net.n, each)
        assert_trees_close(invfunc.batch_grad(reduced(f, torch.mean))(*args), mean, EXACT)

    @given(networks(), losses, st.sampled_from([torch.sum, torch.mean]), st.booleans())
    def test_of_a_term_in_the_parameters_alone_are_an_nth(self, net, loss, reduction, before):
        f, args = samples_loss(net, loss), drawn(net, loss)

        def penalty(params):
            return sum(p.square().sum() for p in tree.leaves(params)) / 2

        def penalised(params, x, y):
            value = reduction(f(params, x, y))
            return penalty(params) + value if before else value + penalty(params)

        plain = invfunc.batch_grad(reduced(f, reduction))(*args)
        wanted = tree.map_leaves(lambda g, p: g + p / net.n, plain, args[0])
        assert_trees_close(invfunc.batch_grad(penalised)(*args), wanted, EXACT)

    def test_of_the_parameters_alone_are_not_defined(self):
        with pytest.raises(invfunc.errors.SampleAxisError, match="from the parameters alone"):
            invfunc.batch_grad(lambda w, x: w.square().sum())(Numbers()(3), Numbers(1)(4, 3))


class TestVariance:
    @given(networks(low=2), losses, reductions, st.sampled_from([0, 1, 0.5]))
    def test_is_the_variance_of_the_shares(self, net, loss, reduction, correction):
        f, args = reduced(samples_loss(net, loss), reduction), drawn(net, loss)
        wanted = tree.map_leaves(lambda g: g.var(0, correction=correction), invfunc.batch_grad(f)(*args))
        assert_trees_close(invfunc.variance(f, correction=correction)(*args), wanted, EXACT)

    @given(networks(low=2), losses, st.sampled_from([torch.float32, torch.float64]))
    def test_is_never_negative(self, net, loss, dtype):
        params, x, y = drawn(net, loss)
        same = tree.map_tensors(lambda t: t[:1].expand_as(t).clone(), (x, y))  # the true variance is zero
        params, *batch = tree.map_tensors(lambda t: t.to(dtype) if t.is_floating_point() else t, (params, *same))
        f = samples_loss(net, loss)
        found = invfunc.variance(f)(params, *batch)
        largest = loop_sum_grad_squared(f)(params, *batch)
        for v, g in zip(tree.leaves(found), tree.leaves(largest), strict=True):
            assert (v >= 0).all() and (v <= 1e-9 * g.max() + 1e-30).all()


class TestLowPrecision:
    @statistics
    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("shape", [(320, 2), (3, 512, 2)], ids=["samples", "positions"])
    def test_sums_are_accumulated_in_float32(self, kind, dtype, shape):
        """A bfloat16 sum of ones stops at 256."""

        def f(w, x):
            return (x * w).flatten(1).sum(1)

        w, x = torch.zeros(2, dtype=dtype), torch.full(shape, 1 / 16, dtype=dtype)
        found, wanted = kind.make(f)(w, x), kind.loop(f)(w.double(), x.double())
        assert all(leaf.dtype == dtype for leaf in tree.leaves(found))
        assert_trees_close(found, wanted, torch.finfo(dtype).eps, 1.0)


# clipped_grad and the norms of shares: bounds, no bound, shares of zero, what cancels, a bad bound


@pytest.mark.quick
class TestClipping:
    @given(networks(), losses, reductions, st.floats(0.3, 1.5))
    def test_bounds_each_share_and_no_other(self, net, loss, reduction, part):
        f, args = samples_loss(net, loss), drawn(net, loss)
        scaled = (lambda *a: f(*a) / net.n) if reduction is torch.mean else f
        bound = part * loop_clipped_grad(scaled, torch.inf)(*args)[1].mean().item()
        clipped, norms = clipped_grad(reduced(f, reduction), bound)(*args)
        assert_trees_close((clipped, norms), loop_clipped_grad(scaled, bound)(*args), EXACT)
        assert sum(g.square().sum() for g in tree.leaves(clipped)).sqrt() <= net.n * bound * (1 + EXACT)
        squared = sum(tree.leaves(invfunc.batch_l2_grad(scaled)(*args)))
        assert_trees_close(norms.square(), squared, EXACT)

    @pytest.mark.parametrize("bound", [1.0, torch.inf])
    def test_of_a_zero_share_is_zero_and_so_is_its_slope(self, bound):
        """The norm has no slope at zero: that of its square is taken, and nothing is NaN."""
        w, x = Numbers()(3, 2), Numbers(1)(4, 3)
        x[1] = 0

        def f(w, x):
            return (x @ w).sin().sum(1)

        def slopes(make):
            given = w.clone().requires_grad_(), x.clone().requires_grad_()
            clipped, norms = make(f, bound)(*given)
            return torch.autograd.grad(clipped.cos().sum() + norms.sum(), given)

        found = slopes(clipped_grad)
        assert clipped_grad(f, bound)(w, x)[1][1] == 0
        assert_trees_close(found, slopes(loop_clipped_grad), EXACT)
        assert all(g.isfinite().all() for g in found)

    bad_tensors = [torch.zeros(()), torch.tensor(torch.nan), torch.ones(1), torch.tensor(True), torch.tensor(1j)]

    @pytest.mark.parametrize("bound", [0, -1.0, float("nan"), -torch.inf, "1", None, [1.0], *bad_tensors], ids=repr)
    def test_refuses_a_bound_that_is_none(self, bound):
        with pytest.raises((ArgumentError, ArgumentTypeError), match=r"clipped_grad\(mse_loss.*max_norm"):
            clipped_grad(F.mse_loss, bound)


# noise_scale: unbiased parts from one pass, that of all and of groups, rounding, and what has none


def linear(params, x):
    """Shares that are the columns of x."""
    return x[:, 0] * params["a"] + x[:, 1] * params["b"]


@pytest.mark.quick
class TestParts:
    @settings(max_examples=8)
    @given(networks(low=3), losses, st.integers(2, 3))
    def test_are_unbiased(self, net, loss, size):
        """On average over all batches that can be drawn of some samples, they are those of all of these."""
        f, args = samples_loss(net, loss), drawn(net, loss)
        each = [noise_scale(f, samples=chosen)(*args)[1] for chosen in combinations(range(net.n), size)]
        average = [torch.stack(parts).mean() for parts in zip(*each, strict=True)]
        assert_trees_close(average, list(noise_scale(f)(*args)[1]), EXACT, floor=1e-3)

    @given(networks(low=2), losses, st.data())
    def test_of_groups_add_up_and_parameters_without_a_name_do_not_count(self, net, loss, data):
        f, args = samples_loss(net, loss), drawn(net, loss)
        paths = [path for path, _ in tree.named_leaves(net.params)]
        names = {path: data.draw(st.sampled_from(["first", "second", None])) for path in paths}
        names[paths[0]] = "first"
        gradient, whole = noise_scale(f)(*args)
        same, found = noise_scale(f, groups=names.__getitem__)(*args)
        assert_trees_close(same, gradient, EXACT)
        assert set(found) == {name for name in names.values() if name}
        each = noise_scale(f, groups=lambda path: path)(*args)[1]
        for name, noise in found.items():
            parts = [torch.stack(x).sum() for x in zip(*(each[p] for p in paths if names[p] == name), strict=True)]
            assert_trees_close(list(noise), parts, EXACT, floor=1e-3)
        assert_trees_close(list(whole), [sum(x) for x in zip(*each.values(), strict=True)], EXACT, floor=1e-3)


class TestComposed:
    net, loss = network("convolution", 5), LOSSES[0]
    f, args = staticmethod(samples_loss(net, loss)), drawn(net, loss)

    def test_norms_are_those_of_the_parameters_that_count(self):
        model = nn.Sequential(nn.Linear(3, 4), nn.LayerNorm(4), nn.Tanh(), nn.Linear(4, 1)).double()
        f, params = invfunc.functional(model)
        norms = {"['1.weight']", "['1.bias']"}
        seen, plain = [], Shares.sum_and_norms
        with mock.patch.object(Shares, "sum_and_norms", lambda s: seen.append(s.name(s.place)) or plain(s)):
            t = noise_scale(lambda p, x: f(p, x)[:, 0], groups=lambda path: "norms" if path in norms else None)
            _, noise = t(params, Numbers()(5, 3))
        assert {*seen} == {"params" + path for path in norms} and set(noise) == {"norms"}


class TestRounding:
    def test_leaves_digits_of_the_noise_beside_a_gradient_a_thousand_times_as_large(self):
        """The bound that the docstring tells."""

        def f(p, x, y):
            return (torch.tanh(x @ p["w"]) @ p["v"] - y).square()

        args = {"w": Numbers()(64, 32) / 8, "v": Numbers(1)(32)}, 1 + Numbers(2)(48, 64) / 1000, Numbers(3)(48) / 1000
        narrow = tree.map_tensors(torch.Tensor.float, args)
        wanted = noise_scale(f)(*tree.map_tensors(torch.Tensor.double, narrow))[1]
        found = noise_scale(f)(*narrow)[1]
        assert found.trace.dtype == torch.float32 and wanted.scale < 1e-2
        assert abs(found.trace - wanted.trace) < 1e-7 * wanted.squared_norm
        assert abs(found.squared_norm - wanted.squared_norm) < 1e-6 * wanted.squared_norm

    def test_is_unknown_where_the_square_of_the_sum_overflows(self):
        x = (1 + Numbers()(64, 8).float()) * 1e18
        _, noise = invfunc.noise_scale(lambda w, x: x @ w)(torch.zeros(8), x)
        assert noise.squared_norm.isinf() and noise.trace.isnan() and noise.scale.isnan()

    def test_comes_after_the_parts_of_all_parameters_are_added_up(self):
        """289 is no bfloat16."""
        params = {name: torch.ones((), dtype=torch.bfloat16) for name in "ab"}
        x = torch.tensor([[17.0, 16.0], [17.0, -18.0]], dtype=torch.bfloat16)
        assert noise_scale(linear)(params, x)[1].squared_norm == 1


class TestRefused:
    params, x = {"a": torch.ones(()), "b": torch.ones(())}, torch.ones(3, 2)

    def test_is_one_sample(self):
        with pytest.raises(ArgumentError, match=r"noise_scale\(linear\)\(params, x\): .* there is 1 sample"):
            noise_scale(linear)(self.params, self.x[:1])
        with pytest.raises(ArgumentError, match=r"there is 1 sample"):
            streamed(noise_scale(linear))(self.params, [(self.x[:1],)])

    def test_are_groups_that_are_none(self):
        with pytest.raises(ArgumentTypeError, match=r"noise_scale\(linear, groups=...\): groups is \['a'\], but"):
            noise_scale(linear, groups=["a"])  # pyright: ignore[reportArgumentType]
        with pytest.raises(ArgumentTypeError, match=r"groups\(\"\['a'\]\"\) is of type int, but has to be the name"):
            noise_scale(linear, groups=len)(self.params, self.x)  # pyright: ignore[reportArgumentType]
        with pytest.raises(ArgumentError, match=r"groups has a name for none of the parameters \['a'\], \['b'\]"):
            noise_scale(linear, groups=lambda path: None)(self.params, self.x)
