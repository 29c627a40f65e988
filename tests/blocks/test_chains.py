"""A chain is its blocks one by one, whatever is odd in one of them."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from invfunc import Invertible, additive_coupling, affine_coupling, chain, invertible_checkpoint, repeated
from invfunc.blocks import series
from invfunc.pairs import momentum, reversible_step, runge_kutta
from invfunc.testing import assert_trees_close
from tests.meter import Meter
from tests.strategies import Numbers

X = tuple(Numbers(3)(2, 4, 3))
DEPTH = 5
ADDITIVE = additive_coupling(lambda x, w: torch.tanh(x @ w.T), lambda x, w: (x @ w).softmax(-1) * x)
AFFINE = affine_coupling(lambda x, w: (x @ w, torch.sigmoid(x @ w)), lambda x, w: (x @ w, x.square()))


def total(tensors: Any) -> torch.Tensor:
    return torch.cat([t.sin().flatten() for t in tensors]).sum()


def weights(number: int = DEPTH) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in 0.5 * Numbers(7)(2 * number, 3, 3)]


def pairs_of(ws: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    return [*zip(ws[::2], ws[1::2], strict=True)]


def one_by_one(functions: list[Callable]) -> Callable:
    """The loop that a chain stands for."""

    def run(x: Any, params: Any) -> Any:
        for f, p in zip(functions, params, strict=True):
            x = f(x, p)
        return x

    return run


def start() -> tuple[torch.Tensor, ...]:
    """An x that needs a gradient, and is nobody's."""
    a, b = (t.detach().clone().requires_grad_() * 1 for t in X)
    return a, b


class TestSeries:
    whole = repeated(invertible_checkpoint(ADDITIVE))
    plain = staticmethod(lambda x, params: one_by_one([ADDITIVE] * len(params))(x, params))

    @pytest.mark.parametrize("at", [0, 3, 2 * DEPTH - 1])
    def test_of_one_weight(self, at):
        """Blocks after it are inverted, and no others."""
        ws = weights()
        found = [torch.autograd.grad(total(run(start(), pairs_of(ws))), ws[at]) for run in (self.whole, self.plain)]
        assert_trees_close(*found, 1e-9)

    def test_beside_what_others_hold(self):
        """Its x and its y, which others read and other blocks take over."""
        other, ws, found = invertible_checkpoint(AFFINE), weights(), []
        for run, f in ((self.whole, other), (self.plain, AFFINE)):
            given = [t.detach().clone().requires_grad_() for t in X]
            x = f((given[0].exp(), given[1] * 1), pairs_of(ws)[0])
            y = run(x, pairs_of(ws))
            z = run(f((x[0] + y[0], y[1]), pairs_of(ws)[1]), pairs_of(ws))
            found.append(torch.autograd.grad(total([t for pair in (x, y, z) for t in pair]), [*given, *ws]))
        assert_trees_close(*found, 1e-9)


def test_states_that_pass_through_blocks_are_let_go_of():
    """Each block returns one of its two tensors unchanged."""

    def first(x, p):
        return x[0], x[1] + torch.tanh(x[0] @ p)

    def first_back(y, p):
        return y[0], y[1] - torch.tanh(y[0] @ p)

    def second(x, p):
        return x[0] + torch.tanh(x[1] @ p), x[1]

    def second_back(y, p):
        return y[0] - torch.tanh(y[1] @ p), y[1]

    pairs, held = ((first, first_back), (second, second_back)), []
    blocks = [invertible_checkpoint(*pair, check="off") for pair in pairs]
    for depth in 2, 6:
        net, ps = chain(*blocks * depth), [torch.zeros(3, 3, requires_grad=True) for _ in range(2 * depth)]
        for _ in range(5):
            y = net(tuple(torch.randn(77, 3, requires_grad=True) * 1 for _ in range(2)), ps)
            states = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.shape == (77, 3)]
            count = len({t.untyped_storage().data_ptr() for t in states})
            del states
            total(y).backward()
            del y
        held.append(count)
    assert held[0] == held[1]


# Many equal steps on a small state are one node of autograd: its gradients are those of the loop, and it keeps nothing

STEPS = 12


def field(net, a):
    return reversible_step(runge_kutta(lambda x, t, p: net(x) * a * p + t))


def looped(pair, state, times, p):
    for start, end in zip(times[:-1], times[1:], strict=True):
        state = pair(state, (start, end), p)
    return state


def slopes(solve, net, a, second=False, times=1, **of):
    x = torch.linspace(-1, 1, 10).double().view(5, 2).requires_grad_()
    t, p = torch.linspace(0, 1, STEPS + 1).double().requires_grad_(), torch.tensor(0.7).double().requires_grad_()
    state = solve((x * 1, x * 1), t, p * 1)
    loss = state[0].sin().sum() + state[1].square().sum()
    inputs = [x, t, p, a, *net.parameters()]
    for _ in range(times):
        found = torch.autograd.grad(loss, inputs, create_graph=second, retain_graph=True)
    return torch.autograd.grad(sum(g.sin().sum() for g in found), inputs) if second else found


@pytest.mark.parametrize("at_once", [1, 2**14, 2**18])
@pytest.mark.parametrize("options", [{}, {"second": True}, {"times": 2}])
def test_equals_the_loop(options, at_once, monkeypatch):
    """However many of them go backwards in one pass."""
    monkeypatch.setattr(series, "AT_ONCE", at_once)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 2)).double()
    a = torch.tensor(1.3).double().requires_grad_()
    pair = field(net, a)
    wanted = slopes(lambda *given: looped(pair, *given), net, a, **options)
    found = slopes(lambda s, t, p: repeated(pair)(s, (t[:-1], t[1:]), p), net, a, **options)
    for g, w in zip(found, wanted, strict=True):
        torch.testing.assert_close(g, w, rtol=1e-9, atol=1e-11)


def kept(steps, hidden=()):
    pair = Invertible(lambda x, c: x + torch.tanh(c * hidden[0]) if hidden else x * c, lambda y, c: y / c)
    x, c = torch.ones(4, requires_grad=True), torch.ones(steps)
    with Meter() as meter:
        y = repeated(pair)(x * 1, c)
        found = meter.live()
        y.sum().backward()
    return found


def test_memory_does_not_grow_with_their_number():
    kept(STEPS)
    gc.collect()
    assert kept(20 * STEPS) - kept(STEPS) <= 0


@pytest.mark.parametrize("places", ["closure", "iterator"])
def test_what_is_closed_over_gets_its_gradient_where_x_needs_none(places):
    """Also where no structure leads to it: then the steps are a block each."""
    w = torch.ones(4, requires_grad=True)
    hide = iter([w] * 100).__next__
    step = {"closure": lambda x, c: x + w * c, "iterator": lambda x, c: x + hide() * c}[places]
    pair = Invertible(step, lambda y, c: y - torch.ones(4) * c)
    (found,) = torch.autograd.grad(repeated(pair)(torch.zeros(4), torch.ones(STEPS)).sum(), w)
    assert torch.equal(found, torch.full((4,), float(STEPS)))


def test_what_was_written_since_is_an_error():
    w, c = torch.ones(4, requires_grad=True), torch.ones(4)
    pair = Invertible(lambda x, c: x * c + torch.sin(w), lambda y, c: (y - torch.sin(w)) / c)
    for written in (w, c):
        y = repeated(pair)(torch.ones(4, requires_grad=True) * 1, [c] * STEPS)
        with torch.no_grad():
            written.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.sum().backward()


def test_a_state_may_begin_expanded_and_draws_from_generators_may_come_late():
    w, u = Numbers(0)(4, 4).requires_grad_(), Numbers(1)(3, 4)

    def f(x, gen=None):
        return torch.tanh(x @ w) + (0 if gen is None else torch.rand(x.shape, generator=gen, dtype=x.dtype))

    step, each = momentum(f, 0.8), []
    for start in (torch.zeros(1, 4).to(u).expand(3, 4), torch.zeros(3, 4).to(u)):
        for way in (repeated(step), lambda state, args: looped_over(step, state, args)):
            args = [None, *[torch.Generator().manual_seed(0)] * (STEPS - 1)]
            each += torch.autograd.grad(way((u, start), args)[0].sin().sum(), w)
    for found in each[1:]:
        torch.testing.assert_close(found, each[0], rtol=1e-9, atol=1e-11)


def looped_over(pair, state, args):
    for arg in args:
        state = pair.forward(*pair.shared, state, *([] if arg is None else [arg]))
    return state
