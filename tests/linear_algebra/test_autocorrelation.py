"""The Gram matrix of patches through displacements is the one of the patches."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from invfunc.linear_algebra import contract
from invfunc.linear_algebra.contract import patches_gram, unfolded
from tests.crossed import thresholds_at
from tests.strategies import Numbers

LARGE: Any = (8, 32, 16, 16), (3, 3), [(1, 1)] * 2, (1, 1)


def gram(x, kernel, pads, dilation):
    read = unfolded(x, kernel, (1,) * len(kernel), pads, dilation)
    return torch.einsum("bip,bjp->ij", read, read)


@st.composite
def problems(draw):
    """Shapes and options with at least one position; paddings crop, are uneven, or go beyond the kernel's reach."""
    d = draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 4 if d < 3 else 3)) for _ in range(d))
    dilation = tuple(draw(st.integers(1, 3)) for _ in range(d))
    pads = [(draw(st.integers(-2, 5)), draw(st.integers(-2, 5))) for _ in range(d)]
    spatial = []
    for k, step, (a, b) in zip(kernel, dilation, pads, strict=True):
        least = max(1, 1 - min(a, 0) - min(b, 0), (k - 1) * step + 1 - a - b)
        spatial.append(least + draw(st.integers(0, 5)))
    return (draw(st.integers(1, 3)), draw(st.integers(1, 3)), *spatial), kernel, pads, dilation


def forced(everywhere):
    """A cost model that takes displacements, for the whole problem alone or also for what is left out."""

    def cost(shape, kernel, pads, dilation):
        outermost = cost.__dict__.setdefault("outermost", len(kernel))
        return 0.0, len(kernel) > 0 and (everywhere or len(kernel) == outermost)

    return cost


@pytest.mark.parametrize(
    "everywhere",
    [pytest.param(True, marks=pytest.mark.quick), False],
    ids=["displacements everywhere", "patches of the slices"],
)
@settings(max_examples=60)
@given(problem=problems(), positions=st.sampled_from([4096, 20, 3]))
def test_equals_the_patches(everywhere, problem, positions):
    shape, *options = problem
    x = Numbers()(*shape)
    with thresholds_at(EXACT=positions), patch.object(contract, "_cost", forced(everywhere)):
        found = patches_gram(x, *options)
    wanted = gram(x, *options)
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12 * max(1.0, wanted.abs().max().item()))


@pytest.mark.parametrize("pads", [[(1, 1), (1, 1)], [(2, 0), (1, -3)]], ids=str)
@pytest.mark.parametrize("of", [torch.float32, torch.float64], ids=str)
def test_pays_for_a_large_layer(pads, of):
    shape, kernel, _, dilation = LARGE
    x = Numbers()(*shape)
    found, wanted = patches_gram(x.to(of), kernel, pads, dilation), gram(x, kernel, pads, dilation)
    assert found is not None and found.dtype == of
    bound = 1e-12 if of == torch.float64 else 1e-5
    torch.testing.assert_close(found.double(), wanted, rtol=0, atol=bound * wanted.abs().max().item())


def test_leaves_to_the_patches_what_is_differentiated():
    shape, *options = LARGE
    x = Numbers()(*shape)
    seen = []

    def look(x):
        seen.append(patches_gram(x, *options))
        return x.sum()

    look(x.clone().requires_grad_())
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x[None])
    with forward_ad.dual_level():
        look(forward_ad.make_dual(x, x))
    assert seen == [None] * 4 and patches_gram(x, *options) is not None
