"""What a module computes once and keeps (`functools.cached_property`) is computed of the parameters of each call."""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import nn
from torch.distributions.utils import lazy_property

from invfunc import batch_grad, functional
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

EXACT = 1e-12


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(Numbers()(3, 2))
        self.count = 0

    @cached_property
    def weight(self):
        self.count += 1
        return self.raw.exp()

    def forward(self, x):
        return (x @ self.weight).tanh() @ self.weight.mT


class Lazily(Cached):
    weight = lazy_property(lambda self: self.raw.exp())


class Within(Cached):
    def __init__(self):
        super().__init__()
        self.part = Cached()

    def forward(self, x):
        return self.part(x) @ self.weight


@dataclass
class Holder:
    module: nn.Module

    @cached_property
    def weight(self):
        return self.module.raw.exp()


class InAnObject(Cached):
    def __init__(self):
        super().__init__()
        self.holder = Holder(self)

    def forward(self, x):
        return x @ self.holder.weight


class Scripted(Cached):
    """Which cannot be copied."""

    def __init__(self):
        super().__init__()
        self.part = torch.jit.trace(nn.Identity(), torch.zeros(1, 3))

    def forward(self, x):
        return self.part(x) @ self.weight


KINDS = [Cached, Lazily, Within, InAnObject, Scripted]
each_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)
X = Numbers(1)(4, 3)


def others(params):
    return {name: p + 0.5 for name, p in params.items()}


def plain(kind, params):
    model = kind().double()
    with torch.no_grad():
        for name, p in model.named_parameters():
            p.copy_(params[name])
    return model(X).detach()


@each_kind
@pytest.mark.parametrize("before", [False, True], ids=["fresh", "after a call of the module"])
def test_each_call_has_its_own(kind, before):
    model = kind().double()
    if before:
        model(X)
    f, params = functional(model)
    for given in (params, others(params), params):
        assert_trees_close(f(given, X), plain(kind, given), EXACT)


@each_kind
def test_what_the_module_has_kept_is_left_alone(kind):
    model = kind().double()
    f, params = functional(model)
    f(others(params), X)
    assert "weight" not in vars(model)
    wanted = model(X).detach()
    kept = vars(model).get("weight")
    f(others(params), X)
    assert vars(model).get("weight") is kept
    assert_trees_close(model(X).detach(), wanted, EXACT)


@each_kind
def test_derivatives_reach_the_parameters(kind):
    model = kind().double()
    f, params = functional(model)

    def loss(params, x):
        return f(params, x).square().sum()

    first = torch.func.grad(loss)(params, X)
    assert all(g.any() for g in first.values())
    assert_trees_close(torch.func.grad(loss)(params, X), first, EXACT)
    if kind is not Scripted:
        assert_trees_close({k: g.sum(0) for k, g in batch_grad(loss)(params, X).items()}, first, EXACT)
