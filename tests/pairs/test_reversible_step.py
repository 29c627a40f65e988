"""Solvers that run backwards: their order, the way back, noise, and what they refuse."""

import math
from functools import partial

import pytest
import torch

from invfunc import invert, repeated, tree
from invfunc.errors import ArgumentError, ArgumentTypeError, InverseError
from invfunc.pairs import drift, reversible_step, runge_kutta
from invfunc.testing import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.strategies import Numbers

TURN = torch.tensor([[-0.3, -2.0], [2.0, -0.3]], dtype=torch.float64)
X = torch.tensor([[1.0, 0.5], [-0.5, 0.2]], dtype=torch.float64)
ORDERS = {"euler": 1, "midpoint": 2, "heun": 2, "rk4": 4, "ees25": 2}
KUTTA = ([[], [1 / 3], [-1 / 3, 1], [1, -1, 1]], [1 / 8, 3 / 8, 3 / 8, 1 / 8])
SCHEMES = [("euler", 1), ("midpoint", 0.99), ("heun", 0.99), ("rk4", 0.99), ("rk4", 0.999), (KUTTA, 0.9)]


def turning(x, t, w=TURN):
    return torch.tanh(x @ w) * (1 + t.sin() if isinstance(t, torch.Tensor) else 1 + math.sin(t))


def grid(steps, end=4.0):
    return torch.linspace(0, end, steps + 1, dtype=torch.float64)


def between(steps, end=4.0):
    """The starts and the ends of steps."""
    return grid(steps, end)[:-1], grid(steps, end)[1:]


def solved(step, steps):
    return repeated(step)((X, X), between(steps))


def each_by_itself(step, state, ends, *args):
    for way in zip(*(zip(*e, strict=True) if isinstance(e, tuple) else e for e in ends), strict=True):
        state = step(state, way, *args)
    return state


def plain(increment, steps, *args, end=4.0):
    return each_by_itself(lambda x, ends, *args: x + increment(x, *ends, *args), X, between(steps, end), *args)


RK4, ONE = runge_kutta(turning), reversible_step(runge_kutta(turning, "ees25"), None)


def euler_heun(x, start, end, w):
    """A step of dx = tanh(x w) dt + sin(x) o dW, in the sense of Stratonovich."""
    (t, path), (s, later) = start, end
    noise = later - path
    predicted = x + x.sin() * noise
    return torch.tanh(x @ w) * (s - t) + (x.sin() + predicted.sin()) / 2 * noise


def brownian(steps):
    """A path at the ends of steps."""
    noise = Numbers(3)(steps, *X.shape) / steps**0.5
    return torch.cat([torch.zeros(1, *X.shape, dtype=torch.float64), noise.cumsum(0)])


def along(path):
    """Steps from 0 to 1 along a path."""
    starts, ends = between(len(path) - 1, 1.0)
    return (starts, path[:-1]), (ends, path[1:])


@pytest.mark.quick
class TestOrder:
    EXACT = plain(runge_kutta(turning), 2000)
    STEPS = {1: (100, 200), 2: (80, 160), 4: (20, 40, 80)}

    @pytest.mark.parametrize(("tableau", "coupling"), SCHEMES, ids=str)
    def test_is_that_of_the_scheme(self, tableau, coupling):
        """At each halving of the step the error of both copies is divided by 2 to the power of the order.

        (Copies that are drawn together, as over some 100 steps of 0.99, have errors of Euler's step that cancel.)
        """
        step = reversible_step(runge_kutta(turning, tableau), coupling)
        order = ORDERS.get(str(tableau), 4)
        errors = [[(t - self.EXACT).abs().max() for t in solved(step, n)] for n in self.STEPS[order]]
        for coarse, fine in zip(errors, errors[1:], strict=False):
            for a, b in zip(coarse, fine, strict=True):
                assert abs(math.log2(a / b) - order) < 0.3

    @pytest.mark.parametrize("tableau", ORDERS)
    def test_of_a_scheme_is_measured_without_copies(self, tableau):
        errors = [(plain(runge_kutta(turning, tableau), n) - self.EXACT).abs().max() for n in (100, 200)]
        assert abs(math.log2(errors[0] / errors[1]) - ORDERS[tableau]) < 0.3


class TestBackwards:
    @pytest.mark.parametrize("steps", [20, 120])
    def test_the_start_comes_back(self, steps):
        step, ends = reversible_step(runge_kutta(turning)), between(steps)
        y, z = solved(step, steps)
        assert_trees_close(invert(repeated(step))((y, z), ends), (X, X), 1e-14)
        assert max(drift(step, (X, X), ends)) < 1e-14

    @pytest.mark.parametrize(("step", "copies", "rtol"), [(reversible_step(RK4), 2, 1e-12), (ONE, 1, 1e-6)])
    def test_gradients_are_those_of_plain_autograd_in_flat_memory(self, step, copies, rtol):
        x, peaks = X.repeat(5000, 1), []
        for steps in (10, 40):
            found = []
            for h in (partial(each_by_itself, step), repeated(step)):
                given_ = [t.clone().requires_grad_() for t in (x, TURN / 2, grid(steps, 0.05 * steps))]
                start, w, times = given_
                with nothing_collected(), Meter() as meter:
                    state = start * 1 if copies == 1 else (start * 1, start * 1)
                    state = h(state, (times[:-1], times[1:]), w)
                    tree.leaves(state)[0].sin().sum().backward()
                    del state
                    peaks.append(meter.peak())
                found.append([t.grad for t in given_])
            assert_trees_close(found[1], found[0], rtol)
        assert peaks[2] > 2 * peaks[0] and peaks[3] <= 1.05 * peaks[1]

    def test_replays_noise_on_its_path(self):
        """Both directions see the same path, which is a part of what a step goes along."""
        path, step = brownian(40), reversible_step(euler_heun)
        y, z = repeated(step)((X, X), along(path), TURN)
        assert_trees_close(invert(repeated(step))((y, z), along(path), TURN), (X, X), 1e-14)
        found, wanted = (
            torch.func.grad(lambda w, path, h=h: sum(t.square().sum() for t in h((X, X), along(path), w)), (0, 1))(
                TURN, path
            )
            for h in (repeated(step), partial(each_by_itself, step))
        )
        assert_trees_close(found, wanted, 1e-11)

    def test_of_noise_has_the_order_of_the_scheme(self):
        """On one fine path: strong order 1, as noise that moves each entry by itself commutes."""
        fine, step = brownian(1024), repeated(reversible_step(euler_heun))
        with torch.no_grad():
            ends = [step((X, X), along(fine[:: 1024 // steps]), TURN)[0] for steps in (16, 64, 1024)]
        coarse, half = ((t - ends[-1]).abs().max() for t in ends[:2])
        assert coarse / half > 2.5 and half < 0.05


class TestOneCopy:
    def test_registers_its_modules(self):
        step = reversible_step(runge_kutta(torch.nn.Bilinear(2, 1, 2), "ees25"), None)
        assert len([*repeated(step).module().parameters()]) == 2

    @pytest.mark.quick
    def test_a_step_back_misses_the_start_by_the_sixth_power(self):
        missed = [(invert(ONE)(ONE(X, (0.3, 0.3 + h)), (0.3, 0.3 + h)) - X).abs().max() for h in (0.2, 0.1)]
        assert abs(math.log2(missed[0] / missed[1]) - 6) < 0.3

    def test_is_stable_where_copies_are_not_and_its_way_back_needs_anchors(self):
        """Towards cos(t), one entry 50 times faster than the other: h times that is 2.5."""
        fast, ends = torch.tensor([50.0, 1.0], dtype=torch.float64, requires_grad=True), between(100, 5.0)
        scheme = partial(runge_kutta, lambda x, t, fast: fast * (t.cos() - x))
        for tableau in ("heun", "rk4", "ees25"):
            y, _ = repeated(reversible_step(scheme(tableau), 1))((X, X), ends, fast)
            assert (y[:, 0] - math.cos(5)).abs().max() > 1
        step, end = reversible_step(scheme("ees25"), None), plain(scheme("ees25"), 100, fast, end=5.0)
        assert (end[:, 0] - math.cos(5)).abs().max() < 0.1
        found = torch.autograd.grad(repeated(step, anchor_every=4)(X, ends, fast).sum(), fast)
        assert_trees_close(found, torch.autograd.grad(end.sum(), fast), 1e-3)
        assert drift(step, X, ends, fast)[-1] > 1
        with pytest.raises(InverseError, match="with an error of.*anchor_every="):
            repeated(step)(X, ends, fast).sum().backward()


SOLVER, SINE = reversible_step(runge_kutta(torch.sin)), runge_kutta(torch.sin)
W = torch.ones(2)


REFUSED = [
    (lambda: SOLVER(({"a": X, "b": 2},) * 2, (0, 1)), r"=0.99\): x has to be a pair of tensors, but is tuple of dict"),
    (lambda: reversible_step(torch.sin, 1.5), r"reversible_step\(sin, coupling=1.5\): coupling.*above 0 and at most 1"),
    (lambda: reversible_step(torch.sin, 0), "above 0 and at most 1"),
    (
        lambda: SOLVER((X, X)),
        r"^reversible_step\(runge_kutta\(sin, 'rk4'\), .*: the second argument.*is of type NoneType",
    ),
    (lambda: SOLVER((X, X), (W,)), r"has to be \(start, end\).*but is a tuple of \[0\].*\(start, end, p\)"),
    (lambda: SOLVER((X, X[:1]), (0, 1)), r"z is a tensor of shape \[1, 2\], but y, .* of shape \[2, 2\]"),
    (lambda: reversible_step(lambda x, *_: x[:1], None)(X, (0, 1)), r"what increment returns is .* \[1, 2\], but x, "),
    (lambda: reversible_step(lambda x, *_: tuple(x))(([X],) * 2, (0, 1)), "increment returns is a tuple of.*a list of"),
    (lambda: SINE(X, W, W), r"^runge_kutta\(sin, 'rk4'\): start is a tensor of shape \[2\], but has to be a number"),
    (lambda: runge_kutta(lambda x, t: W)(X, 0, 1), r"what field returns is a tensor of shape \[2\], but x"),
    (lambda: runge_kutta(torch.sin, "rk5"), r"'rk5'\): the tableau is one of 'euler', 'midpoint', 'heun', 'rk4', 'e"),
    (lambda: runge_kutta(torch.sin, ([[1]], [1])), "the at most i stages before"),
    (lambda: runge_kutta(torch.sin, ([[]], [0.5, 0.5])), "b has one for each row"),
]


@pytest.mark.parametrize(("fn", "reason"), REFUSED, ids=[reason[:40] for _, reason in REFUSED])
def test_what_is_refused(fn, reason):
    with pytest.raises((ArgumentError, ArgumentTypeError), match=reason):
        fn()
