"""ggn_trace: the sum of the diagonal, whatever it is made of."""

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, vmap

from invfunc import chunked, diag_ggn, ggn_trace, tree
from invfunc.testing import assert_trees_close
from invfunc.testing.laws.rows import generic, in_blocks
from tests.networks import LOSSES, network, total
from tests.strategies import Numbers

EXACT, FLOOR = 1e-9, 1e-6
PATHS = {"fast": lambda t: t, "blocks": in_blocks, "generic": generic}


def arranged(called="convolution", n=4):
    net = network(called, n)
    return net.f, (net.params, net.x, LOSSES[0].target(Numbers(1), n))


@pytest.mark.parametrize("chosen", [None, [2, 0, 0, -1]], ids=str)
@pytest.mark.parametrize("over", ["outputs", "samples", "params"])
def test_chunks_and_samples(over, chosen):
    f, args = arranged()
    diagonal = diag_ggn(f, LOSSES[0], samples=chosen)(*args)
    for per_parameter in (True, False):
        t = ggn_trace(f, LOSSES[0], per_parameter=per_parameter, samples=chosen)
        found = chunked(t, 2, over=over)(*args)
        each = tree.map_leaves(torch.sum, diagonal)
        assert_trees_close(found, each if per_parameter else sum(tree.leaves(each)), EXACT)


@pytest.mark.parametrize("called", ["perceptron", "tied", "derived"])
def test_derivatives(called):
    f, (params, x, y) = arranged(called, 3)
    wanted = grad(lambda p: sum(d.sum() for d in tree.leaves(diag_ggn(f, F.cross_entropy)(p, x, y))))(params)
    assert_trees_close(grad(lambda p: ggn_trace(f, F.cross_entropy)(p, x, y))(params), wanted, EXACT, FLOOR)
    several = [tree.map_leaves(lambda p, k=k: p + 0.1 * k, params) for k in range(2)]
    stacked = tree.map_leaves(lambda *leaves: torch.stack(leaves), *several)
    found = vmap(ggn_trace(f, F.cross_entropy), in_dims=(0, None, None))(stacked, x, y)
    assert_trees_close(found, torch.stack([ggn_trace(f, F.cross_entropy)(p, x, y) for p in several]), EXACT)


def test_a_parameter_without_influence_counts_nothing():
    args = {"w": Numbers()(3, 2), "none": torch.ones(2).double()}, Numbers(1)(4, 3), Numbers(2)(4, 2)
    found = ggn_trace(lambda p, x: x @ p["w"], F.mse_loss, per_parameter=True)(*args)
    assert found["none"] == 0 and total(found) != 0
    assert found["w"].shape == ()


def test_says_what_it_is():
    assert repr(ggn_trace(F.linear, F.mse_loss)) == "ggn_trace(linear, mse_loss)"
