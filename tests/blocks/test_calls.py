"""Any call of a block gives what its function gives, whichever calls were before it."""

import gc
import math
import weakref

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from invfunc import additive_coupling, invertible_checkpoint
from tests.blocks.cases import (
    CALLS,
    PAIRS,
    W,
    X,
    assert_close,
    block_of,
    leaves,
    slope,
    slope_within,
)
from tests.strategies import Numbers

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


def test_with_other_numbers_and_words_among_the_arguments():
    def f(x, w, often, p, mode="sin"):
        for _ in range(often):
            x = F.dropout(x @ w, p)
        return x.sin() if mode == "sin" else x.cos()

    pair = additive_coupling(f, lambda x, w, *args, **kwargs: x @ w)
    g = invertible_checkpoint(pair)
    for args in [(1, 0.0), (2, 0.0), (True, 0.0), (1, 0), (1, 0.5)] * 2:
        for mode in ("sin", "cos"):
            assert_close(*(slope(lambda x, w, h=h, a=args, m=mode: h(x, w, *a, mode=m)) for h in (g, pair)))


def test_with_other_shapes_dtypes_and_strides():
    g = block_of(PAIRS["additive"])
    for dtype in (torch.float64, torch.float32):
        for n in (4, 2, 1):
            given = [t.to(dtype).clone().requires_grad_() for t in (X[0][:n], X[1][:n], *W)]
            assert_close(slope(g, given), slope(PAIRS["additive"], given))
    turned = leaves([t.T.contiguous().T for t in X])
    assert_close(slope(g, turned), slope(PAIRS["additive"], turned))


def test_a_number_in_y_is_that_of_the_call():
    f = invertible_checkpoint(lambda x: (x * 2, len(x[x > 0])), lambda y: y[0] / 2)

    def loss(x):
        y, n = f(x * 1)
        return y.sum() * n

    for _ in range(CALLS):
        torch.func.grad(loss)(torch.ones(4))
    assert torch.equal(torch.func.grad(loss)(torch.tensor([1.0, -1, -1, -1])), torch.full((4,), 2.0))


def test_a_module_may_set_the_mode_of_another_one():
    """As one whose batch norm is frozen does."""

    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x):
            self.norm.eval()
            return torch.tanh(self.norm(self.linear(x)))

    net = nn.ModuleList([Frozen(), Frozen()]).double()
    block = invertible_checkpoint(additive_coupling(*net))
    for _ in range(CALLS):
        net.train()
        x = (Numbers(2)(2, 4).requires_grad_(), Numbers(3)(2, 4))
        sum(y.square().sum() for y in block(tuple(t * 1 for t in x))).backward()


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
