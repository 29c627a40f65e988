"""Parameters near the outputs have passes of their own, where few hold all columns: the numbers are the same."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import invfunc
from invfunc import functional
from tests.crossed import thresholds_at
from tests.structure.test_columns import STATISTICS, arranged, assert_as_dense
from tests.structures import NETWORKS, always

HESSIANS = {
    "diag_hessian": invfunc.diag_hessian,
    "diag_hessian of each": partial(invfunc.diag_hessian, per_sample=True),
}


class Ladder(nn.Module):
    """Classes of pixels, from what there is at a pixel and from half as many pixels, which may know of each other."""

    def __init__(self, attention=False):
        super().__init__()
        self.enter, self.below = nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(3, 4, 3, padding=1)
        self.join, self.head = nn.Conv2d(7, 3, 3, padding=1), nn.Conv2d(3, 3, 1)
        self.attention = nn.Linear(4, 12) if attention else None

    def forward(self, x):
        x = self.enter(x).relu()
        z = self.below(F.max_pool2d(x, 2)).sigmoid()
        if self.attention is not None:
            q, k, v = self.attention(z.flatten(2).mT).chunk(3, -1)
            z = ((q @ k.mT).softmax(-1) @ v).mT.reshape_as(z)
        return self.head(self.join(torch.cat([x, F.interpolate(z, scale_factor=2.0)], 1)).tanh())


def pixels(attention, n, side):
    torch.manual_seed(n)
    f, params = functional(Ladder(attention).double())
    return f, (params, torch.randn(n, 2, side, side, dtype=torch.float64), torch.randint(3, (n, side, side)))


@pytest.mark.quick
def test_few_passes_reach_them():
    f, args = pixels(False, 2, 16)
    with always():
        told = invfunc.explain(invfunc.diag_ggn(f, F.cross_entropy))(*args)
    passes = {name: part.passes for part in told.parts for name in part.params}
    few, many = passes["params['join.weight']"], passes["params['enter.weight']"]
    assert few == 2 and many >= 32 * few  # two of three classes of a pixel, at all pixels at once


@pytest.mark.parametrize("called", [*STATISTICS, *HESSIANS])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("attention", [False, True], ids=["local", "attention"])
def test_it_is_that_of_all_columns(attention, n, called):
    f, args = pixels(attention, n, 4)
    with thresholds_at(NEAR=1.0, TAKEN=2.0**60):
        assert_as_dense(partial((STATISTICS | HESSIANS)[called], f, F.cross_entropy), args)


@pytest.mark.parametrize("kind", NETWORKS)
@settings(max_examples=3)
@given(data=st.data(), called=st.sampled_from(["diag_ggn", "diag_ggn of each", "diag_hessian", "exact kfac"]))
def test_of_any_network(kind, data, called):
    functions, args = arranged(data, data.draw(NETWORKS[kind]))
    with thresholds_at(NEAR=2.0**-60, TAKEN=2.0**60), always():
        assert_as_dense(partial((STATISTICS | HESSIANS)[called], *functions), args, refusable=True)
