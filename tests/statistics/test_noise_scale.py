"""noise_scale: unbiased parts from one pass, that of all and of groups, rounding, and what has none."""

from itertools import combinations
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import invfunc
from invfunc import noise_scale, streamed, tree
from invfunc.core.shares import Shares
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.testing.oracles import assert_trees_close
from tests.networks import LOSSES, network, networks, samples_loss
from tests.statistics.test_first_order import EXACT, drawn, losses
from tests.strategies import Numbers


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
