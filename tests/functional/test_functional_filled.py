"""What the first call of a module fills with its own parts holds the parts of the module, and not those of a copy."""

from collections import deque
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from invfunc import ArgumentError, functional
from invfunc.testing import assert_trees_close
from tests.functional_modules import EXACT
from tests.strategies import Numbers


class Outer:
    """An object that holds another one, which the library does not copy."""

    def __init__(self):
        self.inner = SimpleNamespace()


class Filled(nn.Module):
    """`fill(self)` puts the parts into `self.kept`; `read(self)` finds them there."""

    def __init__(self, kept, fill, read):
        super().__init__()
        self.a, self.b = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        self.kept, self.fill, self.read, self.begun = kept, fill, read, False

    def run(self, x):
        return self.b(self.a(x).tanh())

    def forward(self, x):
        if not self.begun:
            self.fill(self)
            self.begun = True
        for part in self.read(self):
            x = part(x)
        return x


def layers(kept, put):
    return kept, lambda net: put(net.kept, [net.a, net.b]), lambda net: net.kept


KINDS = {
    "list": lambda: layers([], list.extend),
    "deque": lambda: layers(deque(), deque.extend),
    "dict": lambda: ({}, lambda net: net.kept.update(run=net.run), lambda net: net.kept.values()),
    "lambda": lambda: ({}, lambda net: net.kept.update(run=lambda x: net.run(x)), lambda net: net.kept.values()),
    "partial": lambda: ([], lambda net: net.kept.append(partial(net.run)), lambda net: net.kept),
    "set": lambda: (set(), lambda net: net.kept.add(net.a), lambda net: net.kept),
    "nested": lambda: ({"all": []}, lambda net: net.kept["all"].append(net.b), lambda net: net.kept["all"]),
    "object": lambda: (SimpleNamespace(), lambda net: setattr(net.kept, "fn", net.run), lambda net: [net.kept.fn]),
}


@pytest.mark.parametrize("kind", KINDS)
def test_each_call_has_its_own_parameters(kind):
    net, other, x = Filled(*KINDS[kind]()), Filled(*KINDS[kind]()), Numbers()(2, 3)
    f, params = functional(net)
    kept = net.kept
    for scale in (1.0, 2.0, 3.0):
        given = {name: scale * p for name, p in params.items()}
        found, wanted = (
            torch.func.grad_and_value(lambda p, g=g: g(p).sum())(given)
            for g in (lambda p: f(p, x), lambda p: torch.func.functional_call(other, p, (x,)))
        )
        assert_trees_close(found, wanted, EXACT)
    assert kind == "object" or net.kept is kept
    assert net(x).requires_grad


def test_where_it_cannot_be_taken_back_it_is_told():
    net = Filled(Outer(), lambda net: setattr(net.kept.inner, "fn", net.run), lambda net: [net.kept.inner.fn])
    f, params = functional(net)
    with pytest.raises(ArgumentError, match="before the first call"):
        f(params, Numbers()(2, 3))
