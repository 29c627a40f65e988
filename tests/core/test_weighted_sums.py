"""Weighted sums of the per-sample gradients of convolutions, by the convolution's own backward pass and by patches."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import clipped_grad
from tests.crossed import thresholds_at


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
