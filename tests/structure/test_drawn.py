"""What the core makes of the structure of drawn networks is what all columns give, for losses that it takes itself."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.laws import composed
from tests.strategies import Numbers
from tests.structure.test_columns import STATISTICS, assert_as_dense
from tests.structures import NETWORKS

CRITERIA = {
    "cross entropy": (F.cross_entropy, lambda z: z.argmax(1).roll(1, 0)),
    "squares": (F.mse_loss, lambda z: Numbers(5)(*z.shape)),
    "probabilities": (F.binary_cross_entropy_with_logits, lambda z: (z > 0).to(z.dtype)),
}


@pytest.mark.parametrize("kind", NETWORKS)
@settings(max_examples=12)
@given(data=st.data())
def test_it_is_that_of_all_columns(kind, data):
    net = data.draw(NETWORKS[kind])
    z = net.f(net.params, *net.inputs)
    assume(z.abs().max() < 30 and z.ndim > 1)  # its exp is to be finite
    loss, target = CRITERIA[data.draw(st.sampled_from([*CRITERIA]))]
    functions = (composed(net.f, loss),) if data.draw(st.booleans()) else (net.f, loss)
    called = data.draw(st.sampled_from([*STATISTICS]))
    with torch.no_grad():
        args = net.params, *net.inputs, target(z)
    refusable = called.startswith("exact kfac") or (kind == "by data" and len(functions) == 1)
    assert_as_dense(partial(STATISTICS[called], *functions), args, refusable=refusable)
