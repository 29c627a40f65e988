"""Calls of blocks that are made of modules, or close over tensors, which are not watched from some call on."""

import copy
import math
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.func import functional_call, grad
from torch.nn.modules.module import register_module_forward_hook
from torch.nn.utils import parametrize

from invfunc import (
    ModifiedError,
    ReplayError,
    additive_coupling,
    functional,
    invertible_checkpoint,
)
from invfunc.recomputation.purity import NotShown, Purity
from tests.recomputation.straight_cases import WATCHED, assert_close, straight
from tests.strategies import Numbers

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
        return (x @ self.weight).softmax(-1) * self.scale + self.offset

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


MODULES = {
    "sequential": lambda: nn.Sequential(nn.Linear(3, 3), nn.GELU(), nn.Linear(3, 3, bias=False)),
    "own": Scaled,
    "list of parameters": Halves,
    "batch norm": lambda: nn.Sequential(nn.Linear(3, 3), nn.BatchNorm1d(3)).eval(),
    "dropout in eval": lambda: nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5)).eval(),
    "tied": lambda: (lambda layer: nn.Sequential(layer, nn.SiLU(), layer))(nn.Linear(3, 3)),
}
each_module = pytest.mark.parametrize("name", MODULES)


def of_modules(f, g):
    return additive_coupling(f, g)


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
        a, b = x
        a = a + self.f(b)
        return a, b + self.g(a)

    def inverse(self, y):
        a, b = y
        b = b - self.g(a)
        return a - self.f(b), b


def of_a_module(f, g):
    module = Reversible(f, g)
    return module, module.inverse


KINDS = {"coupling": of_modules, "functions": of_functions, "module": of_a_module}
each_kind = pytest.mark.parametrize("kind", KINDS)


def made(name="sequential"):
    torch.manual_seed(0)
    return MODULES[name]().double(), MODULES[name]().double()


def block_of(kind, f, g):
    found: Any = KINDS[kind](f, g)
    return invertible_checkpoint(*found) if isinstance(found, tuple) else invertible_checkpoint(found)


def plain(f, g):
    return of_functions(f, g)[0]


def loss(h, number=2):
    x: Any = tuple(t * 1 for t in X)
    for _ in range(number):
        x = h(x)
    return torch.stack(x).sin().sum()


def parameters(*modules):
    return list({id(p): p for m in modules for p in m.parameters() if p.requires_grad}.values())


def slope(h, *modules, number=2):
    return torch.autograd.grad(loss(h, number), parameters(*modules), allow_unused=True)


def known(kind, f, g):
    h = block_of(kind, f, g)
    for _ in range(WATCHED):
        slope(h, f, g)
    return h


@contextmanager
def unwatched(number: int):
    """So many calls within are not watched."""
    with straight() as count:
        yield
        assert count() == number


@each_module
@each_kind
class TestGradients:
    def test_are_those_of_the_modules(self, name, kind):
        f, g = made(name)
        h = known(kind, f, g)
        with unwatched(4):
            found = slope(h, f, g, number=4)
        assert_close(found, slope(plain(f, g), f, g, number=4))

    def test_second(self, name, kind):
        f, g = made(name)
        h, results = known(kind, f, g), []
        for one in (plain(f, g), h):
            ps = parameters(f, g)
            first = torch.autograd.grad(loss(one), ps, create_graph=True)
            total = torch.cat([t.flatten() for t in first]).square().sum()
            results.append(torch.autograd.grad(total, ps))
        assert_close(*results)

    def test_after_steps_of_an_optimiser(self, name, kind):
        f, g = made(name)
        h, results = known(kind, f, g), []
        for one, parts in ((h, (f, g)), (None, copy.deepcopy((f, g)))):
            one, trained = one or plain(*parts), torch.optim.SGD(parameters(*parts), 1e-3, momentum=0.9)
            for _ in range(4):
                trained.zero_grad()
                loss(one).backward()
                trained.step()
            results.append(parameters(*parts))
        assert_close(*results)

    def test_of_other_parameters_for_a_call(self, name, kind):
        """By the backward pass the module has its own again."""
        if name == "tied":  # torch leaves others in such a module
            return
        f, g = made(name)
        h, results, model = known(kind, f, g), [], nn.ModuleList([f, g])
        for one in (h, plain(f, g)):
            holder = _Holding(model, one)
            mine = {k: (2 * p.detach()).requires_grad_() for k, p in holder.named_parameters()}
            for _ in range(2):
                out = functional_call(holder, mine, ())
                found = torch.autograd.grad(out, list(mine.values()))
            results.append(found)
        assert_close(*results)


class _Holding(nn.Module):
    def __init__(self, model, one):
        super().__init__()
        self.model, self.one = model, [one]

    def forward(self):
        return loss(self.one[0])


def test_closed_over_tensors():
    weight = Numbers(5)(3, 3).requires_grad_()

    def f(b):
        return torch.tanh(b @ weight)

    h = known("coupling", f_of(f), f_of(f))
    ps = [weight]
    with unwatched(2):
        y = loss(h)
    assert_close(torch.autograd.grad(y, ps), torch.autograd.grad(loss(plain(f, f)), ps))


def test_a_form_that_decides_whether_it_draws():
    weight = Numbers(5)(3, 3).requires_grad_()

    def f(b):
        h = torch.tanh(b @ weight)
        return h if weight.is_contiguous() else F.dropout(h, 0.5)

    parts = f_of(f), f_of(f)
    h = known("coupling", *parts)
    weight.data = weight.data.T
    results = []
    for one in (h, plain(*parts)):
        torch.manual_seed(1)
        results.append(torch.autograd.grad(loss(one), [weight]))
    assert_close(*results)


def f_of(f):
    """A function that has parameters to ask for, as modules have."""
    return _Function(f)


class _Function(nn.Module):
    def __init__(self, f):
        super().__init__()
        self.bias, self.f = nn.Parameter(torch.zeros(3).double()), f

    def forward(self, b):
        return self.f(b) + self.bias


class TestAlwaysWatched:
    @pytest.mark.parametrize("which", ["dropout", "batch norm", "in place", "counter", "hook", "global hook"])
    def test_what_draws_writes_or_has_hooks(self, which):
        f, g = made()
        if which == "dropout":
            f.append(nn.Dropout(0.5))
        elif which == "batch norm":
            f.append(nn.BatchNorm1d(3).double())
        elif which == "in place":
            f.append(nn.ReLU(inplace=True))
        elif which == "counter":
            f.append(_Counting())
        elif which == "hook":
            f[0].register_forward_hook(lambda module, given, result: 2 * result)
        handle = register_module_forward_hook(lambda *given: None) if which == "global hook" else None
        try:
            h = block_of("coupling", f, g)
            with unwatched(0):
                for _ in range(WATCHED):
                    other = copy.deepcopy((f, g))
                    torch.manual_seed(1)
                    found = slope(h, f, g)
                    torch.manual_seed(1)
                    assert_close(found, slope(plain(*other), *other))
        finally:
            if handle is not None:
                handle.remove()

    def test_own_parameters_given_as_an_argument(self):
        f, g = made()
        h = block_of("coupling", f, g)
        given = [functional(m)[1] for m in (f, g)]
        with unwatched(0):
            for _ in range(WATCHED):
                h(tuple(t.clone().requires_grad_() for t in X), tuple(given))[0].sum().backward()

    def test_inside_of_grad(self):
        f, g = made()
        h, (call, params) = known("coupling", f, g), functional(nn.ModuleList([f, g]))
        del call
        holder = _Holding(nn.ModuleList([f, g]), h)
        plainly = _Holding(nn.ModuleList([f, g]), plain(f, g))
        names = {f"model.{k}": p for k, p in params.items()}
        with unwatched(0):
            found = grad(lambda p: functional_call(holder, p, ()))(names)
        wanted = grad(lambda p: functional_call(plainly, p, ()))(names)
        assert_close(found.values(), wanted.values())


class _Counting(nn.Module):
    calls = 0

    def forward(self, x):
        self.calls += 1
        return x


MODULE = nn.Linear(3, 3)


class _Strange(nn.Linear):
    def __call__(self, x):
        return super().__call__(x) + 1


class _Property(nn.Module):
    @property
    def scale(self):
        return 2.0

    def forward(self, x):
        return x * self.scale


def _with(module, **attributes):
    for name, value in attributes.items():
        setattr(module, name, value)
    return module


NOT_SHOWN = {
    "a class that calls in another way": lambda: _Strange(3, 3),
    "a property": _Property,
    "a counter": _Counting,
    "a list as an option": lambda: _with(Scaled(), scale=[0.5]),
    "random numbers of Python as a function": lambda: _with(Scaled(), act=lambda x: x * __import__("random").random()),
    "a compiled module": lambda: _with(nn.Linear(3, 3), _compiled_call_impl=lambda x: x),
    "a scripted module": lambda: torch.jit.script(nn.Linear(3, 3)),
    "another forward that is a method": lambda: _with(nn.Linear(3, 3), forward=[].append),
    "a parametrization": lambda: parametrize.register_parametrization(nn.Linear(3, 3), "weight", nn.Tanh()),
    "many modules": lambda: nn.Sequential(*[nn.Linear(3, 3) for _ in range(100)]),
    "all of its parameters": lambda: _with(Scaled(), act=lambda x, m=MODULE: x * sum(p.sum() for p in m.parameters())),
}


@pytest.mark.parametrize("name", NOT_SHOWN)
@pytest.mark.filterwarnings("ignore")
def test_what_is_not_shown(name):
    with pytest.raises(NotShown):
        Purity([NOT_SHOWN[name]()])


# What is another one in a later call


def _add_hook(f):
    f[0].register_forward_hook(lambda module, given, result: 2 * result)


def _add_pre_hook(f):
    f[0].register_forward_pre_hook(lambda module, given: (2 * given[0],))


def _put_hooks(f):
    f[0]._forward_hooks = {0: lambda module, given, result: 2 * result}


def _replace_parameter(f):
    f[0].weight = nn.Parameter(2 * f[0].weight.detach())


def _freeze(f):
    f[0].weight.requires_grad_(False)


def _exchange_data(f):
    f[0].weight.data = 2 * f[0].weight.data


def _transpose_data(f):
    f[0].weight.data = f[0].weight.data.T


def _write(f):
    with torch.no_grad():
        f[0].weight.mul_(2)


def _parametrize(f):
    parametrize.register_parametrization(f[0], "weight", nn.Tanh())


def _replace_forward(f):
    f[0].forward = lambda x: 2 * F.linear(x, f[0].weight, f[0].bias)


def _replace_module(f):
    f[1] = nn.Tanh()


def _append(f):
    f.append(nn.Linear(3, 3).double())


def _dropout(f):
    f.append(nn.Dropout(0.5))


def _option(f):
    f[1].approximate = "tanh"


def _shadow(f):
    f[0].__dict__["weight"] = 2 * f[0].weight.detach()


def _class_forward(f):
    f[0].__class__ = _Doubling


class _Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


CHANGES = {
    change.__name__.strip("_"): change
    for change in (
        *(_add_hook, _add_pre_hook, _put_hooks, _replace_parameter, _freeze, _exchange_data, _transpose_data, _write),
        *(_parametrize, _replace_forward, _replace_module, _append, _dropout, _option, _shadow, _class_forward),
    )
}
AS_IT_WAS = {"replace_parameter", "freeze", "exchange_data", "transpose_data"}
"""What may happen to tensors between a call and its backward pass, without another gradient."""


@each_kind
@pytest.mark.parametrize("change", CHANGES)
class TestChanges:
    def test_between_calls(self, change, kind):
        f, g = made()
        h = known(kind, f, g)
        CHANGES[change](f)
        for _ in range(3):
            torch.manual_seed(1)
            found = slope(h, f, g)
            torch.manual_seed(1)
            assert_close(found, slope(plain(f, g), f, g))

    def test_between_a_call_and_its_backward_pass(self, change, kind):
        f, g = made()
        h, ps = known(kind, f, g), parameters(f, g)
        wanted = slope(plain(f, g), f, g)
        with unwatched(2):
            y = loss(h)
        CHANGES[change](f)
        if change in AS_IT_WAS:
            y.backward()
            found = [(p.grad, w) for p, w in zip(ps, wanted, strict=True) if p.requires_grad]
            assert_close(*zip(*found, strict=True))
        else:
            with pytest.raises(ModifiedError if change == "write" else ReplayError):
                y.backward()


def test_modes_switched_between_calls():
    f, g = made()
    f.append(nn.Dropout(0.5))
    f.eval()
    h = known("coupling", f, g)
    for train in (True, False, True, False):
        f.train(train)
        torch.manual_seed(1)
        found = slope(h, f, g)
        torch.manual_seed(1)
        assert_close(found, slope(plain(f, g), f, g))


def test_modes_switched_before_the_backward_pass():
    f, g = made("own")
    h = known("coupling", f, g)
    y = loss(h)
    f.eval()
    with pytest.raises(ReplayError, match="mode of a module"):
        y.backward()


def test_a_class_that_is_changed(monkeypatch):
    f, g = made()
    h = known("coupling", f, g)
    forward = nn.GELU.forward
    monkeypatch.setattr(nn.GELU, "forward", lambda self, x: 2 * forward(self, x))
    assert_close(slope(h, f, g), slope(plain(f, g), f, g))


def test_a_weight_that_is_stepped_in_the_backward_pass():
    f, g = made()
    h, results = known("functions", f, g), []
    for one, parts in ((h, (f, g)), (None, copy.deepcopy((f, g)))):
        one = one or plain(*parts)
        for p in parameters(*parts):
            p.register_post_accumulate_grad_hook(_step)
        loss(one, number=1).backward()
        results.append([p.grad for p in parameters(*parts)])
    assert_close(*results)


@torch.no_grad()
def _step(p):
    p.sub_(0.1 * p.grad)


def test_copies_are_of_their_own_modules():
    f, g = made()
    module = nn.ModuleDict({"f": f, "g": g})
    module.block = block_of("coupling", f, g)
    for _ in range(WATCHED):
        slope(module.block, f, g)
    other: Any = copy.deepcopy(module)
    with torch.no_grad():
        other["f"][0].weight.mul_(3)
    for _ in range(2 * WATCHED):
        found = slope(other.block, other)
        assert_close(found, slope(plain(other["f"], other["g"]), other))


@given(
    st.lists(st.sampled_from(sorted(MODULES)), min_size=2, max_size=2),
    st.sampled_from(sorted(KINDS)),
    st.lists(st.sampled_from(["call", "call", "call", "write", "data", "swap", "mode", "freeze"]), max_size=12),
)
def test_any_calls_give_what_the_modules_give(names, kind, steps):
    """Whatever happens to their parameters and modes between them."""
    torch.manual_seed(0)
    f, g = (MODULES[name]().double() for name in names)
    h = block_of(kind, f, g)
    for step in ["call"] * WATCHED + steps:
        p = next(f.parameters())
        with torch.no_grad():
            if step == "write":
                p.mul_(1.1)
            elif step == "data":
                p.data = 0.9 * p.data
            elif step == "swap":
                module, _, name = [*f.named_parameters()][0][0].rpartition(".")
                setattr(f.get_submodule(module), name, nn.Parameter(1.05 * p.detach()))
            elif step == "mode":
                f.train(not f.training)
            elif step == "freeze" and len(parameters(f)) > 1:
                p.requires_grad_(not p.requires_grad)
        others = copy.deepcopy((f, g))
        torch.manual_seed(math.floor(1e6))
        found = slope(h, f, g)
        torch.manual_seed(math.floor(1e6))
        assert_close(found, slope(plain(*others), *others))
