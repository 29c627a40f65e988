"""One case for each way to a wrong number that a review found: right, or refused."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import diag_ggn, outputs, sum_grad_squared
from invfunc.errors import SampleAxisError, SplitError
from invfunc.testing import assert_trees_close, dense_diag_ggn, loop_sum_grad_squared
from tests.strategies import Numbers

W, X, Y = Numbers()(4, 4), Numbers(1)(5, 4), Numbers(2)(5, 4)
EXACT = 1e-10


def written_through_a_view(p: torch.Tensor) -> torch.Tensor:
    q = p.clone()
    u = q.t()
    q[0].mul_(3)
    return u


@pytest.mark.parametrize(
    "read",
    [written_through_a_view, lambda p: p[:, [0, 0, 1]], lambda p: p[:, torch.tensor([2, 2])]],
    ids=["written through a view", "list that repeats", "tensor that repeats"],
)
def test_entries_of_a_parameter_that_count_more_than_once(read):
    def f(w, x):
        return (x @ read(w)).square().sum(1)

    assert_trees_close(sum_grad_squared(f)(W, X), loop_sum_grad_squared(f)(W, X), EXACT)


@pytest.mark.parametrize(
    "loss", [lambda z, y: F.mse_loss(z * z, -y.abs()), lambda z, y: F.mse_loss(z.double(), y)], ids=["square", "cast"]
)
def test_what_is_affine_in_the_outputs_and_what_is_not(loss):
    def f(w, x):
        return x @ w

    assert_trees_close(diag_ggn(f, loss)(W, X, Y), dense_diag_ggn(f, loss)(W, X, Y), EXACT)


def test_outputs_wider_than_the_parameters():
    w, x = W.float(), X.float()
    ours = diag_ggn(lambda w, x: (x @ w).double(), F.mse_loss)(w, x, Y)
    assert_trees_close(ours.double(), dense_diag_ggn(lambda w, x: x @ w, F.mse_loss)(W, X, Y), 1e-5)


def test_two_marks_each_with_its_loss():
    def loss(w, x, y):
        return F.mse_loss(outputs(x @ w), y) + F.mse_loss(outputs((x @ w).tanh()), y)

    first = dense_diag_ggn(lambda w, x: x @ w, F.mse_loss)(W, X, Y)
    second = dense_diag_ggn(lambda w, x: (x @ w).tanh(), F.mse_loss)(W, X, Y)
    assert_trees_close(diag_ggn(loss)(W, X, Y), first + second, EXACT)


class Squares(torch.autograd.Function):
    @staticmethod
    def forward(ctx, z):
        ctx.save_for_backward(z)
        return z.square().sum()

    @staticmethod
    def backward(ctx, slope):
        return 2 * slope * ctx.saved_tensors[0]


def test_a_path_around_the_outputs_that_cannot_be_seen():
    def loss(w, x, y):
        z = x @ w
        return F.mse_loss(z, y) + Squares.apply(z)

    with pytest.raises((SplitError, SampleAxisError), match="not kept apart|goes around"):
        diag_ggn(loss)(W, X, Y)
