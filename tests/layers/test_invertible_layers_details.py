"""Layers as pairs: under the transforms, beside torch's own layers, and in half precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import gradcheck, gradgradcheck

from invfunc import layers, tree
from invfunc.errors import ArgumentError, ArgumentTypeError
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


# Errors of the layers: the call, what came, what was wanted, the fix

X, W, CUBE = torch.ones(2, 3), torch.eye(3), torch.ones(2, 3, 4, 5)
LINEAR, TURN, CONV, PATCH = layers.linear(), layers.orthogonal_linear(), layers.conv1x1(), layers.patch_conv()
ACT, NORM, RELU, KERNEL, WIDE = (
    layers.actnorm(),
    layers.batch_norm(),
    layers.leaky_relu(),
    torch.ones(6, 3, 2, 1),
    torch.ones(4, 3),
)
ONE, TWO = (torch.ones(3), torch.ones(3)), (torch.ones(3), torch.ones(2))
FORM = "[N, C, *spatial] with one to three spatial axes"
GIVEN = "as W has shape (3, 3)"
HALFWAY = (
    "it makes 2 numbers of 3, from which there is no way back. It has to give at least as many as it gets: out >= 3"
)
MORE = "it makes 4 numbers of 3, so that dy/dx is not square and has no determinant. A log-determinant needs out == 3"
COUNT = "has to be an integer of at least 1"
ABOVE = "has to be a finite number above 0"
TOO_FEW = (
    "at most one number a channel, which has no variance. Give more samples, or batch_norm(statistics=(mean, var))"
)

REFUSED = {
    "linear()(x, params)": [
        (lambda: LINEAR(X, None), "params is of type NoneType, but has to be W, (W, b) or (W, None)"),
        (lambda: LINEAR(X, (W,)), "params has 1 entries, but has to be W, (W, b) or (W, None)"),
        (lambda: LINEAR(X, (1.0, None)), "W is of type float, but has to be a tensor"),
        (lambda: LINEAR(X, X[0]), "W has shape (3,), but has to be [out, in]"),
        (lambda: LINEAR(X, (W, ONE[0][:1])), "b has shape (1,), but has to have shape (3,) beside W of shape (3, 3)"),
        (lambda: LINEAR(X, X), f"W has shape (2, 3): {HALFWAY}"),
        (lambda: LINEAR(X.T, W), f"x has shape (3, 2), but the last axis has to have size 3, {GIVEN}"),
    ],
    "linear().log_det(x, params)": [(lambda: LINEAR.log_det(X, WIDE), f"W has shape (4, 3): {MORE}")],
    "orthogonal_linear()(x, params)": [
        (lambda: TURN(X, WIDE), "A has shape (4, 3), but has to be square"),
        (lambda: TURN(X, None), "params is of type NoneType, but has to be A, (A, b) or (A, None)"),
    ],
    "conv1x1()(x, params)": [
        (lambda: CONV(X, W), f"x has shape (2, 3), but has to be {FORM}"),
        (lambda: CONV(CUBE.mT.movedim(1, 2), W), f"x has shape (2, 5, 3, 4), but axis 1 has to have size 3, {GIVEN}"),
    ],
    "patch_conv()(x, params)": [
        (lambda: PATCH(CUBE, W), "W has shape (3, 3), but has to be [out, in, *k] with one to three axes k"),
        (lambda: PATCH(X, KERNEL), "x has shape (2, 3), but has to be [N, in, *size] with 2 axes of size"),
        (
            lambda: PATCH(CUBE[:, :, :3], KERNEL),
            "x has size (3, 5), which the kernel (2, 1) does not divide. Pad x, by layers.pad",
        ),
    ],
    "batch_norm(eps=0)": [(lambda: layers.batch_norm(0), f"eps {ABOVE}")],
    "batch_norm(statistics=...)": [
        (lambda: layers.batch_norm(statistics=X), "statistics is of type Tensor, but has to be (mean, var), both [C]")
    ],
    "actnorm().start(x)": [
        (
            lambda: ACT.start(X[:1]),
            "x has shape (1, 3), at most one number a channel, which has no variance. Give more samples",
        )
    ],
    "batch_norm()(x, params)": [
        (lambda: NORM(X[:1]), f"x has shape (1, 3), {TOO_FEW}"),
        (lambda: NORM(X, (W,)), "params has 1 entries, but has to be (weight, bias), both [C]"),
    ],
    "flatten(2, 1)(x)": [
        (
            lambda: layers.flatten(2, 1)(CUBE),
            "x has shape (2, 3, 4, 5), which has no axes from 2 to 1. Give start_dim and end_dim in this order and "
            "among those of x",
        )
    ],
    "flatten().inverse(y, shape)": [
        (
            lambda: layers.flatten().inverse(X, (2, 2)),
            "y has shape (2, 3), which does not have the numbers of shape (2, 2)",
        )
    ],
    "flatten(0).log_det(x)": [
        (lambda: layers.flatten(0).log_det(X), "the leading axis is flattened too, and the samples with it. Start at 1")
    ],
    "unflatten(1, 3)": [(lambda: layers.unflatten(1, 3), "sizes is of type int, but has to be a tuple of integers")],
    "unflatten(1, ())": [(lambda: layers.unflatten(1, ()), "sizes has to have at least one entry, and at most one -1")],
    "unflatten(1, (-2, 3))": [
        (lambda: layers.unflatten(1, (-2, 3)), "-2 in sizes, whose entries have to be integers of at least -1")
    ],
    "unflatten(1, (2, -1))(x)": [
        (lambda: layers.unflatten(1, (2, -1))(X), "x has shape (2, 3), which has no axis 1 to split as (2, -1)")
    ],
    "unflatten(1, (2, 2)).inverse(y)": [
        (lambda: layers.unflatten(1, (2, 2)).inverse(X), "y has shape (2, 3), whose axes 1 to 2 are not (2, 2)")
    ],
    "unflatten(0, (1, 2)).log_det(x)": [
        (lambda: layers.unflatten(0, (1, 2)).log_det(X), "the leading axis is split, and the samples with it")
    ],
    "pixel_shuffle(0)": [(lambda: layers.pixel_shuffle(0), f"r {COUNT}")],
    "pixel_shuffle(2)(x)": [
        (lambda: layers.pixel_shuffle(2)(CUBE), "x has shape (2, 3, 4, 5): 4 does not divide its 3 channels")
    ],
    "pixel_shuffle(2).inverse(y)": [
        (
            lambda: layers.pixel_shuffle(2).inverse(CUBE),
            "y has shape (2, 3, 4, 5): 2 does not divide its size (4, 5). Pad it, by layers.pad",
        )
    ],
    "pad((1,))": [(lambda: layers.pad((1,)), "padding has 1 entries, but has to have two for each axis")],
    "pad((1, -1))": [(lambda: layers.pad((1, -1)), "-1 in padding, whose entries have to be integers of at least 0")],
    "pad((1, 1, 1, 1))(x)": [
        (lambda: layers.pad((1, 1, 1, 1))(X[0]), "x has shape (3,), but has to be of at least 2 axes")
    ],
    "pad((2, 2)).inverse(y)": [
        (lambda: layers.pad((2, 2)).inverse(X), "y has shape (2, 3), which is smaller along axis -1 than its margins")
    ],
    "haar()(x)": [
        (lambda: layers.haar()(CUBE), "x has shape (2, 3, 4, 5), but H and W have to be even. Pad it, by layers.pad")
    ],
}
EACH = [(call, fn, reason) for call, cases in REFUSED.items() for fn, reason in cases]


@pytest.mark.parametrize(("call", "fn", "reason"), EACH, ids=[f"{call}: {reason[:30]}" for call, _, reason in EACH])
def test_the_error_tells_the_call_and_the_reason(call, fn, reason):
    with pytest.raises((ArgumentError, ArgumentTypeError)) as told:
        fn()
    assert str(told.value) == f"{call}: {reason}."
    assert isinstance(told.value, TypeError) == (" is of type " in reason)


def test_a_singular_matrix_is_torchs_error():
    with pytest.raises(torch.linalg.LinAlgError):
        LINEAR.inverse(X, torch.zeros(3, 3))
    assert LINEAR.log_det(X, torch.zeros(3, 3)).tolist() == [-torch.inf] * 2


def test_layers_are_called_by_their_names():
    given = layers.batch_norm(statistics=ONE)
    pairs = [LINEAR, TURN, layers.conv1x1(orthogonal=True), NORM, given, layers.leaky_relu(0.5), layers.flatten(1, 2)]
    names = "linear() orthogonal_linear() conv1x1(orthogonal=True) batch_norm() batch_norm(statistics=...)"
    assert [repr(pair) for pair in pairs] == [*names.split(), "leaky_relu(0.5)", "flatten(1, 2)"]
    assert repr(layers.flatten(2)) == "flatten(2)" and repr(layers.pad([1, 2], 3.0)) == "pad([1, 2], value=3.0)"
