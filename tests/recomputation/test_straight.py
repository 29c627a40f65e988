"""Calls that are not watched any more give what watched ones give."""

import functools
import random
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jacrev, vjp, vmap

from invfunc import (
    Grid,
    additive_coupling,
    invertible_checkpoint,
)
from invfunc.recomputation.purity import NotShown, Purity
from tests.recomputation.straight_cases import (
    EXACT,
    FACTOR,
    PAIRS,
    TENSOR,
    WATCHED,
    W,
    X,
    assert_close,
    block_of,
    couple,
    each_pair,
    forward_of,
    known,
    leaves,
    loss,
    net,
    slope,
    slope_within,
    straight,
    total,
    uncouple,
)


@each_pair
class TestGradients:
    """Those of f, in a call that is not watched."""

    def test_are_those_of_the_function(self, name):
        g = known(PAIRS[name])
        with straight() as count:
            found = slope(g, number=5)
            assert count() == 5
        assert_close(found, slope(forward_of(PAIRS[name]), number=5))

    @pytest.mark.parametrize("merged", [0, 2**60])
    def test_inside_of_grad(self, name, merged):
        g = known(PAIRS[name], slope_within)
        with straight() as count, mock.patch("invfunc.thresholds.MERGED", merged):
            found = slope_within(g, number=5)
            assert count() == 5
        assert_close(found, slope_within(forward_of(PAIRS[name]), number=5))

    @pytest.mark.parametrize("gathered", [0, 2**20], ids=["one by one", "many at a time"])
    @pytest.mark.parametrize("way", [slope, slope_within], ids=["autograd", "grad"])
    def test_on_a_device(self, name, way, gathered, device, dtype):
        """Also where autograd has a thread for it."""
        x, w = ([t.to(device, dtype) for t in ts] for ts in (X, W))

        def of(g):
            return slope(g, leaves(x, w), number=5) if way is slope else slope_within(g, x, w, number=5)

        g = block_of(PAIRS[name])
        for _ in range(WATCHED):
            of(g)
        with straight() as count, mock.patch("invfunc.thresholds.GATHERED", gathered):
            found = of(g)
            assert count() == 5
        assert_close(found, of(forward_of(PAIRS[name])))

    def test_second_and_third(self, name):
        g, wanted = known(PAIRS[name]), None
        for f in (forward_of(PAIRS[name]), g):
            given = leaves()
            first = torch.autograd.grad(loss(f, *given), given, create_graph=True)
            second = torch.autograd.grad(total([t.square() for t in first]), given, create_graph=True)
            third = torch.autograd.grad(total([t.sin() for t in second]), given)
            if wanted is None:
                wanted = (*second, *third)
            else:
                assert_close((*second, *third), wanted)

    @pytest.mark.parametrize("transform", ["twice", "vmap of grad", "grad of vmap", "jacrev", "pullback", "vmap of it"])
    def test_of_transforms(self, name, transform):
        def of(f):
            def value(given):
                return loss(f, *given)

            many = tuple(torch.stack([t, 2 * t]) for t in (*X, *W))
            if transform == "twice":
                return grad(lambda given: sum(t.square().sum() for t in grad(value)(given)))((*X, *W))
            if transform == "vmap of grad":
                return vmap(grad(value))(many)
            if transform == "grad of vmap":
                return grad(lambda given: vmap(value)(given).sum())(many)
            if transform == "jacrev":
                return jacrev(lambda given: torch.stack(f((given[0], given[1]), given[2:])).sum(-1))((*X, *W))
            pull: Any = vjp(lambda given: torch.stack(f(f((given[0], given[1]), given[2:]), given[2:])), (*X, *W))[1]
            cotangent = torch.ones(2, 4, 3, dtype=torch.float64)
            if transform == "pullback":
                return (*pull(cotangent)[0], *pull(2 * cotangent)[0])
            return vmap(pull)(torch.stack([cotangent, 3 * cotangent]))[0]

        assert_close(of(known(PAIRS[name], slope_within)), of(forward_of(PAIRS[name])))

    def test_of_a_retained_graph(self, name):
        given = leaves()
        y = loss(known(PAIRS[name]), *given)
        first = torch.autograd.grad(y, given, retain_graph=True)
        assert_close(torch.autograd.grad(y, given), first)

    def test_of_some(self, name):
        """What needs no gradient gets none, in calls of which some need another one than those before."""
        g = known(PAIRS[name])
        for needs in ([True, False, False, True], [False, False, True, False], [True] * 4):
            given = [t.clone().requires_grad_(need) for t, need in zip((*X, *W), needs, strict=True)]
            for _ in range(3):
                asked = [t for t in given if t.requires_grad]
                found = torch.autograd.grad(loss(g, *given), asked, allow_unused=True)
                wanted = torch.autograd.grad(loss(forward_of(PAIRS[name]), *given), asked, allow_unused=True)
                assert_close(found, wanted)

    def test_of_states_that_somebody_holds(self, name):
        def deep(f, a, b, v, w):
            x, held = (a.exp(), b * 1), []
            for _ in range(4):
                held.append(x)
                y = f(x, (v, w))
                x = (x[0] + y[0], y[1])
            return total([t.sin() for pair in (*held, x) for t in pair])

        g = known(PAIRS[name])
        given = leaves()
        wanted = torch.autograd.grad(deep(forward_of(PAIRS[name]), *given), given)
        assert_close(torch.autograd.grad(deep(g, *given), given), wanted)

    def test_beside_watched_calls(self, name):
        g, other = known(PAIRS[name]), block_of(PAIRS["additive"])
        given, found = leaves(), []
        for f, h in ((g, other), (forward_of(PAIRS[name]), PAIRS["additive"])):
            x = given[0] * 1, given[1] * 1
            for one in (f, h, f, f, h):
                x = one(x, tuple(given[2:]))
            found.append(torch.autograd.grad(torch.stack(x).sin().sum(), given))
        assert_close(*found)


def test_exact_couplings_give_every_bit():
    def run(f):
        given = [t.float().requires_grad_() for t in (*X, *W)]
        state = Grid().enter(tuple(given[:2]))
        for _ in range(20):
            state = f(state, tuple(given[2:]))
        return torch.autograd.grad(torch.stack(state).sin().sum(), given)

    g = invertible_checkpoint(EXACT)
    run(g)
    with straight() as count:
        found = run(g)
        assert count() == 20
    for a, b in zip(found, run(EXACT), strict=True):
        assert torch.equal(a, b)


# What is not shown, and what is seen

LIST, ITERATOR = [], iter(range(100))


class Holder:
    value = 1.0

    def __call__(self, x):
        return x * self.value


def assigns(x):
    global FACTOR
    FACTOR = FACTOR
    return x


def named(x):
    named.calls = 1
    return x


def tries(x):
    try:
        return x
    except ValueError:
        return x + 1


def imports(x):
    import math as m

    return x * m.pi


def writes(x):
    held = [x]
    held[0] = x
    return held[0]


def adds(x):
    x += 1
    return x


HOLDER = Holder()
NOT_SHOWN = {
    "a wrapper of a function of torch": functools.wraps(F.silu)(lambda x: F.silu(x) + next(ITERATOR)),
    "random numbers of Python": lambda x: x * random.random(),
    "a list of tensors": lambda x, held=(TENSOR,): x * held[0],
    "a list": lambda x: LIST.append(x) or x,
    "an iterator": lambda x: x * next(ITERATOR),
    "an object": HOLDER,
    "an attribute of an object": lambda x: x * HOLDER.value,
    "a method": HOLDER.__call__,
    "a default that may change": lambda x, held=[]: x,
    "a context": lambda x: torch.no_grad()(lambda: x)(),
    "whether there are gradients": lambda x: x if torch.is_grad_enabled() else 2 * x,
    "memory that is not written": lambda x: torch.empty(3).mul(0) + x,
    "a seed": lambda x: torch.manual_seed(0) and x,
    "whether it is a leaf": lambda x: x if x.is_leaf else 2 * x,
    "its own node": lambda x: x if x.grad_fn is None else 2 * x,
    "identity": lambda x: x if x is TENSOR else 2 * x,
    "a set": lambda x: sum({x, 2 * x}),
    "a private attribute": lambda x: x * x._version,
    "an attribute of its own": lambda x: x * x.scale,
    "printing": lambda x: breakpoint() or x,
    "a gradient": lambda x: torch.autograd.grad(x.sum(), x)[0],
    "a transform": lambda x: vmap(torch.sin)(x),
    "getattr": lambda x: getattr(x, "sin")(),  # noqa: B009
    "a global name": assigns,
    "a name of its own": named,
    "an exception": tries,
    "an import": imports,
    "an item": writes,
    "a write": adds,
}


@pytest.mark.parametrize("name", NOT_SHOWN)
def test_what_is_not_shown(name):
    with pytest.raises(NotShown):
        Purity([NOT_SHOWN[name]])


SEEN = {
    "random numbers": lambda x, w: F.dropout(x @ w, 0.5),
    "more random numbers": lambda x, w: x @ w + torch.rand(3, dtype=torch.float64),
    "a write": lambda x, w: (x @ w).exp_(),
    "a number": lambda x, w: x @ w if x.sum() > 1e9 else x.sin() @ w,
    "a list of numbers": lambda x, w: (x @ w) * len((x > 0).nonzero().tolist()),
    "a value": lambda x, w: (x @ w) * float(w.detach().sum()),
    "a hook": lambda x, w: x @ w if (x @ w).register_hook(lambda g: 2 * g) else x,
}


@pytest.mark.parametrize("name", SEEN)
def test_what_is_seen_in_a_watched_call_is_always_watched(name):
    g = block_of(additive_coupling(SEEN[name], net))
    with straight() as count:
        for _ in range(WATCHED):
            torch.manual_seed(1)
            found = slope(g)
            torch.manual_seed(1)
            assert_close(found, slope(additive_coupling(SEEN[name], net)))
        assert count() == 0


def test_an_inverse_that_draws_is_always_watched():
    g = invertible_checkpoint(couple, lambda y, p: tuple(t + 0 * torch.rand(()) for t in uncouple(y, p)))
    with straight() as count:
        for _ in range(WATCHED):
            torch.manual_seed(1)
            slope(g)
            assert torch.equal(torch.rand(3), torch.rand(3, generator=torch.Generator().manual_seed(1)))
        assert count() == 0
