"""Weighted sums of the per-sample gradients of convolutions, by the convolution's own backward pass and by patches."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad, jvp

from invfunc import batch_grad, batch_l2_grad, clipped_grad, sum_grad_squared, variance
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


def of_samples(losses, w, x):
    """The per-sample gradients, and what statistics make of them, by a loop."""
    each = torch.stack([grad(lambda w, k=k: losses(w, x[k : k + 1]).sum())(w) for k in range(len(x))])
    return [each, each.square().sum(0), each.var(0, correction=0), each.flatten(1).square().sum(1)]


def found_of_samples(losses, w, x):
    return [t(losses)(w, x) for t in (batch_grad, sum_grad_squared, variance, batch_l2_grad)]


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@given(problem=convolutions(), alone=st.sampled_from([0, 2**60]))
def test_shares_by_themselves_are_those_of_the_loop(problem, alone):
    with thresholds_at(TOTAL_POSITIONS=0, ALONE=alone):
        found = found_of_samples(*problem)
    assert_trees_close(found, of_samples(*problem), 1e-10)


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel")
@given(problem=convolutions(), tile=st.sampled_from([1, 7, 2**60]), cache=st.sampled_from([16, 2**24]))
def test_large_shares_by_some_rows_are_those_of_the_loop(problem, tile, cache):
    with thresholds_at(TOTAL_POSITIONS=2**40, CACHE={"cpu": cache}):
        found = found_of_samples(*problem)
    assert_trees_close(found, of_samples(*problem), 1e-10)


def example():
    rand = Numbers(3)
    return lambda w, x: F.conv2d(x, w, padding=1).sin().flatten(1).sum(1), rand(2, 1, 3, 3), rand(3, 1, 4, 5)


@pytest.mark.parametrize("side", [0, 2**40])
def test_have_the_derivatives_of_the_loop(side):
    losses, w, x = example()

    def total(sums):
        return lambda w: (sums(w)[0] * w).sum()

    pairs = [
        (total(lambda w: clipped_grad(losses, 2.0)(w, x)), total(lambda w: looped(losses, w, x, 2.0))),
        (lambda w: sum(z.sin().sum() for z in found_of_samples(losses, w, x)),)
        + (lambda w: sum(z.sin().sum() for z in of_samples(losses, w, x)),),
    ]
    with thresholds_at(TOTAL_POSITIONS=side, ALONE=side):
        for ours, theirs in pairs:
            assert_trees_close(grad(ours)(w), grad(theirs)(w), 1e-9)
            assert_trees_close(jvp(ours, (w,), (w.cos(),)), jvp(theirs, (w,), (w.cos(),)), 1e-9)


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
