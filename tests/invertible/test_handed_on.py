"""What blocks give out reaches others by functions between them, which hand it on as another object, or change it."""

from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.autograd import Function

from invfunc import Invertible, additive_coupling, invertible_checkpoint
from invfunc.testing import assert_trees_close
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
    weights = [Numbers(k)(N, N) for k in range(3)]
    return [additive_coupling(lambda b, w=w: (b @ w).tanh(), lambda a, w=w: (a @ w).sin()) for w in weights]


def evaluated(steps: list[Any], between: list[list[Any]], x: Any) -> torch.Tensor:
    state = x
    for step, functions in zip(steps, between, strict=True):
        for function in functions:
            state = function.apply(*state)
        state = step(state)
    return state[0].square().sum() + state[1].cos().sum()


@given(st.lists(st.lists(st.sampled_from(BETWEEN), max_size=3), min_size=3, max_size=3))
def test_gradients_are_those_without_blocks(between):
    plain, x = blocks(), tuple(Numbers(k)(N, N).requires_grad_() for k in range(2))
    own = [invertible_checkpoint(pair) for pair in plain]
    for _ in range(2):
        found = torch.autograd.grad(evaluated(own, between, x), x)
        assert_trees_close(found, torch.autograd.grad(evaluated(plain, between, x), x), 1e-9)


def test_what_has_no_graph_passes_through_beside_what_has_one():
    weight, x = Numbers(0)(N, N), Numbers(1)(N, N).requires_grad_()
    masked = Invertible(
        lambda x: (x[0], x[1] + (x[0] @ weight).tanh() * x[2], x[2]),
        lambda y: (y[0], y[1] - (y[0] @ weight).tanh() * y[2], y[2]),
    )
    turned = Invertible(lambda x: (x[1], 2 * x[0], x[2]), lambda y: (y[1] / 2, y[0], y[2]))

    def loss(steps: list[Any]) -> torch.Tensor:
        state = 2 * x, 3 * x, x.detach().sign()  # which nobody holds in the backward pass
        for step in steps:
            state = step(state)
        return state[0].square().sum() + state[1].cos().sum()

    plain = [masked, turned, masked]
    own = [*map(invertible_checkpoint, plain)]
    assert_trees_close(torch.autograd.grad(loss(own), x), torch.autograd.grad(loss(plain), x), 1e-9)
