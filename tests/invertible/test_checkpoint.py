"""Functions of any kind, and many of them: checkpointed they are what they are without."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.autograd import Function
from torch.func import grad, vmap
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from invfunc import (
    Invertible,
    additive_coupling,
    batch_grad,
    batch_l2_grad,
    diag_hessian,
    functional,
    ggnvp,
    hvp,
    invertible_checkpoint,
)
from invfunc.pairs import leapfrog
from invfunc.testing import assert_trees_close
from tests.invertible_cases import assert_same, f, g, gradients, leaves, squares
from tests.strategies import Numbers


class Exp(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(x):
        return x.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.saved_tensors[0]


class TestFunctions:
    def test_that_are_autograd_functions(self, same):
        def forward(x, w):
            return x * Exp.apply(w) + Exp.apply(x.new_ones(3))

        def back(y, w):
            return (y - Exp.apply(y.new_ones(3))) / Exp.apply(w)

        def run(h, x, w):
            inside = vmap(grad(lambda w, x: squares(h(h(x, w), w))), (None, 0))(w.detach(), x.detach())
            return gradients(h(h(x, w), w), x, w), inside

        same(run, forward, invertible_checkpoint(forward, back))

    @pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt, SystemExit])
    @pytest.mark.parametrize("when", [1, 2, 3])
    def test_that_fail_leave_nothing_behind(self, error, when):
        calls = []

        def failing(b, w):
            torch.rand(3)
            calls.append(1)
            if len(calls) == when:
                raise error
            return (b * w).tanh()

        def modes():
            return torch._C._len_torch_function_stack(), torch.is_grad_enabled(), torch.get_rng_state().tolist()

        h, (x, w) = invertible_checkpoint(additive_coupling(failing, failing)), leaves()
        before = modes()[:2]
        with pytest.raises(error):
            y = h((x * 1, x * 2), (w, w))
            drawn = modes()[2]
            gradients(y, w)
        assert modes()[:2] == before and (when < 3 or modes()[2] == drawn)
        assert_same(torch.float64, torch.device("cpu"), lambda h, x, w: gradients(h(x, w), x, w))
        if when == 3:
            found = gradients(y, x, w)  # at the second try
            wanted = additive_coupling(lambda b, w: (b * w).tanh(), lambda b, w: (b * w).tanh())
            for ours, plain in zip(found, gradients(wanted((x, x * 2), (w, w)), x, w), strict=True):
                torch.testing.assert_close(ours, plain)


class TestTraining:
    def test_with_a_step_inside_of_the_backward_pass(self, same):
        """Each parameter is written as soon as its gradient is there."""

        def run(h, x, w):
            ws = [(w * i / 3).detach().requires_grad_() for i in range(4)]

            def step(p):
                with torch.no_grad():
                    p.add_(p.grad, alpha=-1e-3)
                p.grad = None

            for p in ws:
                p.register_post_accumulate_grad_hook(step)
            for _ in range(3):
                y = x.sin()
                for p in ws:
                    y = h(y, p)
                squares(y).backward()
            return [p.detach() for p in ws]

        same(run)

    def test_with_other_modes_of_autocast_in_forward_inside_and_backward(self, same):
        def part(b, p):
            with torch.autocast("cpu", enabled=False):
                t = (b.float() * p.float()).tanh()
            return torch.outer(p, p).matmul(t.T).T.float().sin()

        def run(h, x, w):
            x, w = x.float(), w.float()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = h((x, x * w), (w, w))
            with torch.autocast("cpu", dtype=torch.float16):
                return gradients(y, x, w)

        pair = additive_coupling(part, part)
        same(run, pair, invertible_checkpoint(pair, keep=True), rtol=0.0)
        same(run, pair, invertible_checkpoint(pair), rtol=1e-2)


class TestManyBlocks:
    @pytest.mark.parametrize("inside", [False, True])
    def test_do_not_run_into_the_limit_of_recursion(self, same, inside):
        def run(h, x, w):
            def loss(w, x, first=False):
                y, seen = x.sin(), 0
                for i in range(500):
                    y = h(y, w / 500)
                    seen = y if i == 0 else seen
                return squares(seen if first else y)

            if inside:
                return grad(loss)(w.detach(), x.detach()), grad(partial(loss, first=True))(w.detach(), x.detach())
            return torch.autograd.grad(loss(w, x), (w, x)), torch.autograd.grad(loss(w, x, True), x)

        same(run, f, g)

    def test_walk_deep_for_a_partial_gradient(self, same):
        def run(h, x, w):
            first = h(x.sin(), w)
            y = first * 1
            del first
            last, ws = y, [(w / 1000).clone() for _ in range(500)]
            for v in ws:
                last = h(last, v)
            return torch.autograd.grad(squares(last), (ws[0], x))

        same(run, f, g)


@pytest.mark.parametrize("block", [lambda step: step, invertible_checkpoint])
def test_what_has_no_influence_has_no_gradient(block):
    """The last bias of an energy of which only the gradient matters: an optimiser is to leave it alone."""
    energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    step = block(leapfrog(lambda q: -grad(lambda q: energy(q).sum())(q), 0.1))
    state = Numbers()(6, 4), Numbers(1)(6, 4)
    for _ in range(2):
        state = step(state)
    state[0].square().sum().backward()
    assert energy[2].bias.grad is None
    assert all(p.grad is not None for p in (energy[0].weight, energy[0].bias, energy[2].weight))


# What blocks give out reaches others by functions between them, which hand it on as another object, or change it.

N = 4


class Same(Function):
    """Two tensors as they are, and gradients of twice the size."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> Any:
        return a, b

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        return tuple(2 * g for g in grads)


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


BETWEEN = [Same, Turned, Mirrored]


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


# A block may be a part of what torch.utils.checkpoint evaluates again, in statistics and products of all orders


class Blocks(nn.Module):
    def __init__(self, part: Callable, wrap: Callable, where: str) -> None:
        super().__init__()
        self.f, self.g, self.where = part(), part(), where
        self.block = wrap(additive_coupling(self.f, self.g, split_dim=1))

    def part(self, x: torch.Tensor) -> torch.Tensor:
        return self.block(self.block(x)).sin()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "around":
            return checkpoint(self.part, x, use_reentrant=False)
        if self.where == "alone":
            return checkpoint(self.block, x, use_reentrant=False).sin()
        return self.part(x) if self.where == "twice" else self.block(x).sin()


PARTS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Sequential(nn.Linear(2, 2), nn.Tanh()),
    "a norm": lambda: nn.Sequential(nn.LayerNorm(2), nn.Linear(2, 2), nn.Tanh()),
    "a block": lambda: Blocks(lambda: nn.Sequential(nn.Linear(1, 1), nn.Tanh()), invertible_checkpoint, "once"),
}


def mean(f: Callable, params: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(f(params, x), y)


def penalised(f: Callable) -> Callable:
    def transformed(params: dict, v: Any, x: torch.Tensor, y: torch.Tensor) -> Any:
        params = {name: p.clone().requires_grad_() for name, p in params.items()}
        norms = batch_l2_grad(partial(mean, f))(params, x, y)
        return torch.autograd.grad(torch.stack([*norms.values()]).sum(), list(params.values()))

    return transformed


def without(statistic: Callable) -> Callable:
    return lambda params, v, x, y: statistic(params, x, y)


TRANSFORMS: dict[str, Callable] = {
    "ggnvp": lambda f: ggnvp(f, F.mse_loss),
    "hvp": lambda f: hvp(partial(mean, f)),
    "hvp of blocks": lambda f: (
        lambda p, v, x, y: hvp(f, F.mse_loss, blocks=True)(p, {name: t[None] for name, t in v.items()}, x, y)
    ),
    "diag_hessian": lambda f: without(diag_hessian(f, F.mse_loss)),
    "batch_grad": lambda f: without(batch_grad(partial(mean, f))),
}
CASES = [pytest.param(t, p, id=f"{a}-{b}") for a, t in TRANSFORMS.items() for b, p in PARTS.items()]
CASES += [pytest.param(penalised, PARTS[name], id=f"penalised-{name}") for name in ("linear", "a block")]


@pytest.mark.parametrize("where", ["around", "alone"])
@pytest.mark.parametrize(("transform", "part"), CASES)
def test_equals_the_function(transform, part, where):
    rand = Numbers(2)
    model, plain = (
        Blocks(part, invertible_checkpoint, where).double(),
        Blocks(part, lambda pair: pair, "twice" if where == "around" else "once").double(),
    )
    plain.load_state_dict({name: rand(*t.shape) for name, t in plain.state_dict().items()})
    model.load_state_dict(plain.state_dict())
    x, y = rand(3, 4), rand(3, 4)
    found, wanted = (
        transform(f)(params, {name: p.cos() for name, p in params.items()}, x, y)
        for f, params in map(functional, (model, plain))
    )
    assert_trees_close(found, wanted, 1e-9, 1e-2)
