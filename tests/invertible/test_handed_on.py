"""What blocks give out reaches others by functions between them, which hand it on as another object, or change it."""

from typing import Any

import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.autograd import Function

from invfunc import Invertible, additive_coupling, invertible_checkpoint
from invfunc.testing import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.strategies import Numbers

N = 4


class Same(Function):
    """Two tensors as they are, and gradients of twice the size."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return a, b

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(2 * g for g in grads)


class Swapped(Same):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return b, a


class Doubled(Same):
    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return 2 * a, b


class Turned(Same):
    """In the same memory, in another order."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return a.t(), b


class Mirrored(Same):
    """Other values, in memory that is laid out alike."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return a.clone(), b.flip(0)


BETWEEN = [Same, Swapped, Doubled, Turned, Mirrored]


def blocks() -> list[Any]:
    """Three that differ, and are not watched from some call on."""
    weights = [Numbers(k)(N, N) for k in range(3)]
    return [additive_coupling(lambda b, w=w: (b @ w).tanh(), lambda a, w=w: (a @ w).sin()) for w in weights]


def evaluated(steps: list[Any], between: list[list[Any]], x: Any) -> torch.Tensor:
    state = x
    for step, functions in zip(steps, between, strict=True):
        for function in functions:
            state = function.apply(*state)
        state = step(state)
    return state[0].square().sum() + state[1].cos().sum()


@example([[Turned]] * 3, 1)
@example([[Same]] * 3, 6)
@given(st.lists(st.lists(st.sampled_from(BETWEEN), max_size=3), min_size=3, max_size=3), st.integers(1, 6))
def test_gradients_are_those_without_blocks(between, calls):
    plain = blocks()
    own = [invertible_checkpoint(pair) for pair in plain]
    for call in range(calls):
        x = tuple(Numbers(call + k)(N, N).requires_grad_() for k in range(2))
        found = torch.autograd.grad(evaluated(own, between, x), x)
        assert_trees_close(found, torch.autograd.grad(evaluated(plain, between, x), x), 1e-9)


def test_what_has_no_graph_passes_through_beside_what_has_one():
    weight = Numbers(0)(N, N)
    masked = Invertible(
        lambda x: (x[0], x[1] + (x[0] @ weight).tanh() * x[2], x[2]),
        lambda y: (y[0], y[1] - (y[0] @ weight).tanh() * y[2], y[2]),
    )
    turned = Invertible(lambda x: (x[1], 2 * x[0], x[2]), lambda y: (y[1] / 2, y[0], y[2]))

    def loss(steps: list[Any], x: torch.Tensor) -> torch.Tensor:
        state = 2 * x, 3 * x, x.detach().sign()  # which nobody holds in the backward pass
        for step in steps:
            state = step(state)
        return state[0].square().sum() + state[1].cos().sum()

    plain = [masked, turned, masked]
    own = [*map(invertible_checkpoint, plain)]
    for call in range(6):
        x = Numbers(call + 1)(N, N).requires_grad_()
        assert_trees_close(torch.autograd.grad(loss(own, x), x), torch.autograd.grad(loss(plain, x), x), 1e-9)


def kept(between: Any, depth: int) -> float:
    """The memory that a forward pass leaves behind, in states."""
    own = [invertible_checkpoint(pair) for _ in range(depth // 2) for pair in blocks()[:2]]
    x = tuple(Numbers(k)(4096, N).requires_grad_() for k in range(2))
    with nothing_collected(), Meter() as meter:
        state = x
        for step in own:
            state = step(between.apply(*state))
        return meter.live() / (2 * x[0].nbytes)


class TestMemory:
    def test_what_is_handed_on_is_not_kept(self):
        assert kept(Same, 8) < kept(Same, 2) + 0.5

    def test_what_is_another_value_is(self):
        assert kept(Mirrored, 8) > kept(Mirrored, 2) + 2
