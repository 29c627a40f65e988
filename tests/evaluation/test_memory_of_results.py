"""Each tensor of a result has memory of its own: it can be written, or added up over machines, without the others."""

from collections import Counter

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn

import invfunc
from invfunc import functional, tree
from tests.rows import BOTH, CASES, PRODUCTS, made_of
from tests.strategies import Numbers


def storages(tensors):
    """The addresses of the memory of tensors with entries."""
    return [x.untyped_storage().data_ptr() for x in tensors if x.numel()]


def shared(result, args):
    """The leaves of a result that share memory with each other, or with arguments."""
    theirs, own = set(storages(tree.tensors(args))), Counter(storages(tree.tensors(result)))
    found = []
    for path, x in tree.named_leaves(result):
        if isinstance(x, torch.Tensor) and x.numel():
            at = x.untyped_storage().data_ptr()
            overlaps = any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))
            found += [path] if at in theirs or own[at] > 1 or overlaps else []
    return found


def squares(z, y):
    return F.mse_loss(z, y, reduction="none").flatten(1).sum(1)


def losses(f):
    return lambda p, x, y: squares(f(p, x), y)


MODELS = {
    "linear": lambda: nn.Linear(2, 3),
    "chain": lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)),
    "shift": lambda: Shift(),
}


class Shift(nn.Module):
    """A parameter that is the result's own shape, and one without influence."""

    def __init__(self):
        super().__init__()
        self.shift, self.none, self.scale = (nn.Parameter(torch.ones(k)) for k in (2, 2, 1))

    def forward(self, x):
        return self.scale[0] * x + self.shift


def assert_apart(result, given):
    assert tree.tensors(result) and not shared(result, given)


@st.composite
def problems(draw):
    f, params = functional(MODELS[draw(st.sampled_from(sorted(MODELS)))]().double())
    rand, n = Numbers(draw(st.integers(0, 3))), draw(st.integers(1, 3))
    x = rand(n, 2)
    return f, params, x, rand(*f(params, x).shape)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=4)
@given(problem=problems())
def test_of_statistics(case, problem):
    (row, form), (f, *args) = CASES[case], problem
    assume(row.fewest <= len(args[1]))
    if row.make is not invfunc.kronecker.kfra or "none" not in args[0]:  # of which it takes chains
        assert_apart(made_of(row, f, F.mse_loss if form == BOTH else squares, form)(*args), args)


@pytest.mark.parametrize("name", ["hvp", "ggnvp", "ggnvp empirical"])
@settings(max_examples=4)
@given(problem=problems())
def test_of_products(name, problem):
    f, params, *batch = problem
    of = PRODUCTS[name](*((losses(f),) if name.endswith("empirical") else (f, F.mse_loss)))
    v = tree.map_leaves(torch.ones_like, params)
    assert_apart(of(params, v, *batch), (params, v, batch))
    assert_apart(of.linearize(params, *batch)(v), (params, v, batch))


def test_of_linearize():
    """Also of linear maps that give back what they are given."""
    p, x = torch.ones(2), torch.ones(3, 2)
    _, pushed, pulled = invfunc.linearize(lambda p, x: [p, p, x])(p, x)
    assert_apart(pushed(p), (p, x))
    assert_apart(pulled([p, p, x]), (p, x))
