"""The exact GGN by the structure of a network is that by all columns, whatever the network and the loss are."""

from functools import partial

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

import invfunc
from invfunc import tree
from invfunc.errors import InvFuncError
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests.laws import composed
from tests.structure_losses import criteria_of
from tests.structures import NETWORKS, always

EXACT, FLOOR = 1e-9, 1e-6
"""The second is what counts as the largest entry of a leaf where all cancels, as of a shift before a norm."""
NOTHING = torch.zeros(())
STATISTICS = {
    "diag_ggn": invfunc.diag_ggn,
    "diag_ggn of each": partial(invfunc.diag_ggn, per_sample=True),
    "ggn_trace": invfunc.ggn_trace,
    "ggn_trace per parameter": partial(invfunc.ggn_trace, per_parameter=True),
    "exact kfac": partial(invfunc.kfac, fisher="exact"),
    "exact kfac, joint": partial(invfunc.kfac, joint=True, fisher="exact"),
    "exact kfac, reduce": partial(invfunc.kfac, weight_sharing="reduce", fisher="exact"),
}


def assert_as_dense(make, args, rtol=EXACT, floor=FLOOR, refusable=False):
    """The same by both methods, or the same error where there may be one."""
    try:
        wanted = make(method="dense")(*args)
    except InvFuncError as error:
        if not refusable:
            raise
        with pytest.raises(type(error)), always():
            make(method="auto")(*args)
        return
    with always():
        found = make(method="auto")(*args)
    found, wanted = (tree.map_leaves(lambda x: NOTHING if x is None else x, t) for t in (found, wanted))
    assert_trees_close(found, wanted, rtol, floor)


def arranged(data, net):
    """A criterion for a network, the functions in one of the two forms, and arguments."""
    z = net.f(net.params, *net.inputs)
    assume(z.abs().max() < 30)  # its exp is to be finite
    criterion = data.draw(criteria_of(tuple(z.shape)))
    functions = (composed(net.f, criterion.loss),) if data.draw(st.booleans()) else (net.f, criterion.loss)
    return functions, (net.params, *net.inputs, criterion.target)


@pytest.mark.parametrize("kind", NETWORKS)
@settings(max_examples=17)
@given(data=st.data())
def test_it_is_that_of_all_columns(kind, data, device, dtype):
    net = data.draw(NETWORKS[kind])
    functions, args = arranged(data, net)
    called = data.draw(st.sampled_from(list(STATISTICS)))
    derived = any("parametrizations" in name for name, _ in tree.named_leaves(net.params))  # as by weight_norm
    refusable = called.startswith("exact kfac") and derived
    refusable |= kind == "by data" and (called.startswith("exact kfac") or len(functions) == 1)
    assert_as_dense(partial(STATISTICS[called], *functions), moved(args, dtype, device), refusable=refusable)
