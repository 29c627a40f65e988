"""Small tensors that are looked at together: nothing is found that would not be found alone, and it is told in time."""

import gc
import warnings
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.func import grad

from invfunc import InexactWarning, InverseError, invertible_checkpoint
from invfunc.recomputation import gathered
from invfunc.recomputation.gathered import Gathered, Glance
from invfunc.recomputation.probe import Comparison
from invfunc.recomputation.report import Known
from tests.recomputation.straight_cases import straight
from tests.strategies import Numbers

WATCHED = 6
DEPTH = 5


def warned(run):
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in caught if issubclass(w.category, InexactWarning)]


def shift(x, w):
    return torch.tanh(x @ w)


def forward(x, p):
    a, b = x
    a = a + shift(b, p)
    return a, b + shift(a, p)


def inverse_of(wrong):
    """An inverse that gives something else where a number of its own is not 0."""

    def inverse(y, p):
        a, b = y
        b = b - shift(a, p)
        return wrong(a - shift(b, p), p[0, 0]), b

    return inverse


WRONG = {
    "all": lambda a, by: a * (1 + by),
    "one sample": lambda a, by: torch.cat([a[:-1], a[-1:] + 5 * by]),
    "nothing to see": lambda a, by: a + by * 1e300 * 1e300,
}


def weights(depth=DEPTH):
    return [(0.1 * Numbers(i)(4, 4)).index_fill(0, torch.tensor([0]), 0.0) for i in range(depth)]


def run(block, ws, x=None, within=False):
    """Blocks one after the other, behind one that gives their first x out and does not look at its own."""
    x = Numbers(9)(40, 4) if x is None else x
    first = replace(block, check="off", known=Known())

    def value(ws):
        state = x * 1, x.cos()
        for i, w in enumerate(ws):
            state = (block if i else first)(state, w)
        return torch.stack(state).sin().sum()

    if within:
        return grad(value)(tuple(ws))
    ws = [w.clone().requires_grad_() for w in ws]
    return torch.autograd.grad(value(ws), ws)


def known(wrong, within=False, **options):
    block = invertible_checkpoint(forward, inverse_of(wrong), **options)
    for _ in range(WATCHED):
        run(block, weights(2), within=within)
    with straight() as count:
        run(block, weights(), within=within)
    assert count() == DEPTH - 1
    return block


@pytest.fixture(params=[False, True], ids=["backward", "grad"])
def within(request):
    return request.param


@pytest.mark.parametrize("wrong", ["all", "one sample", "nothing to see"])
class TestWrong:
    """A block in the middle of a chain whose inverse is wrong for its weights alone."""

    @pytest.mark.parametrize("at", [1, DEPTH - 1])
    def test_inverses_are_errors_that_name_the_block(self, wrong, at, within):
        block, ws = known(WRONG[wrong], within), weights()
        ws[at][0, 0] = 0.5
        with pytest.raises(InverseError, match=r"^invertible_checkpoint\(forward, .*the inverse gives x\[0\] back"):
            run(block, ws, within=within)

    def test_small_errors_are_warnings(self, wrong, within):
        if wrong == "nothing to see":
            pytest.skip("it is not small")
        block, ws = known(WRONG[wrong], within), weights()
        ws[2][0, 0] = 2e-6
        assert warned(lambda: run(block, ws, within=within))

    def test_check_is_off(self, wrong, within):
        block, ws = known(WRONG[wrong], within, check="off"), weights()
        ws[2][0, 0] = 0.5
        assert not warned(lambda: run(block, ws, within=within))


def plus(x, p):
    return x[0] + p[1].sum(), x[1] + p.sum().exp()


def minus(y, p):
    a = y[0] - p[1].sum()
    return torch.where(a.abs() < 1e6, a * (1 + p[0, 0]), a), y[1] - p.sum().exp()


def test_small_entries_beside_large_ones():
    x = Numbers(9)(40, 4)
    x[:, 0] *= 1e9
    block = invertible_checkpoint(plus, minus)
    for _ in range(WATCHED):
        run(block, [w * 0 for w in weights(2)], x)
    ws = [w * 0 for w in weights()]
    ws[2][0, 0] = 1e-3
    (text,) = warned(lambda: run(block, ws, x))
    assert "small entries of x" in text


def test_a_pass_that_fails_leaves_nothing_behind():
    block, ws = known(WRONG["all"]), [w.requires_grad_() for w in weights()]
    state = Numbers(9)(40, 4), Numbers(8)(40, 4)
    for w in ws:
        state = block(state, w)

    def fails(gradient):
        raise KeyError("a hook of the user")

    ws[1].register_hook(fails)
    with pytest.raises(KeyError):
        torch.stack(state).sum().backward()
    gc.collect()
    assert not gathered.HERE.waiting
    assert not warned(lambda: run(block, weights()))


def started(block, ws, hook=None, at=None):
    """The loss of blocks behind one that gives out their first x and does not look at its own. The hook gets the
    gradient of what one of them is given."""
    state = replace(block, check="off", known=Known())((Numbers(9)(40, 4), Numbers(8)(40, 4)), ws[0] * 0)
    for i, w in enumerate(ws):
        if i == at:
            state[1].register_hook(hook)
        state = block(state, w)
    return torch.stack(state).sin().sum()


def wrong_at(at, by=0.5):
    ws = weights()
    ws[at][0, 0] = by
    return [w.requires_grad_() for w in ws]


@pytest.mark.parametrize("at", range(DEPTH))
class TestAgain:
    """What is given back wrongly in one backward pass is not found by the next one through the same graph."""

    def test_after_its_error(self, at):
        block, ws = known(WRONG["all"]), wrong_at(at)
        value = started(block, ws)
        for _ in range(3):
            with pytest.raises(InverseError):
                torch.autograd.grad(value, ws, retain_graph=True)

    def test_after_another_error(self, at):
        block, ws, fails = known(WRONG["all"]), wrong_at(at), [True]

        def hook(gradient):
            if fails:
                raise KeyError("a hook of the user")

        before = started(block, [w.requires_grad_() for w in weights()])  # all are compared at the end of a pass
        value = started(block, ws, hook, at)
        with pytest.raises(KeyError):
            torch.autograd.grad(value, ws, retain_graph=True)
        fails.clear()
        with pytest.raises(InverseError):
            torch.autograd.grad(value, ws)
        assert before.item()

    def test_of_a_block_that_is_compared_at_once(self, at):
        block, ws = invertible_checkpoint(forward, inverse_of(WRONG["all"])), wrong_at(at)
        value = started(block, ws)
        for _ in range(2):
            with pytest.raises(InverseError):
                torch.autograd.grad(value, ws, retain_graph=True)


def test_weights_that_the_backward_pass_changes():
    """Small errors are warned of, though what the inverse reads is there no more when they are found."""
    block, ws = known(WRONG["all"]), wrong_at(2, 2e-6)
    wanted = torch.autograd.grad(started(invertible_checkpoint(forward, inverse_of(WRONG["all"]), check="off"), ws), ws)
    found = {}

    def step(w):
        found[w] = w.grad.clone()
        with torch.no_grad():
            w.sub_(0.01 * w.grad)

    for w in ws:
        w.register_post_accumulate_grad_hook(step)
    (text,) = warned(lambda: started(block, ws).backward())
    assert "x[0] back with an error of 2.0e-06" in text and "f has no inverse, or another one" in text
    for w, a in zip(ws, wanted, strict=True):
        torch.testing.assert_close(found[w], a)


def test_numbers_without_axes(within):
    wanted = []

    def value(ws, g):
        state = ws[0][1, 1] * 1, ws[0][1, 2] * 1
        for w in ws:
            state = g(state, w[1, 1])
        return torch.stack(state).sin().sum()

    block = invertible_checkpoint(
        lambda x, w: (x[0] + (w * x[1]).tanh(), x[1]), lambda y, w: (y[0] - (w * y[1]).tanh(), y[1])
    )
    for g in (block, block, block.pair.forward):
        ws = [w.requires_grad_(not within) for w in weights()]
        wanted.append(grad(value)(tuple(ws), g) if within else torch.autograd.grad(value(ws, g), ws))
    for found in wanted[:2]:
        for a, b in zip(found, wanted[2], strict=True):
            torch.testing.assert_close(a, b)


def test_graphs_that_are_dropped_are_not_kept():
    block = known(WRONG["all"])
    run(block, weights())
    gc.collect()
    assert not any(type(held) in (Gathered, Glance) for held in gc.get_objects())


def test_a_retained_graph_is_compared_each_time():
    block, ws = known(WRONG["all"]), [w.requires_grad_() for w in weights()]
    with torch.no_grad():
        ws[2][0, 0] = 0.5
    state = Numbers(9)(40, 4), Numbers(8)(40, 4)
    for w in ws:
        state = block(state, w)
    for _ in range(2):
        with pytest.raises(InverseError):
            torch.autograd.grad(torch.stack(state).sum(), ws, retain_graph=True)


def test_a_state_that_is_written_afterwards_is_no_error():
    block, ws = known(WRONG["all"]), [w.requires_grad_() for w in weights()]
    found = []
    for write in (False, True):
        state, before = (Numbers(9)(40, 4), Numbers(8)(40, 4)), None
        for w in ws:
            before, state = state, block(state, w)
        if write:
            before[0].detach().mul_(2)
        found.append(torch.autograd.grad(torch.stack(state).sum(), ws))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b)


sizes = st.sampled_from([0.0, 1e-9, 1e-6, 1e-3, 1.0, 1e6, float("inf"), float("nan")])


@given(st.data(), st.sampled_from([3, 16, 200]), st.sampled_from([torch.float32, torch.float64]))
def test_none_is_taken_for_rounding_that_is_more(data, number, dtype):
    """What is found by itself is never above the bound of what is looked at together, whatever the numbers are."""
    drawn = [[data.draw(sizes) for _ in range(number)] if number < 20 else None for _ in range(2)]
    x = Numbers(data.draw(st.integers(0, 99)))(3, number)
    off = data.draw(st.sampled_from([0.0, 1e-12, 1e-7, 1e-3, 1.0])) * Numbers(5)(3, number)
    if drawn[0] is not None:
        x, off = x * torch.tensor(drawn[0]), off * torch.tensor(drawn[1])
    x, off = x.to(dtype), off.to(dtype)
    together = Gathered(x[0], 32)
    rows = [together.add(row) for row in x]
    beside = gathered.beside(together, rows, [*(x + off)])
    for i in range(3):
        then, now = beside.pair(i, rows[i])
        found = Comparison([then], [now], 0.0)
        error = max(*found.errors(), found.hidden())
        assert error <= 0 or not beside.bounds[i] <= beside.most or error <= beside.most
