"""What a module computes once and keeps is computed of the parameters of each call."""

from functools import cached_property

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize

from invfunc import batch_grad, functional
from invfunc.testing import assert_trees_close
from tests.functional_modules import EXACT, made, numbers
from tests.strategies import Numbers


class Cached(nn.Module):
    def __init__(self):
        super().__init__()
        self.raw = nn.Parameter(Numbers()(3, 2))

    @cached_property
    def weight(self):
        return self.raw.exp()

    def forward(self, x):
        return (x @ self.weight).tanh() @ self.weight.mT


class Within(Cached):
    def __init__(self):
        super().__init__()
        self.part = Cached()

    def forward(self, x):
        return self.part(x) @ self.weight


each_kind = pytest.mark.parametrize("kind", [Cached, Within], ids=lambda kind: kind.__name__)
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
def test_each_call_has_its_own_and_that_of_the_module_is_left_alone(kind, before):
    model = kind().double()
    if before:
        model(X)
    kept = vars(model).get("weight")
    f, params = functional(model)
    for given in (params, others(params), params):
        assert_trees_close(f(given, X), plain(kind, given), EXACT)
        assert_trees_close(torch.compile(f, backend="eager")(given, X), plain(kind, given), EXACT)
    assert vars(model).get("weight") is kept


@each_kind
def test_derivatives_reach_the_parameters(kind):
    f, params = functional(kind().double())

    def loss(params, x):
        return f(params, x).square().sum()

    first = torch.func.grad(loss)(params, X)
    assert all(g.any() for g in first.values())
    assert_trees_close(torch.func.grad(loss)(params, X), first, EXACT)
    assert_trees_close({k: g.sum(0) for k, g in batch_grad(loss)(params, X).items()}, first, EXACT)


def test_weights_that_torch_remembers():
    f, params = functional(made(lambda: parametrizations.orthogonal(nn.Linear(3, 3))))
    points, x = [params, numbers(params), numbers(params, 2)], Numbers()(4, 3)
    wanted = [f(p, x) for p in points]
    with parametrize.cached():
        found = [f(p, x) for p in points]
    assert_trees_close(found, wanted, EXACT)
