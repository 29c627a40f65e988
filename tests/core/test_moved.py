"""Samples that are moved by their data, around any uses of one parameter: each share is right, or is refused."""

from functools import partial
from random import Random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import (
    InvFuncError,
    batch_grad,
    batch_jacobian,
    chunked,
    diag_ggn,
    kfac,
)
from invfunc.testing import assert_trees_close
from invfunc.testing.laws.rows import FIRST_ORDER
from tests.moved import arguments, program

EXACT = 1e-9


def losses_of(model):
    return lambda w, x, i, k: model(w, x, i, k).sin().sum(1) + F.cross_entropy(model(w, x, i, k), i, reduction="none")


def weighted(losses):
    """A scalar that reads the losses in the order of the keys."""
    return lambda w, x, i, k: (losses(w, x, i, k) * k)[k.argsort()].sum() / len(x)


STATISTICS = {
    **{name: (row.make, row.of_shares) for name, row in FIRST_ORDER.items()},
    "in chunks": (lambda f: chunked(batch_grad(f), 2, over="samples"), lambda g: g),
    "chosen": (lambda f: batch_grad(f, samples=[-1, 0]), lambda g: g[[-1, 0]]),
}


def right_or_refused(statistic, args, wanted):
    try:
        found = statistic(*args)
    except InvFuncError:
        return False
    assert_trees_close(found, wanted, EXACT, floor=1.0)
    return True


def shares_of(losses, args):
    return torch.func.jacrev(losses)(*args)


class TestNothingIsSilentlyWrong:
    @pytest.mark.parametrize("name", STATISTICS)
    @given(r=st.randoms(use_true_random=False), careless=st.booleans())
    def test_in_the_losses_of_the_samples(self, name, r, careless):
        (model, _), args = program(r, careless), arguments(r)
        make, reduced = STATISTICS[name]
        losses = losses_of(model)
        right_or_refused(make(losses), args, reduced(shares_of(losses, args)))

    @pytest.mark.parametrize("name", STATISTICS)
    @given(r=st.randoms(use_true_random=False))
    def test_in_a_scalar_loss(self, name, r):
        (model, plain), args = program(r), arguments(r)
        make, reduced = STATISTICS[name]
        shares = shares_of(losses_of(plain), args) * (args[3] / len(args[1]))[:, None, None]
        right_or_refused(make(weighted(losses_of(model))), args, reduced(shares))

    @given(r=st.randoms(use_true_random=False), careless=st.booleans())
    def test_in_outputs(self, r, careless):
        (model, _), args = program(r, careless), arguments(r)
        jacobian = torch.func.jacrev(model)(*args)
        right_or_refused(batch_jacobian(model), args, jacobian)
        if not careless:
            right_or_refused(chunked(batch_jacobian(model), 2, over="samples"), args, jacobian)

    @given(r=st.randoms(use_true_random=False))
    def test_in_curvature(self, r):
        (model, plain), args = program(r), arguments(r)
        target = args[1].cos()
        for make in (diag_ggn, partial(diag_ggn, per_sample=True)):
            right_or_refused(make(model, F.mse_loss), (*args, target), make(plain, F.mse_loss)(*args, target))

    @given(r=st.randoms(use_true_random=False))
    def test_in_kronecker_factors(self, r):
        """These depend on which samples an operation gets together."""
        (model, plain), args = program(r, whole=True), arguments(r)
        target = args[1].cos()
        try:
            factors = kfac(plain, F.mse_loss, fisher="exact")(*args, target)
        except InvFuncError:
            return
        right_or_refused(
            lambda *a: kfac(model, F.mse_loss, fisher="exact")(*a).dense(), (*args, target), factors.dense()
        )


def test_few_programs_are_refused():
    """Those are where the order is a matrix that meets what depends on parameters."""
    refused = 0
    for seed in range(40):
        r = Random(seed)
        (model, _), args = program(r), arguments(r)
        refused += not right_or_refused(batch_grad(losses_of(model)), args, shares_of(losses_of(model), args))
    assert refused <= 5


# One weight that is read elementwise and by rows that are looked up, which data put in another order
