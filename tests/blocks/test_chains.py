"""A chain is its blocks one by one, whatever is odd in one of them."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import chain, invertible_checkpoint, repeated
from tests.blocks.cases import PAIRS, X, assert_close, block_of, forward_of, total
from tests.strategies import Numbers

DEPTH = 5


def weights(number: int = DEPTH) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in 0.5 * Numbers(7)(2 * number, 3, 3)]


def pairs_of(ws: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    return [*zip(ws[::2], ws[1::2], strict=True)]


def one_by_one(functions: list[Callable]) -> Callable:
    """The loop that a chain stands for."""

    def run(x: Any, params: Any) -> Any:
        for f, p in zip(functions, params, strict=True):
            x = f(x, p)
        return x

    return run


def start() -> tuple[torch.Tensor, ...]:
    """An x that needs a gradient, and is nobody's."""
    a, b = (t.detach().clone().requires_grad_() * 1 for t in X)
    return a, b


def slope(run: Callable, ws: list[torch.Tensor]) -> Any:
    torch.manual_seed(3)
    x = [t.detach().clone().requires_grad_() for t in X]
    y = run((x[0] * 1, x[1] * 1), pairs_of(ws))
    return torch.autograd.grad(total(y), [t for t in (*x, *ws) if t.requires_grad], allow_unused=True)


@settings(max_examples=8)
@given(st.lists(st.sampled_from([*PAIRS]), min_size=1, max_size=6), st.data())
def test_is_its_blocks_one_by_one(names, data):
    """Of any kinds in any order, one with an input that is kept, some of whose parameters are frozen or tied."""
    kept = data.draw(st.sets(st.integers(0, len(names) - 1), max_size=1))
    blocks = [block_of(PAIRS[name], keep=i in kept) for i, name in enumerate(names)]
    ws = weights(len(names))
    for i in data.draw(st.sets(st.integers(0, len(ws) - 1), max_size=2)):
        ws[i].requires_grad_(False)
    if data.draw(st.booleans()):
        ws[1] = ws[0]
    whole, wanted = chain(*blocks), slope(one_by_one([forward_of(PAIRS[name]) for name in names]), ws)
    for run in (whole, whole, one_by_one(blocks)):
        assert_close(*[[t for t in found if t is not None] for found in (slope(run, ws), wanted)])


class TestSeries:
    whole = repeated(block_of(PAIRS["additive"]))
    plain = staticmethod(lambda x, params: one_by_one([forward_of(PAIRS["additive"])] * len(params))(x, params))

    @pytest.mark.parametrize("at", [0, 3, 2 * DEPTH - 1])
    def test_of_one_weight(self, at):
        """Those behind it are inverted and no more."""
        ws = weights()
        found = [torch.autograd.grad(total(run(start(), pairs_of(ws))), ws[at]) for run in (self.whole, self.plain)]
        assert_close(*found)

    def test_beside_what_others_hold(self):
        """Its x and its y, which others read and other blocks take over."""
        other, ws, found = block_of(PAIRS["affine"]), weights(), []
        for run, f in ((self.whole, other), (self.plain, PAIRS["affine"])):
            given = [t.detach().clone().requires_grad_() for t in X]
            x = f((given[0].exp(), given[1] * 1), pairs_of(ws)[0])
            y = run(x, pairs_of(ws))
            z = run(f((x[0] + y[0], y[1]), pairs_of(ws)[1]), pairs_of(ws))
            found.append(torch.autograd.grad(total([t for pair in (x, y, z) for t in pair]), [*given, *ws]))
        assert_close(*found)


def test_states_that_pass_through_blocks_are_let_go_of():
    """Where each block hands one of its tensors on."""

    def first(x, p):
        return x[0], x[1] + torch.tanh(x[0] @ p)

    def first_back(y, p):
        return y[0], y[1] - torch.tanh(y[0] @ p)

    def second(x, p):
        return x[0] + torch.tanh(x[1] @ p), x[1]

    def second_back(y, p):
        return y[0] - torch.tanh(y[1] @ p), y[1]

    pairs, held = ((first, first_back), (second, second_back)), []
    blocks = [invertible_checkpoint(*pair, check="off") for pair in pairs]
    for depth in 2, 6:
        net, ps = chain(*blocks * depth), [torch.zeros(3, 3, requires_grad=True) for _ in range(2 * depth)]
        for _ in range(5):
            y = net(tuple(torch.randn(77, 3, requires_grad=True) * 1 for _ in range(2)), ps)
            states = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.shape == (77, 3)]
            count = len({t.untyped_storage().data_ptr() for t in states})
            del states
            total(y).backward()
            del y
        held.append(count)
    assert held[0] == held[1]
