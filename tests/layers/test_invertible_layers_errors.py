"""Errors of the layers: the call, what came, what was wanted, the fix."""

import pytest
import torch

from invfunc import layers
from invfunc.errors import ArgumentError, ArgumentTypeError

X, W, CUBE = torch.ones(2, 3), torch.eye(3), torch.ones(2, 3, 4, 5)
LINEAR, TURN, CONV, PATCH = layers.linear(), layers.orthogonal_linear(), layers.conv1x1(), layers.patch_conv()
ACT, NORM, RELU, KERNEL, TALL = (
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
NO_BATCH = (
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
    "linear().log_det(x, params)": [(lambda: LINEAR.log_det(X, TALL), f"W has shape (4, 3): {MORE}")],
    "orthogonal_linear()(x, params)": [
        (lambda: TURN(X, TALL), "A has shape (4, 3), but has to be square"),
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
        (lambda: NORM(X[:1]), f"x has shape (1, 3), {NO_BATCH}"),
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
        (
            lambda: layers.flatten(0).log_det(X),
            "the leading axis is flattened too, and the samples with it. Start at 1",
        )
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
        (
            lambda: layers.pad((2, 2)).inverse(X),
            "y has shape (2, 3), which is smaller along axis -1 than its margins",
        )
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
