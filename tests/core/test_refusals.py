"""Errors of calls that are not followed: the operation, the line of f, the way out; those of f come out as they are."""

import traceback

import pytest
import torch
import torch.nn.functional as F

from invfunc import batch_grad, diag_hessian, variance
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.testing import assert_trees_close, dense_diag_hessian, loop_batch_grad

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
