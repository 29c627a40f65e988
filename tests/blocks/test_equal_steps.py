"""Many equal steps on a small state are one node of autograd: its gradients are those of the loop, and it keeps nothing
for a step."""

import gc

import pytest
import torch
from torch import nn

from invfunc import Invertible, repeated
from invfunc.pairs import reversible_step, runge_kutta
from tests.meter import Meter

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


@pytest.mark.parametrize("options", [{}, {"second": True}, {"times": 2}])
def test_equals_the_loop(options):
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
