"""Blocks whose inverse is found, and those of modules that bring theirs, which are not watched from some call on."""

import gc
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import grad

from invfunc import (
    InverseError,
    InvFuncError,
    ModifiedError,
    from_module,
    functional,
    invert,
    invertible_checkpoint,
    with_log_det,
)
from tests.recomputation.straight_cases import (
    WATCHED,
    assert_close,
    couple,
    leaves,
    net,
    scaled,
    shift,
    slope,
    slope_within,
    straight,
)
from tests.strategies import Numbers

SHIFT = Numbers(5)(3)
UNUSUAL = 0.123456


def halved(x, p):
    a, b = torch.stack(x).chunk(2, -2)
    a = a + F.linear(b, p[0]) * p[1].sum()
    b = b * torch.sigmoid(a.mean(-1, keepdim=True)) - 2 * SHIFT
    return torch.cat([a, b], -2).unbind()


def swapped(x, p):
    a, b = x
    return b + net(a, p[0]), a * p[1].exp()[0]


def made_within(x, p):
    return x[0] + net(x[1], p[0]) * torch.full((4, 3), UNUSUAL, dtype=torch.float64), x[1] - p[1].sum()


FUNCTIONS = {"couple": couple, "shift": shift, "scaled": scaled, "halves": halved, "swapped": swapped}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def known(f, way=slope):
    g = invertible_checkpoint(f)
    for _ in range(WATCHED):
        way(g)
    return g


class TestFound:
    """Inverses that are found."""

    @each_function
    @pytest.mark.parametrize("way", [slope, slope_within], ids=["autograd", "grad"])
    def test_gradients_are_those_of_the_function(self, name, way):
        if way is slope_within and name == "halves":
            pytest.skip("what is closed over is watched there")
        f = FUNCTIONS[name]
        g = known(f, way)
        with straight() as count:
            found = way(g, number=5)
            assert count() == 5
        assert_close(found, way(f, number=5))

    @each_function
    def test_the_steps_are_found_once(self, name, monkeypatch):
        """Also for other numbers: f is recorded no more."""
        from invfunc.pairs.automatic.found import FoundPair

        f = FUNCTIONS[name]
        g, given = known(f), leaves(tuple(2 * Numbers(7)(2, 4, 3)), tuple(Numbers(8)(2, 3, 3)))
        monkeypatch.setattr(FoundPair, "_record", None)
        assert_close(slope(g, given), slope(f, given))

    def test_what_is_made_within_is_found_in_each_call(self):
        """As it would be kept for all."""
        g = known(made_within)
        assert_close(slope(g, number=3), slope(made_within, number=3))
        gc.collect()
        tensors = [t for t in gc.get_objects() if type(t) is torch.Tensor and t.shape == (4, 3) and not t.is_meta]
        assert not any((t == UNUSUAL).all() for t in tensors)

    @pytest.mark.parametrize("tied", [False, True])
    def test_of_modules(self, tied):
        torch.manual_seed(0)
        one, two = nn.Linear(3, 3).double(), nn.Linear(3, 3).double()
        if tied:
            two.weight = one.weight

        def f(x):
            a = x[0] + torch.tanh(one(x[1]))
            return a, x[1] + torch.tanh(two(a))

        g, given = invertible_checkpoint(f), leaves()[:2]
        weights = [*one.parameters(), *two.parameters()]

        def of(f):
            x = f(f(tuple(t * 1 for t in given)))
            return torch.autograd.grad(torch.stack(x).sin().sum(), [*given, *weights])

        for _ in range(WATCHED):
            of(g)
        with straight() as count:
            found = of(g)
            assert count() == 2
        assert_close(found, of(f))
        with torch.no_grad():  # the steps read what is there now
            one.weight.mul_(0.5)
            two.weight = nn.Parameter(one.weight.detach() + 1)
            weights = [*one.parameters(), *two.parameters()]
        assert_close(of(g), of(f))

    def test_a_weight_that_is_written_before_the_backward_pass_is_an_error(self):
        layer = nn.Linear(3, 3).double()
        g = invertible_checkpoint(lambda x: (x[0] + layer(x[1]), x[1]))
        for _ in range(WATCHED):
            torch.stack(g(tuple(t * 1 for t in leaves()[:2]))).sum().backward()
        y = torch.stack(g(g(tuple(t * 1 for t in leaves()[:2])))).sin().sum()
        with torch.no_grad():
            layer.weight.mul_(2)
        with pytest.raises(ModifiedError):
            y.backward()

    @pytest.mark.parametrize(
        "part",
        [
            lambda x, w: F.dropout(x @ w, 0.5),
            lambda x, w: x @ w if w.sum() > 1e9 else x.sin() @ w,
            lambda x, w: (x @ w) * float(w.detach().sum()),
        ],
        ids=["random numbers", "a number", "a value"],
    )
    def test_what_is_seen_in_a_watched_call_is_always_watched(self, part):
        def f(x, p):
            return x[0] + part(x[1], p[0]), x[1] + 0 * p[1].sum()

        g = invertible_checkpoint(f)
        with straight() as count:
            for _ in range(WATCHED):
                torch.manual_seed(1)
                found = slope(g)
                torch.manual_seed(1)
                assert_close(found, slope(f))
            assert count() == 0

    @pytest.mark.parametrize("needs", [True, False])
    def test_whether_a_gradient_is_needed_may_be_asked(self, needs):
        def f(x, w):
            return x[0] + (x[1] @ w if w.requires_grad else x[1].sin() @ w), x[1]

        g, x, w = invertible_checkpoint(f), leaves()[:2], leaves()[2].detach().requires_grad_(needs)
        for _ in range(WATCHED):
            found, wanted = (
                torch.autograd.grad(torch.stack(h(tuple(t * 1 for t in x), w)).sin().sum(), x) for h in (g, f)
            )
            assert_close(found, wanted)

    def test_nothing_is_kept_alive(self):
        held = []

        def once():
            weight = torch.ones(3, requires_grad=True)
            held.append(weakref.ref(weight))
            g = invertible_checkpoint(lambda x: (x[0] + x[1] * weight, x[1]))
            for _ in range(WATCHED):
                torch.stack(g((torch.ones(3) * 1, torch.ones(3) * weight))).sum().backward()

        once()
        gc.collect()
        assert held[0]() is None


class Flow(nn.Module):
    """As libraries of flows write them."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(Numbers(1)(4))
        self.net = nn.Sequential(nn.Linear(2, 2, bias=False), nn.Tanh()).double()

    def changed(self, x, sign):
        a, b = x.chunk(2, -1)
        return torch.cat([a + sign * self.net(b), b], -1)

    def forward(self, x):
        return self.changed(x, 1) * self.scale.exp(), self.scale.sum().expand(len(x))

    def inverse(self, y):
        return self.changed(y * (-self.scale).exp(), -1), -self.scale.sum().expand(len(y))


class Reversed(Flow):
    """The same behind one argument."""

    def forward(self, x, rev=False):
        (x,) = x
        found = self.changed(x * (-self.scale).exp(), -1) if rev else self.changed(x, 1) * self.scale.exp()
        return (found,), (-1 if rev else 1) * self.scale.sum()


class Alone(Flow):
    """Without a log-determinant."""

    def forward(self, x):
        return self.changed(x, 1) * self.scale.exp()

    def inverse(self, y):
        return self.changed(y * (-self.scale).exp(), -1)


MADE = {
    "inverse": (Flow, from_module),
    "rev": (Reversed, from_module),
    "no determinant": (Alone, lambda flow: from_module(flow, log_det=False)),
    "inverted": (Flow, lambda flow: invert(from_module(flow))),
    "log-determinant": (Flow, lambda flow: with_log_det(from_module(flow))),
    "log-determinant, inverted": (Flow, lambda flow: invert(with_log_det(from_module(flow)))),
}
each_made = pytest.mark.parametrize("name", MADE)


def through(blocks, name, x, *args):
    state = (x * 1, torch.zeros(len(x), dtype=x.dtype)) if "log" in name else x * 1
    for block in blocks:
        state = block(state, *args)
    return torch.stack([t.sin().sum() for t in (state if isinstance(state, tuple) else (state,))]).sum()


class TestModules:
    """Modules that bring their inverse."""

    @each_made
    def test_gradients_are_those_of_the_module(self, name):
        flow, pair = MADE[name]
        module = flow()
        block, x = invertible_checkpoint(pair(module)), Numbers(3)(3, 4).requires_grad_()
        weights = [*module.parameters()]
        for _ in range(WATCHED):
            through([block] * 3, name, x).backward()
        with straight() as count:
            found = torch.autograd.grad(through([block] * 3, name, x), [x, *weights])
            assert count() == 3
        assert_close(found, torch.autograd.grad(through([block.pair] * 3, name, x), [x, *weights]))

    @each_made
    def test_with_parameters_of_functional(self, name):
        flow, pair = MADE[name]
        module = flow()
        block, x, params = invertible_checkpoint(pair(module)), Numbers(3)(3, 4), functional(module)[1]
        other = {key: 0.5 * p for key, p in params.items()}
        for given in [params] * WATCHED + [other]:
            found = grad(lambda p: through([block] * 2, name, x, p))(given)
            wanted = grad(lambda p: through([block.pair] * 2, name, x, p))(given)
            assert_close(found.values(), wanted.values())

    @each_made
    def test_a_wrong_inverse_is_seen(self, name):
        flow, pair = MADE[name]
        module = flow()
        block, x = invertible_checkpoint(pair(module), check="error"), Numbers(3)(3, 4).requires_grad_()
        for _ in range(WATCHED):
            through([block], name, x).backward()
        loss = through([block] * 2, name, x)
        module.changed = lambda x, sign: x
        with pytest.raises(InvFuncError):
            loss.backward()

    def test_a_carried_sum_that_begins_at_nearly_zero_is_no_alarm(self):
        pairs = [with_log_det(from_module(Flow())) for _ in range(3)]
        for pair, total in zip(pairs, (0.1, 0.2, 0.3), strict=True):
            pair.forward.law.part.module.module.scale.data = torch.tensor([total, 0, 0, 0], dtype=torch.float64)
        a, b, c = pairs
        blocks = [invertible_checkpoint(pair, check="error") for pair in (a, b, invert(b), invert(a), c)]
        for _ in range(WATCHED):
            x = (1e-12 * Numbers(3)(3, 4)).requires_grad_()  # of no size beside which the sum is faint
            through(blocks, "log", x).backward()
        with straight() as count:
            through(blocks, "log", x).backward()
            assert count() == 5

    def test_an_inverse_that_is_none_is_seen(self):
        class Wrong(Flow):
            def inverse(self, y):
                return y * (-self.scale).exp() + 1e-3 * y.relu(), -self.scale.sum()

        block, x = invertible_checkpoint(from_module(Wrong()), check="error"), Numbers(3)(3, 4).requires_grad_()
        for _ in range(WATCHED):
            with pytest.raises(InverseError):
                through([block] * 2, "", x).backward()
