"""The Gram matrix of patches through displacements is the one of the patches."""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd import forward_ad

from invfunc.linear_algebra.contract import patches_gram
from tests.strategies import Numbers

LARGE: Any = (8, 32, 16, 16), (3, 3), [(1, 1)] * 2, (1, 1)


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
