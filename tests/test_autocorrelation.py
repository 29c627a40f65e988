"""The Gram matrix of patches through displacements is the one of the patches."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad

from invfunc.jacobian.rules import autocorrelation
from invfunc.jacobian.rules.autocorrelation import patches_gram
from invfunc.jacobian.rules.patches import patches
from tests.strategies import Numbers

COSTS = ["as it is", "displacements everywhere", "patches of the slices"]
LARGE = (8, 32, 16, 16), (3, 3), [(1, 1)] * 2, (1, 1)


def gram(x, kernel, pads, dilation):
    read = patches(x, kernel, (1,) * len(kernel), pads, dilation)
    return torch.einsum("bip,bjp->ij", read, read)


@st.composite
def problems(draw):
    """Shapes and options with at least one position; paddings crop, are uneven, or go beyond the kernel's reach."""
    d = draw(st.integers(1, 3))
    kernel = tuple(draw(st.integers(1, 4 if d < 3 else 3)) for _ in range(d))
    dilation = tuple(draw(st.integers(1, 3)) for _ in range(d))
    pads = [(draw(st.integers(-2, 5)), draw(st.integers(-2, 5))) for _ in range(d)]
    least = [max(1, 1 - min(a, 0) - min(b, 0), (k - 1) * s + 1 - a - b) for k, s, (a, b) in zip(kernel, dilation, pads)]
    spatial = [size + draw(st.integers(0, 5)) for size in least]
    return (draw(st.integers(1, 3)), draw(st.integers(1, 3)), *spatial), kernel, pads, dilation


@pytest.mark.parametrize("how", COSTS)
@settings(max_examples=60)
@given(problem=problems(), positions=st.sampled_from([4096, 20, 3]))
def test_equals_the_patches(how, problem, positions):
    shape, *options = problem
    x = Numbers()(*shape)
    kernels = []

    def cost(shape, kernel, pads, dilation):
        kernels.append(kernel)
        outermost = len(kernel) == len(shape) - 2 == x.ndim - 2
        return 0.0, len(kernel) > 0 and (how == COSTS[1] or outermost)

    with patch.object(autocorrelation, "_EXACT", positions):
        if how == COSTS[0]:
            found = patches_gram(x, *options)
        else:
            with patch.object(autocorrelation, "_cost", cost):
                found = patches_gram(x, *options)
            assert found is not None and kernels
    wanted = gram(x, *options)
    if found is not None:
        torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12 * max(1.0, wanted.abs().max().item()))
