"""The diagonal of the Hessian by the structure of a network is that by all columns, and that of the dense Hessian."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from invfunc import diag_hessian, functional
from invfunc.testing import assert_trees_close, dense_batch_diag_hessian
from tests.crossed import thresholds_at
from tests.structure.test_columns import arranged, assert_as_dense
from tests.structures import NETWORKS, always

STATISTICS = {"of the batch": diag_hessian, "of each sample": partial(diag_hessian, per_sample=True)}
TURNED = {
    "as it is": lambda loss: loss,
    "concave": lambda loss: lambda z, y: -loss(z, y),
    "neither": lambda loss: lambda z, y: loss(z, y) - 0.7 * F.huber_loss(z, z.detach() * 0, reduction="sum"),
}


@pytest.mark.parametrize("kind", NETWORKS)
@settings(max_examples=9)
@given(data=st.data(), few=st.booleans())
def test_it_is_that_of_all_columns(kind, data, few):
    net = data.draw(NETWORKS[kind])
    (f, *loss), args = arranged(data, net)
    turn = TURNED[data.draw(st.sampled_from(list(TURNED)))] if loss else lambda loss: loss
    make = STATISTICS[data.draw(st.sampled_from(list(STATISTICS)))]
    with thresholds_at(NARROWEST=0 if few else 3):
        assert_as_dense(partial(make, f, *map(turn, loss)), args, refusable=True)


ACTIVATIONS = {"relu": nn.ReLU(), "sigmoid": nn.Sigmoid(), "gelu": nn.GELU(), "relu_": nn.ReLU(inplace=True)}
LAYERS = {
    "an auto-encoder": lambda act: [nn.Conv2d(1, 2, 3), act, nn.ConvTranspose2d(2, 1, 3)],
    "strides and groups": lambda act: [nn.Conv2d(1, 4, 3, 2), act, nn.ConvTranspose2d(4, 2, 2, 2, groups=2), act],
    "dilation and padding": lambda act: [nn.Conv2d(1, 2, 3, dilation=2, padding=2), act, nn.Conv2d(2, 2, 3, padding=1)],
    "pooled and enlarged": lambda act: [nn.Conv2d(1, 2, 1), act, nn.MaxPool2d(2), act, nn.Upsample(scale_factor=2)],
}
LOSSES = {
    "mse": lambda z: F.mse_loss(z, z.detach().cos()),
    "concave": lambda z: -F.mse_loss(z, z.detach().cos(), reduction="sum"),
    "of either sign": lambda z: (F.mse_loss(z, z.detach().cos(), reduction="none") * z.detach().sin()).sum(),
    "classes": lambda z: F.cross_entropy(z, z.detach().cos().softmax(1)),
}


@pytest.mark.quick
@pytest.mark.parametrize("called", LOSSES)
@pytest.mark.parametrize("act", ACTIVATIONS)
@pytest.mark.parametrize("layers", LAYERS)
def test_columns_share_passes(layers, act, called):
    """Those of what bends within, too; and the result is that of the dense Hessian."""
    torch.manual_seed(0)
    model = nn.Sequential(*LAYERS[layers](ACTIVATIONS[act])).double()
    f, params = functional(model)
    args = (params, torch.randn(2, 1, 12, 12, dtype=torch.float64), torch.zeros(2))

    def loss(z, _):
        return LOSSES[called](z)

    with always():
        found = diag_hessian(f, loss, per_sample=True)(*args)
        of_all = diag_hessian(f, loss)(*args)
    wanted = dense_batch_diag_hessian(f, loss)(*args)
    assert_trees_close(found, wanted, 1e-9, 1e-6)
    assert_trees_close(of_all, {name: x.sum(0) for name, x in wanted.items()}, 1e-9, 1e-6)
