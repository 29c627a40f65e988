"""What a call that is not watched may not take for known: each of these programs was silently wrong, or failed."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch.func import grad, jacrev, vjp

from invfunc import InvFuncError, additive_coupling, invertible_checkpoint
from invfunc.recomputation.purity import Purity
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

CALLS = 8
"""From the fifth on a call need not be watched."""


def scaled(x, w):
    return x * torch.exp(w) + torch.tanh(w)


def scaled_back(y, w):
    return (y - torch.tanh(w)) * torch.exp(-w)


def twice(f, x, w):
    return f(f(x * 1, w), w).sin()


@pytest.mark.quick
@pytest.mark.parametrize(
    "derivative",
    [
        lambda pull, c: vjp(lambda c: pull(c)[0], torch.zeros_like(c))[1](c)[0],
        lambda pull, c: grad(lambda c: pull(c)[1].square().sum())(c),
        lambda pull, c: jacrev(lambda c: pull(c)[0])(c),
    ],
    ids=["jvp by two vjps", "grad", "jacrev"],
)
def test_a_pullback_is_differentiated_after_its_transform_has_ended(derivative):
    x, w, c = Numbers(1)(3), Numbers(2)(3), Numbers(3)(3)
    f = invertible_checkpoint(scaled, scaled_back)
    for _ in range(CALLS):
        found, wanted = (derivative(vjp(lambda x, w, g=g: twice(g, x, w), x, w)[1], c) for g in (f, scaled))
        assert_trees_close(found, wanted, 1e-12)


@pytest.mark.quick
def test_a_constant_that_numbers_decide_is_that_of_the_call():
    def counted(x):
        return x * 2, len(x[x > 0])

    def loss(x):
        y, n = f(x * 1)
        return y.sum() * n

    f = invertible_checkpoint(counted, lambda y: y[0] / 2)
    for _ in range(CALLS):
        grad(loss)(torch.ones(4))
    assert torch.equal(grad(loss)(torch.tensor([1.0, -1, -1, -1])), torch.full((4,), 2.0))


def test_a_function_in_y_is_that_of_the_call():
    def loss(x):
        y, total = f(x * 1)
        return y.sum() * total()

    def with_total(x):
        return x * 2, lambda: x.detach().sum()

    f = invertible_checkpoint(with_total, lambda y: y[0] / 2)
    for i in range(CALLS):
        assert torch.equal(grad(loss)(torch.full((4,), float(i))), torch.full((4,), 8.0 * i))


class Scaled(nn.Module):
    """A layer with a number of its own."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(Numbers(1)(4, 4))
        self.scale = 1.0

    def forward(self, x):
        return (x * self.scale) @ self.weight / self.scale


class Outer(nn.Module):
    """A module that reaches what is in it by a method of all modules."""

    def __init__(self, reach):
        super().__init__()
        self.net, self.reach = nn.Sequential(Scaled()), reach
        self.forward = getattr(self, reach)

    def children_of(self, x):
        for child in self.net.children():
            x = child(x)
        return x

    def submodule(self, x):
        return self.net.get_submodule("0")(x)


class ByName(nn.Module):
    """A module with a number among its named parameters."""

    def __init__(self):
        super().__init__()
        self.weight, self.named = nn.Parameter(Numbers(1)(4, 4)), nn.ParameterDict({"scale": 1.0})

    def forward(self, x):
        return (x * self.named["scale"]) @ self.weight / self.named["scale"]


def _rescaled(module):
    if isinstance(module, ByName):
        module.named["scale"] = 4.0
    else:
        module.net[0].scale = 4.0


@pytest.mark.parametrize("made", [lambda: Outer("children_of"), lambda: Outer("submodule"), ByName])
@pytest.mark.parametrize("calls", [0, CALLS])
def test_what_methods_of_modules_lead_to_is_not_read_unseen(made, calls):
    module, other = made(), nn.Linear(4, 4, dtype=torch.float64)
    block, x = invertible_checkpoint(additive_coupling(module, other)), (Numbers(2)(2, 4), Numbers(3)(2, 4))
    weights = [*module.parameters()]

    def loss():
        return sum(y.square().sum() for y in block(tuple(t * 1 for t in x)))

    for t in x:
        t.requires_grad_()
    for _ in range(calls):
        loss().backward()
    pair = additive_coupling(module, other)
    wanted = torch.autograd.grad(sum(y.square().sum() for y in pair.forward(*pair.shared, x)), weights)
    last = loss()
    _rescaled(module)
    try:
        found = torch.autograd.grad(last, weights)
    except InvFuncError:  # which is as good
        return
    assert_trees_close(found, wanted, 1e-9)


def test_a_module_may_set_the_mode_of_another_one():
    class Frozen(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.linear = nn.BatchNorm1d(4), nn.Linear(4, 4)

        def forward(self, x):
            self.norm.eval()
            return torch.tanh(self.norm(self.linear(x)))

    net = nn.ModuleList([Frozen(), Frozen()]).double()
    block = invertible_checkpoint(additive_coupling(*net))
    for _ in range(CALLS):
        net.train()
        x = (Numbers(2)(2, 4).requires_grad_(), Numbers(3)(2, 4))
        sum(y.square().sum() for y in block(tuple(t * 1 for t in x))).backward()


def test_functions_are_not_kept_alive():
    held = []

    def once():
        shift = torch.ones(3)
        held.append(weakref.ref(shift))
        f = invertible_checkpoint(lambda x: x + shift, lambda y: y - shift)
        f(torch.ones(3, requires_grad=True)).sum().backward()

    for _ in range(3):
        once()
    gc.collect()
    assert all(ref() is None for ref in held)


def test_tensors_of_inference_mode_are_taken():
    f = invertible_checkpoint(lambda x, w: x + w, lambda y, w: y - w)
    for _ in range(CALLS):
        f(torch.ones(3, requires_grad=True) * 1, torch.ones(3)).sum().backward()
    with torch.inference_mode():
        w = torch.ones(3)
    x = torch.ones(3, requires_grad=True)
    f(x * 1, w).sum().backward()
    assert torch.equal(x.grad, torch.ones(3))


def test_what_a_class_gets_later_is_seen():
    class Module(Scaled):
        pass

    known = Purity([Module()])
    assert known.unchanged()
    Module.__call__ = lambda self, x: nn.Module.__call__(self, x) + torch.rand(())
    assert not known.unchanged()
