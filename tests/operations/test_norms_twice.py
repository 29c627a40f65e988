"""Norms, differentiated twice: in the precision of torch, in any order in memory, and where torch is wrong."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jvp

from invfunc import batch_grad, chunked, diag_ggn, diag_hessian, ggnvp, hvp
from invfunc.testing import assert_trees_close
from tests.networks import total
from tests.strategies import Numbers


def standard(h, mean, variance):
    return (h - mean) * (variance + 1e-5).rsqrt()


def of_each(h):
    return standard(h, h.mean((2, 3), keepdim=True), h.var((2, 3), keepdim=True, correction=0))


MEAN, VARIANCE = Numbers(7)(3), Numbers(8)(3).square() + 0.5
ALONE = {
    "batch norm": lambda h: F.batch_norm(h, MEAN, VARIANCE),
    "batch norm in train mode": lambda h: F.batch_norm(h, None, None, training=True),
    "instance norm": F.instance_norm,
    "instance norm of running statistics": lambda h: F.instance_norm(h, MEAN, VARIANCE, use_input_stats=False),
}


def ordered(h, order):
    """The same tensor, with its dimensions in this order in memory."""
    return h.permute(order).contiguous().permute(*torch.tensor(order).argsort().tolist())


@given(data=st.data(), n=st.integers(1, 3), size=st.lists(st.integers(1, 2), min_size=0, max_size=3))
@pytest.mark.parametrize("called", ["batch norm", "instance norm of running statistics"])
def test_what_is_normalised_may_lie_in_memory_in_any_order(called, data, n, size):
    """Torch's own derivative depends on it where a size is one."""
    size = size if "batch" in called else [*size, 2][:3]
    orders = [data.draw(st.permutations(range(2 + len(size)))) for _ in range(2)]

    def model(norm, p, x):
        z = norm(ordered(torch.tanh(x * p["w"].view(3, *[1] * len(size))), orders[0]))
        return ordered(z * z.detach().cos(), orders[1]).tanh().transpose(0, 1).sin().transpose(0, 1)

    def written_out(h):
        return standard(h, *(t.view(3, *[1] * len(size)) for t in (MEAN, VARIANCE)))

    rand = Numbers()
    params, x, y = {"w": rand(3)}, rand(n, 3, *size), rand(n, 3, *size)
    f, g = partial(model, ALONE[called]), partial(model, written_out)
    for make in (diag_ggn, diag_hessian):
        assert_trees_close(make(f, F.mse_loss)(params, x, y), make(g, F.mse_loss)(params, x, y), 1e-9)
    for make in (ggnvp, hvp):
        v = {"w": rand(3)}
        assert_trees_close(make(f, F.mse_loss)(params, v, x, y), make(g, F.mse_loss)(params, v, x, y), 1e-9)


@pytest.mark.parametrize("called", ALONE)
def test_a_sample_that_is_normalised_by_itself(called):
    """Torch's own derivative is wrong where the sample and what is sent back lie in memory in different orders."""

    def model(norm, p, x):
        h = torch.tanh(F.conv2d(x, p["w"])).permute(2, 3, 0, 1).contiguous().permute(2, 3, 0, 1)
        z = torch.einsum("nchw,kc->nkhw", norm(h), p["u"])
        return z.tanh().flatten(1)

    def written_out(h):
        each = called.endswith(("train mode", "instance norm"))
        return of_each(h) if each else standard(h, MEAN[:, None, None], VARIANCE[:, None, None])

    rand, n = Numbers(), 1 if "train" in called else 3
    args = {"w": rand(3, 2, 2, 2), "u": rand(2, 3)}, rand(n, 2, 4, 3), rand(n, 12)
    f = partial(model, ALONE[called])
    wanted = diag_ggn(partial(model, written_out), F.mse_loss)(*args)
    for each in (diag_ggn(f, F.mse_loss), chunked(diag_ggn(f, F.mse_loss), n, over="samples")):
        assert_trees_close(each(*args), wanted, 1e-10)


NORMS = {
    "layer_norm": lambda x, w: F.layer_norm(x, (6,), w),
    "rms_norm": lambda x, w: F.rms_norm(x, (6,), w),
    "group_norm": lambda x, w: F.group_norm(x, 2, w),
    "instance_norm": lambda x, w: F.instance_norm(x.unflatten(1, (2, 3)), weight=w[:2]).flatten(1),
    "batch_norm": lambda x, w: F.batch_norm(x, x.new_ones(6), x.new_full((6,), 2.0), w),
}


@pytest.mark.parametrize("norm", NORMS.values(), ids=NORMS)
def test_the_scale_of_a_norm_has_one_second_derivative(norm):
    """Of its per-sample gradients, forward over reverse and reverse over forward: torch's fused norms have two."""
    rand = Numbers(3)
    params, v, x = {"w": rand(6), "v": rand(4, 6)}, {"w": rand(6), "v": rand(4, 6)}, rand(3, 4)

    def value(params):
        return total(batch_grad(lambda p, x: norm(x @ p["v"], p["w"]).sin().sum(-1))(params, x))

    ahead = jvp(grad(value), (params,), (v,))[1]
    assert_trees_close(grad(lambda p: jvp(value, (p,), (v,))[1])(params), ahead, 1e-10)
