"""What autograd saves is the same when it is computed again: the same operations on the same tensors, in any call."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import ReplayError, additive_coupling, invertible_checkpoint
from tests.strategies import Numbers

X = Numbers()(2, 3, 3)
W = tuple(Numbers(1)(2, 3, 3))
INDICES = torch.tensor([[0, 2, 1], [1, 0, 2], [2, 1, 0]])
LOOKED_AT = 5
"""In how many calls of a block values are looked at."""

STEPS: dict[str, Callable] = {
    "sin": torch.sin,
    "exp": torch.exp,
    "sigmoid": torch.sigmoid,
    "a leaf": lambda x: x * W[0],
    "another leaf": lambda x: x * W[1],
    "indices": lambda x: x.gather(0, INDICES),
    "other indices": lambda x: x.gather(0, INDICES.T),
    "indices of data": lambda x: x.gather(0, x.argsort(0)),
    "other indices of data": lambda x: x.gather(0, x.argsort(1)),
    "a number": lambda x: x.clamp(max=0.3) ** 2,
    "another number": lambda x: x.clamp(max=-0.3) ** 2,
    "columns": lambda x: x.softmax(-1),
    "rows": lambda x: x.softmax(-2),
    "a part": lambda x: x[:1].square() + x,
    "another part": lambda x: x[1:2].square() + x,
    "random numbers": lambda x: F.dropout(x, 0.5),
    "a write": lambda x: x.clone().mul_(x),
    "a mask": lambda x: x.masked_fill(x > 0, 0.5).exp(),
    "another mask": lambda x: x.masked_fill(x < 0, 0.5).exp(),
}


class Branches:
    """The product of some functions, in an order of evaluation for each time."""

    def __init__(self, branches, *orders):
        self.branches, self.orders, self.time = branches, orders, 0

    def __call__(self, x):
        found = {}
        for i in self.orders[self.time % len(self.orders)]:
            found[i] = x
            for step in self.branches[i]:
                found[i] = STEPS[step](found[i])
        self.time += 1
        return torch.stack([found[i] for i in sorted(found)]).prod(0)


def slope(block, x=X):
    a, b = (t.clone().requires_grad_() for t in x)
    for w in W:
        w.requires_grad_()
    torch.manual_seed(0)
    y = torch.stack(block((a * 1, b * 1)))
    return torch.autograd.grad(y.sin().sum(), (a, b, *W), allow_unused=True, materialize_grads=True)


def block_of(f, check):
    """A block that was called before."""
    block, turns = invertible_checkpoint(additive_coupling(f, torch.cos), check=check), getattr(f, "orders", None)
    if turns is not None:
        f.orders = turns[:1]
    for _ in range(LOOKED_AT):
        slope(block)
    if turns is not None:
        f.orders, f.time = turns, 0
    return block


BRANCHES = st.lists(st.lists(st.sampled_from(list(STEPS)), min_size=1, max_size=3), min_size=2, max_size=3)


@given(BRANCHES, st.data(), st.sampled_from(["warn", "off"]))
def test_another_order_is_right_or_refused(branches, data, check):
    """Forward and backward evaluate the branches in orders of their own."""
    forward, backward = (data.draw(st.permutations(range(len(branches)))) for _ in range(2))
    f = Branches(branches, forward, backward)
    wanted = slope(additive_coupling(Branches(branches, forward), torch.cos))
    block = block_of(f, check)
    try:
        found = slope(block)
    except ReplayError:
        assert forward != backward
        return
    for a, b in zip(found, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)


ALIKE = {
    "operations": ("sigmoid", "exp"),
    "leaves": ("a leaf", "another leaf"),
    "integers": ("indices", "other indices"),
    "integers of data": ("indices of data", "other indices of data"),
    "numbers": ("a number", "another number"),
    "axes": ("columns", "rows"),
    "places": ("a part", "another part"),
    "masks": ("a mask", "another mask"),
}


@pytest.mark.parametrize("check", ["warn", "off"])
@pytest.mark.parametrize("alike", ALIKE.values(), ids=ALIKE)
def test_branches_alike_are_told_apart(alike, check):
    """All that is saved has the same shapes, and values are no longer looked at."""
    f = Branches([[alike[0], "sin"], [alike[1], "sin"]], (0, 1), (1, 0))
    with pytest.raises(ReplayError, match="computes other numbers"):
        slope(block_of(f, check))


def test_draws_are_told_apart():
    """Equal operations draw other numbers in another order."""
    f = Branches([["random numbers"], ["random numbers"]], (0, 1), (1, 0))
    with pytest.raises(ReplayError, match="computes other numbers"):
        slope(block_of(f, "off"))


def saves_of_another():
    """The same call in both, of whose arguments one needs a gradient: another one each time."""
    time = []

    def f(x):
        time.append(1)
        a, b = (x, x.detach().cos())[:: (-1) ** len(time)]
        return a * b

    return f


def test_which_argument_needs_a_gradient_is_told():
    with pytest.raises(ReplayError, match="computes other numbers"):
        slope(block_of(saves_of_another(), "off"))


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("check", ["warn", "off"])
def test_a_number_that_changes_before_the_backward_pass(held, check):
    """Autograd saves nothing of the product with it, but what comes of that in the other function."""
    number = [1.5]
    block = invertible_checkpoint(additive_coupling(lambda b: b * number[0], torch.sin), check=check)
    for factor in [1.0] * LOOKED_AT + [2.0]:
        a, b = (t.clone().requires_grad_() for t in X)
        state: Any = a * 1, b * 1
        y = torch.stack(block(state))
        state = state if held else None
        number[0] *= factor
        if factor == 1:
            y.sum().backward()
    with pytest.raises(ReplayError, match="a number that it reads"):
        y.sum().backward()


class Beside:
    """Does more each second time, which does not matter for the gradient."""

    def __init__(self, more):
        self.more, self.time, self.seen = more, 0, []

    def __call__(self, x):
        self.time += 1
        if self.time % 2:
            self.seen.append(self.more(x.detach()))
        return (0.5 * x).tanh() * x


@pytest.mark.parametrize(
    "more", [lambda x: x.norm().item(), lambda x: x.square().sum(0).tolist(), lambda x: x.clone(), torch.mean]
)
def test_what_is_done_beside_is_let_be(more):
    f = Beside(more)
    for _ in range(6):
        found, wanted = (
            slope(invertible_checkpoint(additive_coupling(f, torch.cos))),
            slope(additive_coupling(Beside(more), torch.cos)),
        )
        for a, b in zip(found, wanted, strict=True):
            torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    "number", [lambda x: x.std().item(), lambda x: float(x.abs().max()), lambda x: x.mean().tolist()]
)
def test_numbers_of_data_may_have_rounding_errors(number):
    """They come from an x that the inverse gives back."""

    def f(x):
        return (x * number(x.detach())).sin() * number(x.detach().cos())

    for a, b in zip(
        slope(block_of(f, "warn"), x=10 * X), slope(additive_coupling(f, torch.cos), x=10 * X), strict=True
    ):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("given", [lambda a: (a, a), lambda a: (a, a * 1)], ids=["once", "twice"])
def test_the_same_tensor_in_several_places(given):
    """When it is computed again each is a tensor of its own; a part may give back what it is given."""
    pair = additive_coupling(lambda b, p: b, lambda a, p: (a * p[0]).sin() * p[1])

    def run(block):
        x, w = (t.clone().requires_grad_() for t in (X[0], W[0]))
        y = torch.stack(block(given(x * 1), (given(w), given(w))))
        return torch.autograd.grad(y.square().sum(), (x, w))

    for a, b in zip(run(invertible_checkpoint(pair)), run(pair), strict=True):
        torch.testing.assert_close(a, b)
