"""Layers as pairs: under the transforms, beside torch's own layers, and in half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from invfunc import layers, tree
from invfunc.layers.shapes import rotation
from invfunc.testing import assert_trees_close
from tests.layers.test_invertible_layers import FLOOR, LAYERS, SQUARE, TALL, and_back, of_each, placed, there
from tests.strategies import Numbers

few = settings(max_examples=4)
NO_BATCH = {name: cases for name, cases in LAYERS.items() if name != "batch_norm"}
WHOLE: dict[str, Any] = {"fullgraph": True, "backend": "eager"}


def opened(fn: Any, *given: Any) -> tuple[Any, list[torch.Tensor]]:
    """The function as one of the tensors among its arguments alone, and these."""
    leaves, layout = tree.flatten(given)
    at = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]

    def of_tensors(*tensors: torch.Tensor) -> Any:
        filled = list(leaves)
        for i, t in zip(at, tensors, strict=True):
            filled[i] = t
        return fn(*tree.unflatten(filled, layout))

    return of_tensors, [leaves[i] for i in at]


class TestTransforms:
    @of_each
    @few
    @given(data=st.data())
    def test_derivatives_of_first_and_second_order(self, cases, data):
        """Backward, forward and batched, of both directions, in x and in the parameters."""
        case = data.draw(cases)
        y, hidden = there(case.pair, case.x, case.args)
        for fn, given_to in ((case.pair, (case.x, *case.args)), (case.pair.inverse, (y, *hidden, *case.args))):
            f, tensors = opened(fn, *given_to)
            tensors = [t.detach().clone().requires_grad_() for t in tensors]
            assert gradcheck(f, tensors, check_forward_ad=True, check_batched_grad=True)
            assert gradgradcheck(f, tensors)

    @pytest.mark.parametrize("cases", SQUARE.values(), ids=SQUARE)
    @few
    @given(data=st.data())
    def test_derivatives_of_the_log_determinant(self, cases, data):
        case = data.draw(cases)
        f, tensors = opened(case.pair.log_det, case.x, *case.args)
        tensors = [t.detach().clone().requires_grad_() for t in tensors]

        def slanted(*t):
            return f(*t) + sum(p.sum() for p in t)  # f may be constant

        assert gradcheck(slanted, tensors, check_forward_ad=True)
        assert gradgradcheck(slanted, tensors)


class TestExtremes:
    @pytest.mark.parametrize("cases", NO_BATCH.values(), ids=NO_BATCH)
    @few
    @given(data=st.data())
    def test_of_no_sample_at_all(self, device, dtype, cases, data):
        case = placed(cases, data, dtype, device)
        y, none = case.pair(case.x, *case.args), case.x[:0]
        assert case.pair(none, *case.args).shape == (0, *y.shape[1:]) or repr(case.pair).startswith("pad")
        assert and_back(case.pair, none, case.args).shape == none.shape
        if cases not in TALL.values():
            assert case.pair.log_det(none, *case.args).shape == (0,)

    @pytest.mark.slow
    @pytest.mark.filterwarnings("ignore:an invertible block within torch.compile:invfunc.InvFuncWarning")
    @of_each
    @settings(max_examples=1)
    @given(data=st.data())
    def test_compiles_as_one_graph(self, cases, data):
        case = data.draw(cases)
        torch._dynamo.reset()
        volume = case.pair.log_det if cases not in TALL.values() else lambda x, *args: x

        def all_of(x, args):
            return case.pair(x, *args), and_back(case.pair, x, args), volume(x, *args)

        found, wanted = torch.compile(all_of, **WHOLE)(case.x, case.args), all_of(case.x, case.args)
        assert_trees_close(found[:2], (wanted[0], case.x), 1e-10)
        assert_trees_close(found[2], wanted[2], 1e-10, FLOOR)


class TestAgreement:
    """With what torch has of them."""

    def test_a_tall_linear_is_solved_without_its_normal_equations(self):
        """They would square the condition number, 1e5."""
        rand = Numbers()
        left, right = torch.linalg.qr(rand(8, 4))[0], torch.linalg.qr(rand(4, 4))[0]
        w, x = (left * torch.logspace(0, -5, 4).double()) @ right, rand(3, 4)
        assert_trees_close(and_back(layers.linear(), x, (w,)), x, 1e-9)


class TestRotation:
    @given(n=st.integers(1, 6), scale=st.sampled_from([0.0, 1.0, 1e3]))
    def test_is_the_product_of_the_reflections(self, n, scale):
        a, one = scale * Numbers()(n, n), torch.eye(n).double()
        q, wanted = rotation(a), -one
        for i in range(n):
            v = torch.cat([torch.zeros(i), torch.ones(1), a[i + 1 :, i]])
            wanted = wanted @ (one - 2 * v.outer(v) / v.dot(v))
        assert_trees_close(q, wanted, 1e-13)
        assert_trees_close(q @ q.T, one, 1e-13)
        assert_trees_close(torch.linalg.det(q), torch.ones(()).double(), 1e-13)
        assert scale or torch.equal(q, one)


class TestHalfPrecision:
    @pytest.mark.parametrize("half", [torch.bfloat16, torch.float16], ids=str)
    @of_each
    @given(data=st.data())
    def test_inverse_restores_x_up_to_its_rounding(self, device, half, cases, data):
        case = placed(cases, data, half, device)
        y, x = case.pair(case.x, *case.args), and_back(case.pair, case.x, case.args)
        assert y.dtype == x.dtype == half
        # the condition is 4 at most; behind a bias or a mean rounding is relative to larger numbers
        assert_trees_close(x, case.x, 64 * torch.finfo(half).eps, 1.0)

    @pytest.mark.parametrize("cases", SQUARE.values(), ids=SQUARE)
    @given(data=st.data())
    def test_log_determinants_are_float32(self, device, cases, data):
        case = placed(cases, data, torch.bfloat16, device)
        found = case.pair.log_det(case.x, *case.args)
        wide = tree.map_tensors(torch.Tensor.float, (case.x, case.args))
        assert found.dtype == torch.float32
        if "statistics" not in repr(case.pair):
            assert_trees_close(found, case.pair.log_det(wide[0], *wide[1]), 1e-5, FLOOR)

    def test_statistics_of_a_batch_are_float32(self):
        x = Numbers()(8, 3, 4).bfloat16() + 100
        _, (mean, var) = layers.batch_norm().forward(x)
        assert mean.dtype == var.dtype == torch.float32
        assert_trees_close((mean, var), (x.float().mean([0, 2]), x.float().var([0, 2], correction=0)), 1e-5)


class TestStart:
    """Of `actnorm`, block after block of a flow."""

    @few
    @given(st.integers(2, 5), st.integers(1, 3), st.lists(st.integers(1, 3), max_size=2))
    def test_gives_each_channel_mean_0_and_variance_1(self, n, channels, spatial):
        x, turn = 3 * Numbers()(n, channels, *spatial) + 1, Numbers(1)(channels, channels)
        for _ in range(2):
            norm = layers.actnorm(1e-12)
            y = norm(x, norm.start(x))
            var, mean = torch.var_mean(y, [0, *range(2, y.ndim)], correction=0)
            assert_trees_close((mean, var), (torch.zeros_like(mean), torch.ones_like(var)), 1e-6, floor=1.0)
            x = torch.einsum("nc...,dc->nd...", y, turn)
