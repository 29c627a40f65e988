"""Blocks that are made of modules, whatever happens to these between calls."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrize

from invfunc import additive_coupling, invertible_checkpoint
from invfunc.errors import ModifiedError
from tests.strategies import Numbers


def assert_close(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b)


X = tuple(Numbers(3)(2, 4, 3))


class Scaled(nn.Module):
    """A module as users write them: options, a method of its own, a buffer, a list of modules."""

    offset: torch.Tensor

    def __init__(self):
        super().__init__()
        self.scale, self.norm, self.act = 0.5, nn.LayerNorm(3), F.gelu
        self.weight = nn.Parameter(torch.randn(3, 3))
        self.register_buffer("offset", torch.ones(3))
        self.layers = nn.ModuleList([nn.Linear(3, 3), nn.Tanh()])

    def _mixed(self, x):
        return (x @ self.weight.mT).softmax(-1) * self.scale + self.offset

    def forward(self, x):
        x = self._mixed(self.act(self.norm(x)))
        for layer in self.layers:
            x = layer(x)
        return x if self.training else 2 * x


class Halves(nn.Module):
    def __init__(self):
        super().__init__()
        self.weights = nn.ParameterList([torch.randn(3, 3) for _ in "ab"])

    def forward(self, x):
        a, b = tuple(self.weights)
        return torch.tanh(x @ a) @ b


class Hooked(nn.Linear):
    def __init__(self):
        super().__init__(3, 3)
        self.register_forward_hook(lambda module, given, result: 2 * result)


MODULES = {
    "sequential": lambda: nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3, bias=False)),
    "own": Scaled,
    "list of parameters": Halves,
    "batch norm in eval": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(),
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)),
    "dropout": lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)),
    "in place": lambda: nn.Sequential(nn.Linear(3, 3), nn.ReLU(inplace=True)),
    "hook": Hooked,
    "parametrized": lambda: parametrize.register_parametrization(nn.Linear(3, 3), "weight", nn.Tanh()),
    "tied": lambda: (lambda layer: nn.Sequential(layer, nn.SiLU(), layer))(nn.Linear(3, 3)),
}


def of_functions(f, g):
    """A generic pair whose functions close over the modules."""

    def forward(x):
        a = x[0] + f(x[1])
        return a, x[1] + g(a)

    def inverse(y):
        b = y[1] - g(y[0])
        return y[0] - f(b), b

    return forward, inverse


class Reversible(nn.Module):
    def __init__(self, f, g):
        super().__init__()
        self.f, self.g = f, g

    def forward(self, x):
        a = x[0] + self.f(x[1])
        return a, x[1] + self.g(a)

    def inverse(self, y):
        b = y[1] - self.g(y[0])
        return y[0] - self.f(b), b


def of_a_module(f, g):
    module = Reversible(f, g)
    return module, module.inverse


KINDS = {
    "coupling": lambda f, g: (additive_coupling(f, g),),
    "functions": of_functions,
    "module": of_a_module,
    "found": lambda f, g: (of_functions(f, g)[0],),
}
each_kind = pytest.mark.parametrize("kind", KINDS)


def draws_backwards(kind, *names):
    """True if an inverse written by hand draws for g before it draws for f."""
    return kind in ("functions", "module") and "dropout" in names


CASES = [(name, kind) for name in MODULES for kind in KINDS if not draws_backwards(kind, name)]


def made(name="sequential"):
    torch.manual_seed(0)
    return MODULES[name]().double(), MODULES[name]().double()


def block_of(kind, f, g) -> Any:
    return invertible_checkpoint(*KINDS[kind](f, g))


def plain(f, g):
    return of_functions(f, g)[0]


def loss(h, number=2):
    torch.manual_seed(1)
    x: Any = tuple(t * 1 for t in X)
    for _ in range(number):
        x = h(x)
    return torch.stack(x).sin().sum()


def parameters(*modules):
    return list({id(p): p for m in modules for p in m.parameters() if p.requires_grad}.values())


def slope(h, *modules, number=2):
    return torch.autograd.grad(loss(h, number), parameters(*modules))


def known(kind, f, g):
    h = block_of(kind, f, g)
    for _ in range(4):
        slope(h, f, g)
    return h


class Holding(nn.Module):
    def __init__(self, model, one):
        super().__init__()
        self.model, self.one = model, [one]

    def forward(self):
        return loss(self.one[0])


@pytest.mark.parametrize(("name", "kind"), CASES)
class TestGradients:
    def test_are_those_of_the_modules_with_their_state(self, name, kind):
        modules, found = made(name), []
        for of in (lambda f, g: block_of(kind, f, g), plain):
            f, g = copy.deepcopy(modules)
            h, ps = of(f, g), parameters(f, g)
            for _ in range(2):
                first = torch.autograd.grad(loss(h, 3), ps, create_graph=True)
                second = torch.autograd.grad(torch.cat([t.flatten() for t in first]).square().sum(), ps)
            found.append((*first, *second, *f.buffers(), *g.buffers()))
        assert_close(*found)

    def test_of_other_parameters_for_a_call(self, name, kind):
        """By the backward pass the module has its own again."""
        if name == "tied":  # torch leaves others in such a module
            return
        f, g = made(name)
        h, results, model = known(kind, f, g), [], nn.ModuleList([f, g])
        for one in (h, plain(f, g)):
            holder = Holding(model, one)
            mine = {k: (2 * p.detach()).requires_grad_() for k, p in holder.named_parameters()}
            results.append(torch.autograd.grad(functional_call(holder, mine, ()), list(mine.values())))
        assert_close(*results)


@torch.no_grad()
def _write(f):
    f[0].weight.mul_(2)


@each_kind
def test_a_weight_that_is_written_before_the_backward_pass_is_an_error(kind):
    f, g = made()
    y = loss(known(kind, f, g))
    _write(f)
    with pytest.raises(ModifiedError):
        y.backward()


@pytest.mark.parametrize(("name", "kind"), [case for case in CASES if case[0] in ("own", "dropout", "batch norm")])
def test_a_mode_that_changes_before_the_backward_pass_is_that_of_the_call(name, kind):
    f, g = made(name)
    others = copy.deepcopy((f, g))
    wanted = slope(plain(*others), *others)
    y, ps = loss(block_of(kind, f, g)), parameters(f, g)
    f.eval()
    assert_close(torch.autograd.grad(y, ps), wanted)


@given(
    st.lists(st.sampled_from(sorted(MODULES)), min_size=2, max_size=2),
    st.sampled_from(sorted(KINDS)),
    st.lists(st.sampled_from(["call", "call", "write", "swap", "mode", "freeze"]), max_size=8),
)
def test_any_calls_give_what_the_modules_give(names, kind, steps):
    """Whatever happens to their parameters and modes between them."""
    assume(not draws_backwards(kind, *names))
    torch.manual_seed(0)
    f, g = (MODULES[name]().double() for name in names)
    h = block_of(kind, f, g)
    for step in ["call", "call", *steps]:
        p = next(f.parameters())
        with torch.no_grad():
            if step == "write":
                p.mul_(1.1)
            elif step == "swap" and not parametrize.is_parametrized(f):
                module, _, name = [*f.named_parameters()][0][0].rpartition(".")
                setattr(f.get_submodule(module), name, nn.Parameter(1.05 * p.detach()))
            elif step == "mode":
                f.train(not f.training)
            elif step == "freeze" and len(parameters(f)) > 1:
                p.requires_grad_(not p.requires_grad)
        others = copy.deepcopy((f, g))
        assert_close(slope(h, f, g), slope(plain(*others), *others))


def test_submodules_that_are_replaced_are_those_of_the_next_call():
    """Also where `functional_call` takes other parameters back before the backward pass; buffers are updated once."""

    class Net(nn.Module):
        def __init__(self, wrap):
            super().__init__()
            self.f, self.g = made()
            self.h = wrap(additive_coupling(self.f, self.g))

        def forward(self):
            return loss(self.h)

    found = []
    for wrap in (invertible_checkpoint, lambda pair: pair):
        net = Net(wrap)
        net().backward()
        torch.manual_seed(2)
        net.f[0] = MODULES["batch norm"]().double()
        mine = {name: (2 * p.detach()).requires_grad_() for name, p in net.named_parameters()}
        y = functional_call(net, mine, ())
        found.append((*torch.autograd.grad(y, [*mine.values()]), *net.buffers()))
    assert_close(*found)
