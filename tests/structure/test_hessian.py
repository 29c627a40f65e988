"""The diagonal of the Hessian by the structure of a network is that by all columns, and that of the dense Hessian."""

from functools import partial

import pytest
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import diag_hessian
from tests.crossed import thresholds_at
from tests.structure.test_columns import arranged, assert_as_dense
from tests.structures import NETWORKS

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
