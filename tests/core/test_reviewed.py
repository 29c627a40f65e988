"""One case for each way to a wrong number that a review found: right, or refused."""

import pytest
import torch
import torch.nn.functional as F

from invfunc import batch_grad, chunked, diag_ggn, outputs, sum_grad_squared, variance
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


@pytest.mark.parametrize(
    "f",
    [
        lambda w, x: (x.mean(0) @ w).square().sum(),
        lambda w, x: F.conv1d((x @ w)[:, :, None].expand(-1, -1, 5), (x @ w)[:, :, None]).square().sum(),
        lambda w, x: F.embedding(torch.tensor([3, 1, 0, 2, 4]), x @ w).square().sum(),
        lambda w, x: F.embedding((0 * x).long(), w, scale_grad_by_freq=True).square().sum(),
    ],
    ids=["mean of the data", "kernel", "table", "frequencies"],
)
def test_first_order_refuses(f):
    for statistic in (batch_grad, variance):
        with pytest.raises(SampleAxisError):
            statistic(f)(W, X)


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


@pytest.mark.parametrize("n", [1, 2, 3, 4, 16])
def test_outputs_that_depend_on_the_place_of_a_sample(n):
    x, y = Numbers(3)(16, 4), Numbers(4)(16, 4)

    def f(w, x):
        return (x * torch.linspace(0, 1, len(x), dtype=x.dtype)[:, None]) @ w

    expected = dense_diag_ggn(f, F.mse_loss)(W, x, y)
    assert_trees_close(diag_ggn(f, F.mse_loss)(W, x, y), expected, EXACT)
    if n > 1:
        with pytest.raises(SampleAxisError, match="cannot be chunked over samples|in a part"):
            chunked(diag_ggn(f, F.mse_loss), n, over="samples")(W, x, y)


def test_nothing_is_kept_alive_by_a_cycle():
    import gc
    import weakref

    kept = []

    def loss(w, x, y):
        hidden = (x @ w).tanh()
        kept.append(weakref.ref(hidden))
        return F.mse_loss(hidden @ w, y)

    gc.collect()
    gc.disable()
    try:
        diag_ggn(loss)(W, X, Y)
        assert not any(ref() is not None for ref in kept)
    finally:
        gc.enable()
