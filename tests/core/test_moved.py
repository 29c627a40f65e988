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
    variance,
)
from invfunc.testing import assert_trees_close
from invfunc.testing.laws.rows import FIRST_ORDER
from tests import moved
from tests.moved import D, arguments, program

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

TWICE = {
    "embedding": lambda w, i: F.embedding(i, w),
    "index": lambda w, i: w[i],
    "one-hot": lambda w, i: F.one_hot(i, D).to(w.dtype) @ w,
}
BACK = ["index_add", "scatter", "inverse", "loop", "stack"]


def twice(look_up, back):
    def losses(w, x, i, k):
        q = k.argsort()
        h = x * w[0]
        return moved.BACK[back](h, q, h[q] + TWICE[look_up](w, i[q])).square().sum(1)

    return losses


def args_of(i):
    r = torch.Generator().manual_seed(0)
    w, x = (torch.randn(n, D, generator=r, dtype=torch.float64) for n in (D, 3))
    return w, x, torch.tensor(i), torch.tensor([1.57, -0.97, -0.95])


@pytest.mark.parametrize("back", BACK)
@pytest.mark.parametrize("look_up", TWICE)
@pytest.mark.parametrize("i", [[1, 0, 0], [3, 0, 3], [3, 1, 2]], ids=str)
def test_rows_that_are_looked_up_belong_to_the_samples_they_are_added_to(i, look_up, back):
    losses, args = twice(look_up, back), args_of(i)
    assert_trees_close(batch_grad(losses)(*args), shares_of(losses, args), EXACT)
    assert_trees_close(batch_grad(lambda *a: losses(*a).sum())(*args), shares_of(losses, args), EXACT)


def test_outputs_of_samples_that_come_in_the_order_of_their_keys():
    def model(w, x, i, k):
        h = torch.zeros_like(x)
        for _ in range(2):
            h = torch.tanh(h @ w + x * w[0])
        q = sorted(range(len(h)), key=lambda n: k[n].item())
        z, o = h[q] + F.embedding(i[torch.tensor(q)], w), torch.zeros_like(h)
        for j, n in enumerate(q):
            o[n] = z[j]
        return o

    args = args_of([3, 0, 3])
    assert_trees_close(batch_jacobian(model)(*args), torch.func.jacrev(model)(*args), EXACT)


@pytest.mark.parametrize("reduction", [torch.clone, torch.sum], ids=["losses", "sum"])
def test_parts_of_what_is_sorted_are_written_by_masks(reduction):
    def losses(w, x, i, k):
        q = k.argsort()
        h, own = (x @ w)[q], i[q]
        z = torch.zeros_like(h)
        for c in range(D):
            z[own == c] = h[own == c] * w[c]
        return z[q.argsort()].square().sum(1)

    args = args_of([3, 0, 3])
    assert_trees_close(batch_grad(lambda *a: reduction(losses(*a)))(*args), shares_of(losses, args), EXACT)


def test_what_is_known_of_rows_outlives_transforms():
    losses, (w, *args) = twice("embedding", "loop"), args_of([3, 0, 3])
    small = variance(losses)
    want = torch.func.jacrev(lambda w: shares_of(losses, (w, *args)).var(0, correction=0))(w)
    assert_trees_close(torch.func.jacfwd(lambda w: small(w, *args))(w), want, EXACT)
    assert_trees_close(torch.func.jacrev(lambda w: small(w, *args))(w), want, EXACT)
    assert_trees_close(small(w, *args), shares_of(losses, (w, *args)).var(0, correction=0), EXACT)
