"""Blocks of a chain whose calls need not be watched are one series: it is the chain, whatever is odd in one of them."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from invfunc import (
    Grid,
    InexactWarning,
    InverseError,
    Invertible,
    ModifiedError,
    RangeError,
    ReplayError,
    additive_coupling,
    chain,
    invertible_checkpoint,
    repeated,
)
from invfunc.recomputation.slots import Between
from invfunc.recomputation.straight_hooks import Series
from tests.recomputation.straight_cases import (
    EXACT,
    PAIRS,
    WATCHED,
    X,
    assert_close,
    block_of,
    forward_of,
    known,
    net,
    slope_within,
    straight,
    total,
)
from tests.strategies import Numbers

DEPTH = 5


def weights(number: int = DEPTH) -> list[torch.Tensor]:
    return [t.requires_grad_() for t in 0.5 * Numbers(7)(2 * number, 3, 3)]


def pairs_of(ws: list[torch.Tensor]) -> list[tuple[torch.Tensor, ...]]:
    return [*zip(ws[::2], ws[1::2], strict=True)]


def one_by_one(functions: list[Callable]) -> Callable:
    """What a chain of them is."""

    def run(x: Any, params: Any) -> Any:
        for f, p in zip(functions, params, strict=True):
            x = f(x, p)
        return x

    return run


def start() -> tuple[torch.Tensor, ...]:
    """An x that needs a gradient, and is nobody's."""
    a, b = (t.detach().clone().requires_grad_() * 1 for t in X)
    return a, b


def slope(run: Callable, ws: list[torch.Tensor], **options: Any) -> Any:
    x = [t.detach().clone().requires_grad_() for t in X]
    y = run((x[0] * 1, x[1] * 1), pairs_of(ws))
    asked = [t for t in (*x, *ws) if t.requires_grad]
    return torch.autograd.grad(total([t.sin() for t in y]), asked, allow_unused=True, **options)


kinds = st.lists(st.sampled_from([*PAIRS]), min_size=1, max_size=6)


@settings(max_examples=6)
@given(kinds, st.data())
def test_a_chain_is_its_blocks_one_by_one(names, data):
    """Of any kinds in any order, some of them with an input that is kept, some of whose parameters are frozen."""
    made = {name: block_of(PAIRS[name]) for name in names}
    kept = data.draw(st.sets(st.integers(0, len(names) - 1), max_size=1))
    blocks = [block_of(PAIRS[name], keep=True) if i in kept else made[name] for i, name in enumerate(names)]
    frozen = data.draw(st.sets(st.integers(0, 2 * len(names) - 1), max_size=2))
    ws = weights(len(names))
    for i in frozen:
        ws[i].requires_grad_(False)
    whole = chain(*blocks)
    wanted = slope(one_by_one([forward_of(PAIRS[name]) for name in names]), ws)
    for _ in range(WATCHED):
        assert_close(slope(whole, ws), wanted)
    with straight() as count:
        assert_close(slope(whole, ws), wanted)
        assert count() == len(names) - len(kept)
    assert_close(slope(one_by_one(blocks), ws), wanted)


def series_of(number: int, **options: Any) -> tuple[Callable, list[torch.Tensor]]:
    """A chain of couplings that need not be watched, and its weights."""
    whole, ws = repeated(known(PAIRS["additive"], **options)), weights(number)
    for _ in range(WATCHED):
        slope(whole, ws)
    return whole, ws


class TestSeries:
    plain = staticmethod(lambda x, params: one_by_one([forward_of(PAIRS["additive"])] * len(params))(x, params))

    def test_twice_and_of_higher_order(self):
        whole, ws = series_of(DEPTH)
        found = []
        for run in (whole, self.plain):
            x = [t.detach().clone().requires_grad_() for t in X]
            y = total([t.sin() for t in run((x[0] * 1, x[1] * 1), pairs_of(ws))])
            again = torch.autograd.grad(y, [*x, *ws], retain_graph=True)
            first = torch.autograd.grad(y, [*x, *ws], create_graph=True)
            second = torch.autograd.grad(total([t.square() for t in first]), [*x, *ws])
            assert_close(again, first)
            found.append((*first, *second))
        assert_close(*found)

    @pytest.mark.parametrize("at", [0, 3, 2 * DEPTH - 1])
    def test_of_one_weight(self, at):
        """What is behind it is inverted and no more."""
        whole, ws = series_of(DEPTH)
        found = []
        for run in (whole, self.plain):
            y = run(start(), pairs_of(ws))
            found.append(torch.autograd.grad(total([t.sin() for t in y]), ws[at]))
        assert_close(*found)

    def test_beside_what_others_hold(self):
        """Its x and its y, which others read and other blocks take over."""
        whole, ws = series_of(DEPTH)
        other = known(PAIRS["affine"])
        found = []
        for run, f in ((whole, other), (self.plain, PAIRS["affine"])):
            given = [t.detach().clone().requires_grad_() for t in X]
            x = f((given[0].exp(), given[1] * 1), pairs_of(ws)[0])
            y = run(x, pairs_of(ws))
            z = run(f((x[0] + y[0], y[1]), pairs_of(ws)[1]), pairs_of(ws))
            found.append(torch.autograd.grad(total([t.sin() for pair in (x, y, z) for t in pair]), [*given, *ws]))
        assert_close(*found)

    def test_inside_of_grad(self):
        g = known(PAIRS["additive"], slope_within)
        whole, ws = repeated(g), [w.detach() for w in weights()]

        def of(run):
            def value(ws):
                return total([t.sin() for t in run(X, pairs_of(ws))])

            return torch.func.grad(value)(ws)

        of(whole)
        with straight() as count:
            found = of(whole)
            assert count() == DEPTH
        assert_close(found, of(self.plain))

    def test_states_between_are_let_go_of(self):
        whole, ws = series_of(20, check="off")
        states, alive = [], []
        goes_on, fill = Series.goes_on, Between.fill

        def noted(tensor):
            states.append(weakref.ref(tensor))

        def going(self, *given):
            done = goes_on(self, *given)
            for leaf in self.flat[0]:
                noted(leaf)
            return done

        def filling(self, tensor, *given):
            fill(self, tensor, *given)
            noted(self.find())
            alive.append(sum(state() is not None for state in states))

        with mock.patch.object(Series, "goes_on", going), mock.patch.object(Between, "fill", filling):
            y = whole(start(), pairs_of(ws))
            assert sum(state() is not None for state in states) == 2
            total(y).backward()
        assert len(alive) == 2 * 19 and max(alive) <= 2 + 4

    def test_what_passes_through_a_block_is_let_go_of(self):
        """Also where blocks that are watched come between: a slot that nobody takes over would hold it."""

        def first(x, p):
            return x[0], x[1] + torch.tanh(x[0] @ p)

        def first_back(y, p):
            return y[0], y[1] - torch.tanh(y[0] @ p)

        def second(x, p):
            return x[0] + torch.tanh(x[1] @ p), x[1]

        def second_back(y, p):
            return y[0] - torch.tanh(y[1] @ p), y[1]

        seen = {}

        def watched(x, p):
            seen["x"] = 1
            return second(x, p)

        pairs = (watched, second_back), (first, first_back), (second, second_back)
        blocks, held = [invertible_checkpoint(Invertible(*pair), check="off") for pair in pairs], []
        for depth in 2, 6:
            net, ps = chain(*blocks * depth), [torch.zeros(3, 3, requires_grad=True) for _ in range(3 * depth)]
            for _ in range(5):
                x = tuple(torch.randn(77, 3, requires_grad=True) * 1 for _ in range(2))
                y = net(x, ps)
                del x
                states = [t for t in gc.get_objects() if isinstance(t, torch.Tensor) and t.shape == (77, 3)]
                count = len({t.untyped_storage().data_ptr() for t in states})
                del states
                total(y).backward()
                del y
            held.append(count)
        assert held[0] == held[1]

    def test_is_freed_with_its_graph(self):
        whole, ws = series_of(DEPTH)
        gc.collect()
        gc.disable()
        try:
            y = whole(start(), pairs_of(ws))
            made = [held for held in gc.get_objects() if type(held) is Between]
            assert len(made) == 2 * (DEPTH - 1)
            alive = [weakref.ref(held) for held in made]
            made.clear()
            del y
            assert not any(held() for held in alive)
        finally:
            gc.enable()


def test_is_known_where_the_first_x_is_held():
    """So that the first block is not inverted, of all of which it has the form."""
    whole, ws = repeated(block_of(PAIRS["additive"])), weights()
    x = [t.detach().clone().requires_grad_() for t in X]
    for _ in range(2):
        total(whole((x[0], x[1]), pairs_of(ws))).backward()
    with straight() as count:
        whole((x[0], x[1]), pairs_of(ws))
        assert count() == DEPTH


def draws(x, p):
    return x[0] + F.dropout(net(x[1], p[0]), 0.5), x[1]


def undraws(y, p):
    return y[0] - F.dropout(net(y[1], p[0]), 0.5), y[1]


HELD = []


def leaves_something(x, p):
    HELD.append(1)
    return x[0] + net(x[1], p[0]), x[1]


def takes(y, p):
    return y[0] - net(y[1], p[0]), y[1]


def passes(x, p):
    return x[1], x[0] + net(x[1], p[0])


def passes_back(y, p):
    return y[1] - net(y[0], p[0]), y[0]


HOOKED = nn.Linear(3, 3).double()
HOOKED.register_forward_hook(lambda module, given, result: 2 * result)


ODD = {
    "it draws": (draws, undraws),
    "it leaves something": (leaves_something, takes),
    "it gives a part of x": (passes, passes_back),
    "a module has a hook": additive_coupling(lambda x, w: HOOKED(x) @ w, net),
    "it reads a number": additive_coupling(lambda x, w: x @ w * float(w.detach().sum()), net),
}


@pytest.mark.parametrize("name", ODD)
def test_one_that_is_odd(name):
    """Those around it are series, and it is watched; but what it gives may be what it got."""
    odd, usual = block_of(ODD[name]), block_of(PAIRS["additive"])
    blocks, ws = [usual, usual, odd, usual, usual], weights()
    whole, plain = chain(*blocks), one_by_one([b.pair for b in blocks])

    def seeded(run):
        torch.manual_seed(3)
        return slope(run, ws)

    wanted = seeded(plain)
    for _ in range(WATCHED):
        assert_close(seeded(whole), wanted)
    with straight() as count:
        assert_close(seeded(whole), wanted)
        assert count() == (5 if name == "it gives a part of x" else 4)


def frozen(ws):
    ws[4].requires_grad_(False)


def transposed(ws):
    ws[4] = ws[4].detach().T.contiguous().T.requires_grad_()


def a_parameter(ws):
    ws[4] = nn.Parameter(ws[4].detach())


def tied(ws):
    ws[5] = ws[4]


def named(ws):
    ws[4].forward = None


@pytest.mark.parametrize("change", [frozen, transposed, a_parameter, tied, named])
def test_an_argument_of_another_form(change):
    """A call with it is watched at first."""
    whole, ws = series_of(DEPTH)
    change(ws)
    wanted = slope(TestSeries.plain, ws)
    with straight() as count:
        found = slope(whole, ws)
        assert count() == DEPTH - 1
    assert_close(found, wanted)
    assert_close(slope(whole, ws), wanted)


def test_arguments_that_were_one_tensor_and_are_two():
    """Of what was the same tensor twice, both are looked at."""
    whole, ws = series_of(DEPTH)
    tied(ws)
    slope(whole, ws)
    slope(whole, ws)
    ws[5] = nn.Parameter(ws[4].detach().clone())
    with straight() as count:
        found = slope(whole, ws)
        assert count() == DEPTH - 1
    assert_close(found, slope(TestSeries.plain, ws))


class TestWrong:
    """Something that is not as it was is told of as that of a single block."""

    @pytest.mark.parametrize("check", ["error", "warn"])
    def test_an_inverse_in_the_middle(self, check):
        """It is one for small numbers, and none for those that come in the end; the others are no part of that."""

        def unmoved(y, p):
            return y[0] - net(y[1], p[0]) * p[1].mean() * (y[1].abs() < 50), y[1]

        def moved(x, p):
            return x[0] + net(x[1], p[0]) * p[1].mean(), x[1]

        usual, wrong = (block_of(pair, check=check) for pair in (PAIRS["one part"], (moved, unmoved)))
        whole, ws = chain(usual, usual, wrong, usual, usual), weights()
        for _ in range(2 * WATCHED):
            slope(whole, ws)
        x = [(100 * t).requires_grad_() for t in X]
        y = whole((x[0] * 1, x[1] * 1), pairs_of(ws))
        told = pytest.raises(InverseError) if check == "error" else pytest.warns(InexactWarning)
        with told as found:
            torch.autograd.grad(total(y), x)
        message = str(found.value if check == "error" else found[0].message)
        assert "moved, " in message and "unmoved" in message

    def test_an_argument_that_is_written(self):
        whole, ws = series_of(DEPTH)
        y = whole(start(), pairs_of(ws))
        with torch.no_grad():
            ws[4].mul_(2)
        with pytest.raises(ModifiedError, match="further argument"):
            torch.autograd.grad(total(y), ws[:2])

    def test_a_function_that_is_exchanged(self):
        def f(x, w, scale=0.5):
            return torch.tanh(x @ w) * scale

        whole, ws = repeated(known(additive_coupling(f, net))), weights()
        y = whole(start(), pairs_of(ws))
        f.__defaults__ = (2.0,)
        with pytest.raises(ReplayError, match="exchanged"):
            torch.autograd.grad(total(y), ws)

    def test_an_error_in_a_later_block_is_its_own(self):
        """The numbers leave the grid there, which ends at 256."""
        whole = repeated(block_of(EXACT))
        params = [(torch.full((3, 3), 0.5, requires_grad=True),) * 2] * 8

        def run(size):
            state = Grid().enter((torch.full((2, 3), size), torch.full((2, 3), size)))
            return whole(tuple(t.requires_grad_() for t in state), params)

        for _ in range(WATCHED):
            total(run(1.0)).backward()
        with straight() as count, pytest.raises(RangeError, match=r"^invertible_checkpoint\(.*\)\(x, \.\.\.\): Grid"):
            run(250.0)
        assert count() > 1

    def test_an_interrupted_series(self):
        """What it has taken over comes back."""
        whole, ws = series_of(DEPTH)
        x = [t.detach().clone().requires_grad_() for t in X]
        before = known(PAIRS["additive"])((x[0] * 1, x[1] * 1), pairs_of(ws)[0])
        goes_on, number = Series.goes_on, iter(range(3))

        def interrupted(self, *given):
            if next(number, None) is None:
                raise KeyboardInterrupt
            return goes_on(self, *given)

        with mock.patch.object(Series, "goes_on", interrupted), contextlib.suppress(KeyboardInterrupt):
            whole(before, pairs_of(ws))
        found = torch.autograd.grad(total([t.sin() for t in before]), x)
        y = PAIRS["additive"]((x[0] * 1, x[1] * 1), pairs_of(ws)[0])
        assert_close(found, torch.autograd.grad(total([t.sin() for t in y]), x))
