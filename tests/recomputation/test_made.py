"""Layers that a part of a block makes itself: for one call, or in its first one for all."""

import copy

import pytest
import torch
from torch import nn
from torch.func import functional_call, grad, vmap

from invfunc import additive_coupling, invertible_checkpoint
from invfunc.errors import ClosedOverError, ReplayError
from invfunc.testing import assert_trees_close

MADE = {
    "linear": lambda b, w: nn.Linear(3, 3)(b @ w).tanh(),
    "several": lambda b, w: nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3), nn.Tanh(), nn.Linear(3, 3))(b) @ w,
    "batch norm": lambda b, w: nn.BatchNorm1d(3)(b @ w),
    "a table": lambda b, w: nn.Embedding(5, 3)(torch.arange(len(b)) % 5) * (b @ w),
    "a parameter": lambda b, w: nn.Parameter(0.1 * torch.randn(3)) * (b @ w),
    "called with another weight": lambda b, w: functional_call(nn.Linear(3, 3), {"weight": w}, b),
    "given another weight": lambda b, w: given(nn.Linear(3, 3), w)(b).sin(),
    "written": lambda b, w: written(nn.Linear(3, 3))(b @ w),
    "beside a closed-over one": lambda b, w: nn.Linear(3, 3)(LAYER(b)) @ w,
}
LAYER = nn.Linear(3, 3)


def given(layer, w):
    del layer.weight
    layer.weight = w
    return layer


def written(layer):
    layer.weight.data.copy_(torch.eye(3))
    return layer


class InAnAttribute(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = None

    def forward(self, b):
        if self.layer is None:
            self.layer = nn.Linear(3, 3)
        return self.layer(b).tanh()


class InADict(InAnAttribute):
    def __init__(self):
        super().__init__()
        self.layers = {}

    def forward(self, b):
        if 3 not in self.layers:
            self.layers[3] = nn.Linear(3, 3)
        return self.layers[3](b).tanh()


class InAList(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(3, 3)])

    def forward(self, b):
        if len(self.layers) == 1:
            self.layers.append(nn.Linear(3, 3))
        return self.layers[1](self.layers[0](b)).tanh()


class AParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_parameter("weight", None)
        self.register_parameter("bias", nn.Parameter(torch.ones(3)))

    def forward(self, b):
        if self.weight is None:
            self.weight = nn.Parameter(0.1 * torch.randn(3, 3))
        return b @ self.weight + self.bias


WAYS = {
    "grad": lambda f: grad(f),
    "a gradient of it": lambda f: grad(lambda w, x: grad(f)(w, x).square().sum()),
    "vmap of it": lambda f: lambda w, x: vmap(grad(f), (None, 0), randomness="same")(w, torch.stack([x, x + 1])),
    "of vmap": lambda f: grad(lambda w, x: vmap(f, (None, 0), randomness="same")(w, torch.stack([x, x + 1])).sum()),
}
REFUSED = {("batch norm", "vmap of it"), ("batch norm", "of vmap")}


def as_it_is(pair):
    return pair


class TestForOneCall:
    @pytest.mark.parametrize("how", ["backward", *WAYS])
    @pytest.mark.parametrize("made", MADE)
    def test_have_the_gradients_of_the_function(self, made, how):
        if (made, how) in REFUSED:
            pytest.skip("by torch")

        def run(wrap):
            torch.manual_seed(0)
            x, w = torch.randn(5, 6), torch.randn(3, 3, requires_grad=how == "backward")

            def f(w, x):
                block = wrap(additive_coupling(MADE[made], MADE[made], split_dim=1))
                return block(block(x, (w, w.sin())), (w.cos(), w)).sin().mean()

            found = torch.autograd.grad(f(w, x), w) if how == "backward" else WAYS[how](f)(w, x)
            return found, torch.rand(2)

        assert_trees_close(run(invertible_checkpoint), run(as_it_is), 1e-4)

    def test_a_copy_of_a_module_is_to_be_made_before(self):
        layer, x = nn.Linear(3, 3), torch.randn(2, 3)
        with pytest.raises(ClosedOverError, match="another one each time.*of a module that f copies"):
            grad(lambda x: invertible_checkpoint(lambda x: copy.deepcopy(layer)(x), None)(x).sum())(x)
        made = copy.deepcopy(layer)
        assert_trees_close(
            grad(lambda x: invertible_checkpoint(lambda x: made(x), None)(x).sum())(x),
            grad(lambda x: layer(x).sum())(x),
            1e-5,
        )


class TestForAll:
    @pytest.mark.parametrize("inside", [False, True])
    @pytest.mark.parametrize("depth", [1, 2])
    @pytest.mark.parametrize("kind", [InAnAttribute, InADict, InAList, AParameter])
    def test_are_made_once(self, kind, depth, inside):
        """What is made again in the backward pass is forgotten again: the first one stays, and has its gradient."""

        def run(wrap):
            torch.manual_seed(0)
            parts = kind(), kind()
            block = wrap(additive_coupling(*parts, split_dim=1))

            def f(x):
                for _ in range(depth):
                    x = block(x)
                return x.sin().sum()

            x = torch.randn(5, 6, requires_grad=not inside)
            found = [grad(f)(x) if inside else torch.autograd.grad(f(x), x)]
            params = [p for part in parts for p in part.parameters()]
            before = [p.detach().clone() for p in params]
            found.append(grad(f)(x) if inside else torch.autograd.grad(f(x), (x, *params)))
            assert all(p is q for p, q in zip(params, (p for m in parts for p in m.parameters()), strict=True))
            return found, before, params, torch.rand(2)

        assert_trees_close(run(invertible_checkpoint), run(as_it_is), 1e-4)


class Counting(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("count", torch.ones(3))

    def forward(self, b):
        self.count.add_(1)
        return b * self.count.clone()


def test_a_state_of_each_member_that_is_written_is_told_of():
    parts = Counting(), Counting()
    block = invertible_checkpoint(additive_coupling(*parts, split_dim=1))
    names = {"0.count", "1.count"}

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList(parts)

        def forward(self, x):
            return block(x)

    def loss(x, state):
        state = {name: t.clone() for name, t in state.items()}
        return functional_call(Net(), state, (x,)).sin().sum()

    states = {f"parts.{name}": torch.ones(2, 3) for name in names}
    with pytest.raises(ReplayError, match="the function writes as well and that belongs to torch.func.vmap"):
        vmap(grad(loss), (None, 0))(torch.randn(4, 6), states)
