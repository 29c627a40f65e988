"""Errors of calls that are not followed: the operation, the line of f, the way out; those of f come out as they are."""

import traceback

import pytest
import torch
import torch.nn.functional as F

from invfunc import batch_grad, chunked, diag_ggn, diag_hessian, variance
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.testing import assert_trees_close, dense_diag_ggn, dense_diag_hessian, loop_batch_grad
from tests.strategies import Numbers

W, X = torch.randn(3, 2, dtype=torch.float64), torch.randn(4, 3, dtype=torch.float64)


def mixed(w, x):
    z = x @ w
    return (z - z.amax(0)).square().sum()


def test_the_operation_the_line_and_the_last_resort_are_told():
    with pytest.raises(SampleAxisError) as told:
        batch_grad(mixed)(W, X)
    text = str(told.value)
    line = mixed.__code__.co_firstlineno + 2
    assert f"at `amax` (test_refusals.py:{line}, in mixed): it reduces over the sample axis" in text
    assert "return the [N] losses" in text and "single samples" in told.value.__notes__[0]


def test_mixed_samples_that_do_not_reach_the_result_are_none():
    def f(w, x):
        mixed(w, x)
        return (x @ w).square().sum(1)

    assert_trees_close(batch_grad(f)(W, X), loop_batch_grad(f)(W, X), 1e-12)


@pytest.mark.parametrize("make", [batch_grad, variance, diag_hessian])
def test_errors_of_f_are_its_own(make):
    calls = []

    def f(w, x):
        calls.append(x)
        return {"a": x}["b"] @ w

    with pytest.raises(KeyError, match="b") as told:
        make(f)(W, X)
    assert len(calls) == 2 and told.value.__cause__ is None and told.value.__context__ is None
    assert traceback.extract_tb(told.value.__traceback__)[-1].name == "f"


def test_shapes_that_do_not_fit_are_told_by_torch():
    with pytest.raises(RuntimeError, match="mat1 and mat2 shapes cannot be multiplied"):
        batch_grad(lambda w, x: (x.T @ w).square().sum())(W, X)


def test_no_parameter_is_told_before_what_mixes():
    with pytest.raises(ArgumentError, match="no parameter of params reaches the result"):
        batch_grad(lambda w, x: (x @ w.detach()).std(0).sum())(W, X)


def test_a_hessian_of_what_is_not_followed_is_taken_entry_by_entry():
    def f(w, x, y):
        z = x @ w
        return F.mse_loss((z - z.mean(0)) / z.std(0), y)

    y = torch.zeros(4, 2, dtype=torch.float64)
    assert_trees_close(diag_hessian(f)(W, X, y), dense_diag_hessian(f)(W, X, y), 1e-9)


# Programs of which some form is refused, with the form that its error names, and systems of equations

N, T = 4, 4
P, X_WAYS, Y = Numbers()(3, 3), Numbers(1)(N, 3), Numbers(2)(N, 3)
EXACT = 1e-9


def apart(f, params, *batch):
    """The gradients of each sample's loss, from f on a batch of one."""
    shares = [torch.func.grad(lambda p, n=n: f(p, *(x[n : n + 1] for x in batch)).sum())(params) for n in range(N)]
    return {k: torch.stack([g[k] for g in shares]) for k in params} if isinstance(params, dict) else torch.stack(shares)


def test_ctc():
    x, y = Numbers(3)(N, T, 3), Numbers(4).below(2, N, 2) + 1

    def ctc(p, x, y, reduction="none"):
        z = (x @ p).log_softmax(-1).transpose(0, 1)
        return F.ctc_loss(z, y, torch.full((len(x),), T), torch.full((len(x),), 2), reduction=reduction)

    found = batch_grad(lambda p, x, y: ctc(p, x, y, "mean"))(P, x, y)  # divided by the lengths of the targets, too
    assert_trees_close(found, apart(ctc, P, x, y) / 2 / N, EXACT)
    assert_trees_close(batch_grad(ctc)(P, x, y), apart(ctc, P, x, y), EXACT)


MASK = torch.tensor([[1, 1, 1], [1, 1, 1], [1, 1, 0], [1, 0, 0]])


def masked(p, x, mask):
    return (x if mask.all() else x * mask) @ p


@pytest.mark.parametrize("n", [2, 4])  # a part of one sample would be broadcast to the whole mask
@pytest.mark.parametrize(("f", "given"), [(masked, {"mask": MASK}), (lambda p, x: masked(p, x, MASK), {})])
def test_a_mask_in_parts_is_a_batch_argument(f, given, n):
    for t in (diag_ggn(f, F.mse_loss), batch_grad(lambda p, x, y, **given: F.mse_loss(f(p, x, **given), y))):
        with pytest.raises(SampleAxisError, match="such as a mask or indices, as a batch argument"):
            chunked(t, n, over="samples")(P, X_WAYS, Y, **given)

    def f_of_mask(p, x, mask):
        return (x * mask) @ p

    wanted = dense_diag_ggn(f_of_mask, F.mse_loss)(P, X_WAYS, MASK, Y)
    assert_trees_close(chunked(diag_ggn(f_of_mask, F.mse_loss), n, over="samples")(P, X_WAYS, MASK, Y), wanted, EXACT)
