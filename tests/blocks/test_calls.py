"""Any call of a block gives what its function gives, whichever calls were before it."""

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import additive_coupling, invertible_checkpoint
from tests.blocks.cases import (
    CALLS,
    assert_close,
    block_of,
    slope,
    slope_within,
)

SHIFT = torch.ones(3)
FUNCTIONS = {
    "scale": lambda x, w: x @ w * math.pi,
    "linear": F.linear,
    "norm": lambda x, w: F.layer_norm(x, (3,)) + 0 * w.sum(),
    "relu": lambda x, w: F.relu(x) + F.gelu(x @ w),
    "noise": lambda x, w: F.dropout(x @ w, 0.3),
    "sign": lambda x, w: x @ w if float(x.detach().sum()) > 0 else w.mean() - x,
    "closure": lambda x, w: x @ w * SHIFT,
    "write": lambda x, w: (x @ w).tanh_(),
}


@given(st.lists(st.sampled_from(sorted(FUNCTIONS)), min_size=2, max_size=2), st.data())
def test_gives_what_the_function_gives(names, data):
    pair = additive_coupling(*(FUNCTIONS[name] for name in names))
    kinds = (pair, (lambda x, p: pair(x, p), lambda y, p: pair.inverse(*pair.shared, y, p)))
    g = block_of(data.draw(st.sampled_from(kinds)))
    for way in data.draw(st.lists(st.sampled_from([slope, slope_within]), min_size=2, max_size=6)):
        assert_close(way(g), way(pair))


@pytest.mark.parametrize("inverse", [True, False], ids=["given", "found"])
def test_functions_are_not_kept_alive(inverse):
    held = []

    def once():
        shift = torch.ones(3, requires_grad=True)
        held.append(weakref.ref(shift))
        functions = (lambda x: (x[0] + shift, x[1])), (lambda y: (y[0] - shift, y[1]))
        f = invertible_checkpoint(*functions[: 1 + inverse])
        for _ in range(CALLS):
            torch.stack(f((torch.ones(3) * 1, torch.ones(3) * 2))).sum().backward()

    once()
    gc.collect()
    assert held[0]() is None


def test_tensors_of_inference_mode_are_taken():
    f = invertible_checkpoint(lambda x, w: x + w, lambda y, w: y - w)
    with torch.inference_mode():
        w = torch.ones(3)
    x = torch.ones(3, requires_grad=True)
    f(x * 1, w).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))
