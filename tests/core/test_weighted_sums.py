"""Weighted sums of the per-sample gradients of convolutions, by the convolution's own backward pass and by patches."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad

from invfunc import clipped_grad
from invfunc.testing import assert_trees_close
from tests.crossed import thresholds_at
from tests.strategies import Numbers

CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
SIDES = st.sampled_from([0, 2**40])


@st.composite
def convolutions(draw):
    """The losses of a convolution with any options, its weight, and samples, which may have no batch dimension."""
    d, groups, n = draw(st.integers(1, 3)), draw(st.integers(1, 2)), draw(st.integers(1, 4))
    sizes = st.integers(1, 3)
    kernel, stride, dilation = ([draw(sizes) for _ in range(d)] for _ in range(3))
    padding = draw(st.sampled_from([0, 1, "valid", "same"]))
    stride = [1] * d if padding == "same" else stride
    rand, extent = Numbers(draw(st.integers(0, 9))), [7 + k for k in range(d)]
    w, x = rand(2 * groups, draw(sizes), *kernel), rand(n, 1, *extent)
    x = x.expand(n, groups * w.shape[1], *extent) * rand(1, groups * w.shape[1], *[1] * d)

    def losses(w, x):
        z = CONVOLUTIONS[d](x, w, None, stride, padding, dilation, groups)
        return z.sin().flatten(1).sum(1)

    return losses, w, x


def looped(losses, w, x, most):
    found, norms = torch.zeros_like(w), []
    for k in range(len(x)):
        g = grad(lambda w, k=k: losses(w, x[k : k + 1]).sum())(w)
        norms.append(g.norm())
        found = found + g * (most / norms[-1]).clamp(max=1)
    return found, torch.stack(norms)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@given(problem=convolutions(), most=st.sampled_from([0.3, 3.0, 1e3]), side=SIDES)
def test_are_those_of_the_loop(problem, most, side):
    losses, w, x = problem
    with thresholds_at(TOTAL_POSITIONS=side):
        found = clipped_grad(losses, most)(w, x)
    assert_trees_close(found, looped(losses, w, x, most), 1e-10)


@pytest.mark.parametrize("side", [0, 2**40])
def test_of_half_precision_are_added_up_in_single(side):
    """One addend of 2048 and many of 1: float16 would lose each of these."""

    def losses(w, x):
        return F.conv1d(x, w).flatten(1).sum(1)

    x = torch.ones(1, 1, 1000).half()
    x[..., 0] = 2048
    with thresholds_at(TOTAL_POSITIONS=side):
        found = clipped_grad(losses, 1e5)(torch.ones(1, 1, 1).half(), x)[0]
    assert found.item() == 3048
