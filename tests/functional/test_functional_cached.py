"""What a module computes once and keeps (`functools.cached_property`) is computed of the parameters of each call."""

from dataclasses import dataclass
from functools import cached_property

import pytest
import torch
from torch import nn
from torch.distributions.utils import lazy_property

from invfunc import ArgumentError, batch_grad, functional
from invfunc.testing import assert_trees_close
from tests.functional_modules import EXACT, made, numbers
from tests.strategies import Numbers


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


class ByHand(nn.Module):
    """A product of its parameters, kept by the first call in one way or another."""

    def __init__(self, keep):
        super().__init__()
        self.layer, self.kept, self.table, self.keep = nn.Linear(3, 3), None, {}, keep

    def forward(self, x):
        if self.keep == "an attribute":
            self.kept = self.layer.weight * 2 if self.kept is None else self.kept
            return x @ self.kept
        if self.keep == "a dict":
            return x @ self.table.setdefault("weight", self.layer.weight * 2)
        if self.keep == "a list":
            self.kept = self.kept or [self.layer.weight * 2]
            return x @ self.kept[0]
        return x @ (self.layer.weight * 2)

    def clear(self):
        self.kept, self.table = None, {}


@pytest.mark.parametrize("keep", ["an attribute", "a dict", "a list"])
class TestWhatIsKeptByHand:
    ERROR = "^functional\\(ByHand\\): the attribute '(kept|table)' of ByHand was computed from parameters by an earlier"

    def test_by_a_call_of_f(self, keep):
        model = made(lambda: ByHand(keep))
        f, params = functional(model)
        x, own = Numbers()(4, 3), numbers(params)
        assert_trees_close(f(own, x), x @ (2 * own["layer.weight"]), EXACT)
        for call in (lambda: f(params, x), lambda: torch.func.grad(lambda p: f(p, x).sum())(params)):
            with pytest.raises(ArgumentError, match=self.ERROR):
                call()
        model.keep = "nothing"
        for p in (params, own):
            assert_trees_close(f(p, x), x @ (2 * p["layer.weight"]), EXACT)

    def test_by_a_call_of_the_module(self, keep):
        model, x = made(lambda: ByHand(keep)), Numbers()(4, 3)
        model(x)
        f, params = functional(model)
        with pytest.raises(ArgumentError, match=self.ERROR):
            f(numbers(params), x)
        model.clear()
        assert_trees_close(f(params, x), x @ (2 * params["layer.weight"]), EXACT)


class Stateful(nn.Module):
    """One that leaves tensors which it may, and reads one of them."""

    def __init__(self):
        super().__init__()
        self.layer, self.last, self.state, self.scale = nn.Linear(3, 3), None, None, None

    def forward(self, x):
        self.last = self.layer(x)
        y = self.last if self.state is None else self.last + self.state
        self.state = self.last.detach()
        return y * self.scale


def test_what_is_let_go_of_or_comes_from_elsewhere_is_read():
    model = made(Stateful)
    factor = torch.ones(3, dtype=torch.float64, requires_grad=True)
    model.scale = factor * 2
    f, params = functional(model)
    x = Numbers()(4, 3)
    found = [f(params, x) for _ in range(3)]
    for y, times in zip(found, (1, 2, 2), strict=True):
        assert_trees_close(y, times * 2 * (x @ params["layer.weight"].mT + params["layer.bias"]), EXACT)
    (slope,) = torch.autograd.grad(found[2].sum(), factor)
    assert_trees_close(slope, found[2].sum(0).detach(), EXACT)
