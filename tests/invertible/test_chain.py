"""Chains: the loop over their blocks, whatever the blocks are, backwards as well, with anchors and log-determinants."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad

from invfunc import (
    Invertible,
    additive_coupling,
    affine_coupling,
    chain,
    invert,
    invertible_checkpoint,
    layers,
    repeated,
    tree,
    with_log_det,
)
from invfunc.errors import ArgumentError, ArgumentTypeError, InverseError
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests.laws import FLOOR
from tests.layers.test_invertible_layers import conditioned, there
from tests.pairs.test_couplings import RTOL, dense_log_det, summed, volume
from tests.strategies import Numbers

N, WIDTH = 3, 4


class Block(NamedTuple):
    """A block of a chain, its parameters, and the plain function that it is."""

    block: Callable
    params: Any
    plain: Callable


def mixed(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x @ w)


def scaled(x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.sin(x @ w), torch.cos(x @ w)


def added(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    a = a + mixed(b, w[0])
    return torch.cat([a, b + mixed(a, w[1])], -1)


def looped(x: torch.Tensor, stacked: torch.Tensor) -> torch.Tensor:
    for w in stacked.unbind():
        x = added(x, w)
    return x


def stretched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return x * (w[0, 0] / 2).exp()


def shrunk(y: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return y * (-w[0, 0] / 2).exp()


ADDITIVE, AFFINE = additive_coupling(mixed, mixed, split_dim=-1), affine_coupling(scaled, scaled, split_dim=-1)
KINDS: dict[str, Callable[[Numbers], Block]] = {
    "additive": lambda rand: Block(ADDITIVE, (rand(2, 2), rand(2, 2)), added),
    "affine": lambda rand: Block(AFFINE, (rand(2, 2), rand(2, 2)), lambda x, w: AFFINE(x, w)),
    "linear": lambda rand: Block(layers.linear(), conditioned(rand, WIDTH, WIDTH), lambda x, w: x @ w.T),
    "leaky_relu": lambda rand: Block(layers.leaky_relu(0.5), None, lambda x: torch.where(x < 0, x / 2, x)),
    "two functions": lambda rand: Block(invertible_checkpoint(stretched, shrunk), rand(1, 1), stretched),
    "kept": lambda rand: Block(invertible_checkpoint(stretched, shrunk, keep=True, check=True), rand(1, 1), stretched),
}
HIDING: dict[str, Callable[[Numbers], Block]] = {
    "hidden": lambda rand: Block(layers.batch_norm(), None, lambda x: F.batch_norm(x, None, None, training=True))
}
NO_WAY_BACK: dict[str, Callable[[Numbers], Block]] = {
    "plain": lambda rand: Block(mixed, rand(WIDTH, WIDTH), mixed),
    "plain alone": lambda rand: Block(torch.sin, None, torch.sin),
    **HIDING,
}


@st.composite
def blocks(draw, kinds: dict[str, Callable], depth: int = 1, most: int = 5) -> Block:
    """A chain, in which chains may be blocks."""
    rand, names = Numbers(draw(st.integers(0, 9))), list(kinds) + ["chain"] * 2 * (depth > 0)
    drawn = draw(st.lists(st.sampled_from(names), max_size=most))
    parts = [draw(blocks(kinds, depth - 1, 3)) if name == "chain" else kinds[name](rand) for name in drawn]

    def plain(x, params):
        for part, p in zip(parts, params, strict=True):
            x = part.plain(x) if p is None else part.plain(x, p)
        return x

    every = draw(st.sampled_from([None, 1, 2, 3]))
    sequence = draw(st.sampled_from([list, tuple]))(part.params for part in parts)
    return Block(chain(*(part.block for part in parts), anchor_every=every), sequence, plain)


few = settings(max_examples=8)


def gradients(f: Callable, x: torch.Tensor, params: Any, plainly: bool = False) -> list[torch.Tensor]:
    """Gradients of `summed(f)` in x and in the tensors among its parameters."""
    tensors, form = tree.separate((x, params))

    def of_tensors(tensors):
        return summed(f)(*form.join(tensors))

    if not plainly:
        return list(grad(of_tensors)(tensors))
    leaves = [t.clone().requires_grad_() for t in tensors]
    return list(torch.autograd.grad(of_tensors(leaves), leaves))


@pytest.mark.quick
class TestChain:
    @few
    @given(data=st.data())
    def test_has_the_gradients_of_the_loop(self, device, dtype, data):
        case = data.draw(blocks(KINDS | NO_WAY_BACK))
        x, params = moved((Numbers(1)(N, WIDTH), case.params), dtype, device)
        wanted = gradients(case.plain, x, params)
        for g in (case.block, invertible_checkpoint(case.block)):
            for plainly in (False, True):
                assert_trees_close(gradients(g, x, params, plainly), wanted, 10 * RTOL[dtype], FLOOR)

    @few
    @given(data=st.data())
    def test_has_an_inverse_of_y_and_what_its_blocks_hide(self, device, dtype, data):
        case = data.draw(blocks(KINDS | HIDING))
        x, params = moved((Numbers(1)(N, WIDTH), case.params), dtype, device)
        y, hidden = there(case.block, x, (params,))
        assert_trees_close(y, case.plain(x, params), RTOL[dtype], FLOOR)
        assert_trees_close(case.block.inverse(y, *hidden, params), x, 100 * RTOL[dtype])

    def test_checks_its_blocks(self):
        wrong = Invertible(lambda x, p: x * p, lambda y, p: y / p + 1)
        for net, params in ((chain(wrong), [2.0]), (repeated(wrong), [2.0]), (chain(chain(wrong)), [[2.0]])):
            with pytest.raises(InverseError, match="check="):
                invertible_checkpoint(net, check=True)(torch.ones(3, requires_grad=True), params)


class TestRepeated:
    @pytest.mark.parametrize("form", ["list", "stacked", "dict", "tuple"])
    @pytest.mark.parametrize("depth", [1, 4])
    @pytest.mark.parametrize("every", [None, 2])
    def test_is_the_loop_over_its_parameters(self, device, dtype, form, depth, every):
        rand = Numbers()
        x, w = moved((rand(N, WIDTH), rand(depth, 2, 2, 2)), dtype, device)

        give = {
            "list": lambda w: list(w.unbind()),
            "stacked": lambda w: w,
            "dict": lambda w: {"w": w, "note": "constant"},
            "tuple": lambda w: (w, None),
        }[form]

        def taken(p):
            return p["w"] if isinstance(p, dict) else p[0] if isinstance(p, tuple) else p

        pair = Invertible(lambda x, p: added(x, taken(p)), lambda y, p: invert(ADDITIVE)(y, tuple(taken(p))))
        net = repeated(pair, anchor_every=every)
        wanted = looped(x, w)
        assert_trees_close(net(x, give(w)), wanted, RTOL[dtype])
        assert_trees_close(invert(net)(wanted, give(w)), x, 10 * RTOL[dtype])
        slopes = gradients(lambda x, w: net(x, give(w)), x, w)
        assert_trees_close(slopes, gradients(looped, x, w), 10 * RTOL[dtype], FLOOR)

    def test_of_nothing_is_the_identity_and_of_none_without_parameters(self):
        x = Numbers()(3, 2)
        assert repeated(ADDITIVE)(x, []) is x and chain()(x, []) is x and invert(chain())(x, ()) is x
        assert_trees_close(repeated(layers.leaky_relu(0.5))(x, [None] * 2), torch.where(x < 0, x / 4, x), 1e-12)


EPS = 1e-3
OFF = invertible_checkpoint(Invertible(lambda x, c: x * c, lambda y, c: y / c * (1 + EPS), name="off"), check="off")
"""Its gradient in c tells how many inverses x went through."""


class TestAnchors:
    @pytest.mark.parametrize("functional", [True, False])
    @pytest.mark.parametrize("form", ["chain", "repeated", "stacked", "chains", "repeated chains"])
    @given(depth=st.integers(1, 8), every=st.sampled_from([None, 1, 2, 3, 5, 9]))
    @settings(max_examples=8)
    def test_bound_the_number_of_inverses(self, form, functional, depth, every):
        scales = [torch.full((), 1 + i / 8).double() for i in range(depth)]
        net, params = {
            "chain": (chain(*[OFF] * depth, anchor_every=every), lambda c: c),
            "repeated": (repeated(OFF, anchor_every=every), lambda c: c),
            "stacked": (repeated(OFF, anchor_every=every), torch.stack),
            "chains": (chain(*[chain(OFF)] * depth, anchor_every=every), lambda c: [[s] for s in c]),
            "repeated chains": (repeated(chain(OFF), anchor_every=every), lambda c: [[s] for s in c]),
        }[form]
        x = torch.ones(2).double()

        def loss(scales, x=x):
            return net(x, params(scales)).sum()

        if functional:
            found = grad(loss, (0, 1))(scales, x)[0]
        else:
            found = torch.autograd.grad(loss([s.requires_grad_() for s in scales]), scales)
        held = [i for i in range(depth + 1) if i in (0, depth) or (every is not None and i % every == 0)]
        passed = [min(h for h in held if h >= i) - i for i in range(depth)]
        product = 2 * torch.stack(scales).detach().prod()
        wanted = [product / s.detach() * (1 + EPS) ** n for s, n in zip(scales, passed, strict=True)]
        assert_trees_close(list(found), wanted, 1e-12)


class TestLogDeterminants:
    @pytest.mark.parametrize("nested", [False, True])
    @few
    @given(names=st.lists(st.sampled_from(["additive", "affine", "linear", "leaky_relu"]), max_size=4))
    def test_of_a_chain_add_up(self, device, dtype, nested, names):
        rand = Numbers()
        parts = [KINDS[name](rand) for name in names]
        x, params = moved((rand(N, WIDTH), [part.params for part in parts]), dtype, device)
        net = chain(*(part.block for part in parts))
        if nested:
            net, params = chain(net, chain()), [params, []]
        flow = with_log_det(net)
        y, s = flow((x, x.new_ones(N)), params)
        assert_trees_close(y, net(x, params), RTOL[dtype])
        assert_trees_close(s - 1, dense_log_det(lambda x: net(x, params), x), 10 * RTOL[dtype], FLOOR)
        total, state = x.new_zeros(N), x
        for part, p in zip(parts, params[0] if nested else params, strict=True):
            given = () if p is None else (p,)
            total, state = total + volume(part.block, state, *given), part.block(state, *given)
        assert_trees_close(s - 1, total, 10 * RTOL[dtype], FLOOR)
        assert_trees_close(invert(flow)((y, s), params), (x, x.new_ones(N)), 100 * RTOL[dtype])


X, W = torch.ones(2, WIDTH), torch.ones(2, 2)


class TestErrors:
    @pytest.mark.parametrize("make", [chain, repeated])
    def test_of_what_is_no_block(self, make):
        with pytest.raises(ArgumentTypeError, match=f"^{make.__name__}.* is of type int, but has to be a function"):
            make(3)

    @pytest.mark.parametrize("name", NO_WAY_BACK)
    def test_of_no_way_back(self, name):
        block = NO_WAY_BACK[name](Numbers())
        error, told = (ArgumentError, "needs hidden values") if name == "hidden" else (InverseError, "has no inverse")
        for net, params in ((chain(AFFINE, block.block), [(W, W)]), (repeated(block.block), [])):
            with pytest.raises(error, match=told):
                invert(net)(X, [*params, block.params])
