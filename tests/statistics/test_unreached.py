"""A result that no parameter reaches is an error, not zeros; zeros of a derivative are zeros."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc
from invfunc.errors import ArgumentError
from invfunc.testing.oracles import assert_trees_close, loop_batch_grad
from tests.rows import CASES, made_of
from tests.strategies import Numbers

N = 5
X, Y = Numbers(0)(N, 4), Numbers(1).below(3, N)
torch.manual_seed(0)
MODULE = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
F_, PARAMS = invfunc.functional(MODULE)
UNREACHED = r"\): no parameter of params reaches the result\. Call f\(params, x\) of .*, not the module"


def module(params, x):
    return MODULE(x)


def no_grad(params, x):
    with torch.no_grad():
        return F_(params, x)


def detached(params, x):
    return F_(params, x).detach()


WAYS = [(f, reduction) for f in (module, no_grad, detached) for reduction in ("none", "mean")]


def loss_of(f, reduction="none"):
    return lambda params, x, y: F.cross_entropy(f(params, x), y, reduction=reduction)


def refused(t, *args):
    with pytest.raises(ArgumentError, match=UNREACHED):
        t(*args)


@pytest.mark.parametrize(("row", "form"), CASES.values(), ids=CASES)
def test_statistics(row, form):
    for f, reduction in WAYS:
        refused(made_of(row, f, partial(F.cross_entropy, reduction=reduction), form), PARAMS, X, Y)


class TestProducts:
    MAKE = {
        "hvp": invfunc.hvp,
        "ggnvp": invfunc.ggnvp,
        "ggnvp empirical": partial(invfunc.ggnvp, fisher="empirical"),
        "ggnvp drawn": partial(invfunc.ggnvp, mc_samples=2, generator=torch.Generator(), fisher="mc"),
        "hvp of blocks": partial(invfunc.hvp, blocks=True),
        "ggnvp of blocks": partial(invfunc.ggnvp, blocks=True),
        "hvp of positive blocks": partial(invfunc.hvp, blocks=True, modify="abs"),
    }

    @pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
    def test_are_refused_with_their_linearisation(self, make):
        for f, reduction in WAYS:
            for product in (make(loss_of(f, reduction)), make(f, partial(F.cross_entropy, reduction=reduction))):
                v = {path: p.expand(2, *p.shape) for path, p in PARAMS.items()} if product.lead else PARAMS
                refused(product, PARAMS, v, X, Y)
                refused(product.linearize, PARAMS, X, Y)


class TestZerosStay:
    @pytest.mark.parametrize("f", [
        lambda w, x: (x @ w - 100).relu(),
        lambda w, x: (x @ w).clamp(100, 200),
        lambda w, x: 0 * (x @ w),
        lambda w, x: (x @ w).round(),
        lambda w, x: (x @ w) * (x.sum(1, keepdim=True) > 100),
    ], ids=["relu", "clamp", "zero", "round", "mask"])  # fmt: skip
    def test_of_what_has_no_slope(self, f):
        w = torch.ones(4, 3).double()
        for loss in (lambda w, x, y: f(w, x).square().sum(1), lambda w, x, y: f(w, x).square().mean()):
            assert not invfunc.variance(loss)(w, X, Y).any()
            assert not invfunc.clipped_grad(loss, 1.0)(w, X, Y)[1].any()
            assert not invfunc.hvp(loss)(w, w, X, Y).any()
            assert not invfunc.linearize(f)(w, X)[1](w).any()
        assert not invfunc.diag_ggn(f, F.cross_entropy)(w, X, Y).any()
        assert not invfunc.ggnvp(f, F.cross_entropy)(w, w, X, Y).any()

    def test_of_one_parameter_among_others(self):
        """A head is trained on frozen features, beside a term that is detached."""
        head = {"w": Numbers(2)(6, 3), "unread": Numbers(3)(2)}

        def f(p, x):
            return MODULE[:2](x) @ p["w"] + F_(PARAMS, x).detach() + p["unread"].detach().sum()

        loss = loss_of(f)
        assert_trees_close(invfunc.batch_grad(loss)(head, X, Y), loop_batch_grad(loss)(head, X, Y), 1e-10)
        for found in (
            invfunc.diag_ggn(f, F.cross_entropy)(head, X, Y),
            invfunc.hvp(loss)(head, head, X, Y),
            invfunc.ggnvp(f, F.cross_entropy)(head, head, X, Y),
        ):
            assert found["w"].any() and torch.equal(found["unread"], torch.zeros(2).double())
