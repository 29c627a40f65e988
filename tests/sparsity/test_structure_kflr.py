"""Kronecker factors from columns that share passes, of all kinds of networks and losses: those of all columns."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from invfunc import explain, functional, kflr
from tests.crossed import thresholds_at
from tests.sparsity.test_structure import arranged, assert_as_dense
from tests.structures import MOVED, NETWORKS, always

FORMS = {"expand": {}, "joint": {"joint": True}, "reduce": {"weight_sharing": "reduce"}}


@settings(max_examples=100)
@given(data=st.data(), few=st.booleans())
@pytest.mark.parametrize("form", list(FORMS))
def test_it_is_that_of_all_columns(form, data, few):
    net = data.draw(st.one_of(*NETWORKS.values()))
    functions, args = arranged(data, net)
    make = partial(kflr, *functions, unsupported="diagonal", **FORMS[form])
    with thresholds_at(NARROWEST=0 if few else 3):
        assert_as_dense(make, args, refusable=net.called in MOVED or net.called == "by data")


@pytest.mark.quick
def test_columns_of_an_auto_encoder_share_passes():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Sigmoid(), nn.ConvTranspose2d(2, 1, 3), nn.Flatten())
    f, params = functional(model.double())
    x = torch.rand(2, 1, 14, 14, dtype=torch.float64)
    args = (params, x, x.flatten(1))
    with always():
        passes = {form: explain(kflr(f, F.mse_loss, **FORMS[form]))(*args).passes for form in FORMS}
    assert passes["expand"] <= 9 < 196 == passes["reduce"]
    assert_as_dense(partial(kflr, f, F.mse_loss), args)


def test_a_parameter_that_several_outputs_read():
    """Columns of one output do not reach all that reads it, but what is read counts there, too."""
    torch.manual_seed(0)
    a, b, x = torch.randn(2, 1, 3), torch.randn(1, 2, 3), torch.randn(2, 1, 14)

    def f(p, x):
        h = F.conv1d(x, p["a"])
        return F.conv1d(h.tanh(), p["b"]), F.conv1d(h.exp().flip(-1), p["b"])

    def loss(z, y):
        return F.mse_loss(z[0], y, reduction="sum") + 3 * F.mse_loss(z[1], y, reduction="sum")

    args = ({"a": a.double(), "b": b.double()}, x.double(), torch.zeros(2, 1, 10).double())
    assert_as_dense(partial(kflr, f, loss), args)
