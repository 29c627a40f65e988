"""Inverses that are found in what a function does: the same as those written by hand, or an error that says why not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.func import grad, jacrev, vmap

from invfunc import additive_coupling, affine_coupling, check_inverse, invert, invertible_checkpoint, tree
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

EXACT = 1e-9


# Drawn structures

SCALES: dict[str, Callable] = {
    "exp": lambda s: s.exp(),
    "sigmoid": lambda s: torch.sigmoid(s + 2),
    "softplus": lambda s: F.softplus(s) + 0.5,
    "2 exp": lambda s: 2 * torch.exp(-s).chunk(1)[0],
}
UPDATES: dict[str, Callable] = {
    "x + F": lambda x, t, s: x + t,
    "F + x": lambda x, t, s: t + x,
    "x + F as x": lambda x, t, s: x + t.flatten().view_as(x),
    "x - F": lambda x, t, s: x - t,
    "F - x": lambda x, t, s: t - x,
    "alpha": lambda x, t, s: torch.add(x, t, alpha=0.5),
    "in place": lambda x, t, s: t.clone().add_(x),
    "-x": lambda x, t, s: -x * 2 + t,
    **{f"x {name} + F": lambda x, t, s, of=of: x * of(s) + t for name, of in SCALES.items()},
    "(x + F) exp": lambda x, t, s: torch.mul(s.exp(), x + t),
    "(x - F) / sigmoid": lambda x, t, s: (x - t) / torch.sigmoid(s),
}


def with_parts(f: Callable, parts: Callable, joined: Callable) -> Callable:
    return lambda x, *args: joined(f(list(parts(x)), *args))


SPLITS: dict[str, Callable] = {
    "tuple": lambda f, p, dim: lambda x, *args: tuple(f(list(x), *args)),
    "dict": lambda f, p, dim: lambda x, *args: dict(zip(x, f(list(x.values()), *args), strict=True)),
    "chunk": lambda f, p, dim: with_parts(f, lambda x: x.chunk(p, dim), lambda y: torch.cat(y, dim)),
    "split": lambda f, p, dim: with_parts(
        f, lambda x: torch.split(x, x.shape[dim] // p, dim), lambda y: torch.cat(y, dim)
    ),
    "tensor_split": lambda f, p, dim: with_parts(
        f, lambda x: x.tensor_split(p, dim), lambda y: torch.concat(y, dim=dim)
    ),
    "narrow": lambda f, p, dim: with_parts(
        f, lambda x: [x.narrow(dim, i * 2, 2) for i in range(p)], lambda y: torch.cat(tensors=y, dim=dim)
    ),
    "slices": lambda f, p, dim: with_parts(
        f,
        lambda x: [x.movedim(dim, -1)[..., 2 * i : 2 * i + 2] for i in range(p)],
        lambda y: torch.cat(y[::-1], -1).movedim(-1, dim),
    ),
    "steps": lambda f, p, dim: with_parts(
        f,
        lambda x: [x.movedim(dim, 0)[i::p] for i in range(p)],
        lambda y: torch.stack(y, 1).flatten(0, 1).movedim(0, dim),
    ),
    "unbind": lambda f, p, dim: with_parts(
        f, lambda x: x.unflatten(dim, (p, -1)).unbind(dim), lambda y: torch.stack(y, dim).flatten(dim, dim + 1)
    ),
}


@dataclass
class Drawn:
    """Parts that are updated one after another, each by what some others say."""

    updates: list[tuple[int, tuple[int, ...], str]]
    drop: bool

    def __call__(self, parts: list[torch.Tensor], weights: list[torch.Tensor]) -> list[torch.Tensor]:
        for (to, of, how), w in zip(self.updates, weights, strict=True):
            read = torch.stack([parts[i] * (i + 1) for i in of]).sum(0)
            h = F.relu(read * w, inplace=True).sin() + read.cos() * w
            h = F.dropout(h, 0.3) if self.drop else h
            parts[to] = UPDATES[how](parts[to], h, (h * 0.5).tanh())
        return parts


@st.composite
def drawn(draw: Any) -> tuple[Callable, Any, list[torch.Tensor]]:
    rand, number = Numbers(), draw(st.integers(2, 4))
    updates = []
    for _ in range(draw(st.integers(1, 5))):
        to = draw(st.integers(0, number - 1))
        of = draw(st.sets(st.sampled_from([i for i in range(number) if i != to]), min_size=1))
        updates.append((to, tuple(sorted(of)), draw(st.sampled_from(sorted(UPDATES)))))
    split, dim = draw(st.sampled_from(sorted(SPLITS))), draw(st.integers(0, 2))
    shape = [3, 3, 3]
    shape[dim] = 2
    whole = list(shape)
    whole[dim] = 2 * number
    f = SPLITS[split](Drawn(updates, draw(st.booleans())), number, dim)
    x: Any = tuple(rand(*shape) for _ in range(number))
    if split == "dict":
        x = {f"p{i}": part for i, part in enumerate(x)}
    elif split != "tuple":
        x = rand(*whole)
    return f, x, [rand(1) for _ in updates]


def total(y: Any) -> torch.Tensor:
    return torch.stack([(t.sin() * t.flatten().cumsum(0).view_as(t)).sum() for t in tree.tensors(y)]).sum()


def slopes(f: Callable, x: Any, *args: Any, depth: int = 2) -> Any:
    """Value and gradients through some blocks, from the same random numbers."""
    torch.manual_seed(0)
    x, args = tree.map_tensors(lambda t: t.detach().clone().requires_grad_(), (x, args))
    y = tree.map_tensors(torch.clone, x)  # which nobody holds
    for _ in range(depth):
        y = f(y, *args)
    loss = total(y)
    own = [p for p in f.parameters() if p.requires_grad] if isinstance(f, nn.Module) else []
    return loss.detach(), torch.autograd.grad(loss, [*tree.tensors((x, args)), *own])


class TestStructures:
    @settings(max_examples=30)
    @given(case=drawn())
    def test_have_the_gradients_of_f_and_the_inverse_gives_x_back(self, case):
        f, x, w = case
        g = invertible_checkpoint(f, check="error")
        assert_trees_close(slopes(g, x, w), slopes(f, x, w), rtol=1e-7)
        assert check_inverse(g, x, w, tolerance=1e-8)

    @settings(max_examples=10)
    @given(case=drawn(), way=st.sampled_from(["grad", "vmap", "vmap of weights", "jacrev"]))
    def test_within_torch_func(self, case, way):
        f, x, w = case

        def slope(f):
            of = grad(lambda x, w: total(f(f(x, w), w)), argnums=(0, 1))
            torch.manual_seed(0)
            if way == "vmap":
                many = tree.map_tensors(lambda t: torch.stack([t, t + 1]), x)
                return vmap(of, (0, None), randomness="different")(many, w)
            if way == "vmap of weights":
                return vmap(of, (None, 0), randomness="same")(x, [torch.stack([t, t + 1]) for t in w])
            return jacrev(lambda w: total(f(x, w)))(w) if way == "jacrev" else of(x, w)

        assert_trees_close(slope(invertible_checkpoint(f)), slope(f), rtol=1e-7)

    @settings(max_examples=10)
    @given(case=drawn())
    def test_the_inverse_alone_is_differentiable(self, case):
        """It takes x to lie in memory as y does, by which dropout draws."""
        f, x, w = case
        assume([t.stride() for t in tree.tensors(f(x, w))] == [t.stride() for t in tree.tensors(x)])
        back = invert(invertible_checkpoint(f).pair)
        torch.manual_seed(0)
        y = f(x, w)

        def there(x):
            torch.manual_seed(0)
            return f(x, w)

        def again(y):
            torch.manual_seed(0)
            return back(y, w)

        torch.manual_seed(0)
        assert_trees_close(back(y, w), x, rtol=1e-8)
        round_trip = grad(lambda x: total(again(there(x))))(x)
        assert_trees_close(round_trip, grad(total)(x), rtol=1e-6)


# Against what is written by hand


def F_(b, w):
    return torch.tanh(b @ w)


def st_(b, w):
    return torch.tanh(b @ w), torch.sin(b @ w)


def additive(x, w):
    a, b = x
    a = a + F_(b, w[0])
    return a, b + F_(a, w[1])


def affine(x, w):
    a, b = x
    s, t = st_(b, w[0])
    a = a * torch.tanh(s).exp() + t
    s, t = st_(a, w[1])
    return a, b * torch.tanh(s).exp() + t


class Squared(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx, *gradients):
        (x,) = ctx.saved_tensors
        return 2 * x * gradients[0]


def test_functions_of_autograd_are_followed_where_their_calls_are_seen():
    """The hooks of the block take what they save, as in a call that the search for an inverse records."""

    def f(x):
        a, b = x.chunk(2, -1)
        return torch.cat([a + Squared.apply(b), b], -1)

    x, found = torch.randn(3, 4, dtype=torch.float64, requires_grad=True), []
    for g in (invertible_checkpoint(f), f):
        found.append(torch.autograd.grad(g(g(x * 1)).sin().sum(), x))
    assert_trees_close(*found, rtol=1e-12)


class TestCouplings:
    HAND = pytest.mark.parametrize(
        "f, pair",
        [(additive, additive_coupling(F_, F_)), (affine, affine_coupling(st_, st_))],
        ids=["additive", "affine"],
    )

    @HAND
    def test_found_and_written_by_hand_are_the_same_inverse_to_the_bit(self, f, pair):
        rand = Numbers()
        x, w = (rand(5, 4), rand(5, 4)), (rand(4, 4), rand(4, 4))
        found, hand = invertible_checkpoint(f), invertible_checkpoint(pair)
        assert_trees_close(slopes(found, x, w, depth=6), slopes(hand, x, w, depth=6), rtol=1e-12)
        y = f(x, w)
        assert_trees_close(invert(found.pair)(y, w), invert(pair)(y, w), rtol=0.0)

    @pytest.mark.parametrize("laid", ["channels_last", "transposed"])
    def test_dropout_draws_the_same_mask_however_x_lies_in_memory(self, laid):
        """It draws in the order of memory, which is another one in y."""

        def transposed(x):
            a = x[0] + F.dropout(x[1], 0.5)
            return a, a.cos() + x[1]

        def halved(x):
            a, b = x.chunk(2, 1)
            return torch.cat([a + F.dropout(b, 0.5), b], 1).contiguous(memory_format=torch.contiguous_format)

        f, x = {
            "transposed": (transposed, (Numbers()(3, 4), Numbers()(4, 3).t())),
            "channels_last": (halved, Numbers()(2, 4, 3, 3).to(memory_format=torch.channels_last)),
        }[laid]
        g = invertible_checkpoint(f)
        torch.manual_seed(0)
        y = g(x)
        torch.manual_seed(0)
        assert_trees_close(invert(g.pair)(y), x, rtol=1e-8)

    def test_what_is_written_in_place_was_read_before(self):
        def f(x):
            a, b, c = x
            h = c.sin()
            before = h + b  # when the inverse knows b, h has been written
            return a + before, b + h.relu_(), c

        x = tuple(torch.randn(5, dtype=torch.float64) for _ in range(3))
        assert_trees_close(slopes(invertible_checkpoint(f, check="error"), x), slopes(f, x), rtol=1e-8)

    def test_other_leaves_of_x_and_other_trees_of_y(self):
        def f(x, by=1.0):
            return {"first": x[0] + by * x[2].sin() * x[1], "second": [x[2]]}

        g = invertible_checkpoint(f, check="error")
        a, b = (torch.randn(3, dtype=torch.float64, requires_grad=True) for _ in range(2))
        y = g((a * 1, 3, b * 1), by=2.0)
        assert_trees_close(invert(g.pair)(y, by=2.0), (a, 3, b), rtol=EXACT)
        y["first"].square().sum().backward()
        assert_trees_close(b.grad, 12 * (a + 6 * b.sin()) * b.cos(), rtol=EXACT)
