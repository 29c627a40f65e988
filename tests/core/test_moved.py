"""Samples that are moved, by their data or by any function of torch: each share is right, or is refused."""

import warnings
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from random import Random

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.overrides import get_overridable_functions

from invfunc import (
    InvFuncError,
    batch_grad,
    batch_jacobian,
    chunked,
    diag_ggn,
    kfac,
)
from invfunc.errors import SampleAxisError
from invfunc.testing import assert_trees_close
from tests.moved import arguments, program
from tests.rows import FIRST_ORDER
from tests.strategies import Numbers

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
    """Refused are those where a matrix that orders the samples is multiplied with what depends on parameters."""
    refused = 0
    for seed in range(40):
        r = Random(seed)
        (model, _), args = program(r), arguments(r)
        refused += not right_or_refused(batch_grad(losses_of(model)), args, shares_of(losses_of(model), args))
    assert refused <= 5


# Whatever function of torch brings entries of data to other places: each share is that of their sample

X, C = Numbers()(4, 3), Numbers(1)(4, 3)
ARGUMENTS = [(), (0,), (1,), ((0,),), ((0, 1),), (0, 1), (1, 0), (1, (0, 1)), (2,), (2, 0)]
KNOWN = {"flip", "roll", "flipud", "rot90", "fft_fftshift", "fft_ifftshift", "unsqueeze_", "t_", "transpose_", "msort"}


def functions() -> list[Callable]:
    groups = get_overridable_functions()
    return [f for group in (torch, torch.Tensor, torch.fft, torch.nn.functional) for f in groups[group]]


def origins(out: object) -> torch.Tensor | None:
    """Of which sample each entry of a result is; None if some are of none, or of several."""
    if not isinstance(out, torch.Tensor) or out.layout != torch.strided or out.is_meta or out.dtype != X.dtype:
        return None
    same = out.reshape(-1, 1) == X.reshape(1, -1)
    return same.int().argmax(1).view(out.shape) // 3 if out.numel() and bool((same.sum(1) == 1).all()) else None


def moves() -> Iterator[tuple[str, Callable, torch.Tensor]]:
    """The functions that permute all entries of data, with arguments, and of which sample each entry then is."""
    for func, args in product(functions(), ARGUMENTS):
        try:
            samples = origins(func(X.clone(), *args))
        except Exception:  # these are not arguments of it
            continue
        if samples is None or samples.numel() != X.numel():
            continue
        own = torch.arange(4).view(-1, 1).expand(4, 3)
        if samples.shape != own.shape or not torch.equal(samples, own):
            yield func.__name__, lambda x, func=func, args=args: func(x.clone(), *args), samples


@pytest.mark.filterwarnings("ignore")
def test_moved_entries():
    w, found, right = torch.tensor(0.7, dtype=X.dtype), set(), 0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for name, move, samples in moves():
            found.add(name)
            weights, c = w.expand(samples.shape).clone().requires_grad_(), C.reshape(samples.shape)
            (each,) = torch.autograd.grad(((move(X) * weights).tanh() * c).sum(), weights)
            wanted = torch.stack([each[samples == n].sum() for n in range(4)])
            try:
                came = batch_grad(lambda w, x, move=move, c=c: ((move(x) * w).tanh() * c).sum())(w, X)
            except SampleAxisError:
                continue
            assert_trees_close(came, wanted, rtol=1e-10)
            right += 1
    assert found >= KNOWN
    assert right > 50
