"""A function that puts its samples in another order: the shares come in the order of the batch, or are refused."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import batch_grad, diag_ggn
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.testing import assert_trees_close
from invfunc.testing.laws.rows import FIRST_ORDER, HESSIANS, OF_DIAGONALS
from tests.strategies import Numbers

N = 4
P, X, Y = Numbers()(3, 3), Numbers(1)(N, 3), Numbers(2)(N, 3)
ORDER = torch.tensor([2, 0, 3, 1])
ROWS = ORDER[:, None].expand(N, 3)
EXACT = 1e-10

FOLLOWED = {
    "index": lambda x: x[ORDER],
    "index, then a colon": lambda x: x[ORDER, :],
    "index_select": lambda x: x.index_select(0, ORDER),
    "keywords": lambda x: torch.index_select(input=x, dim=0, index=ORDER),
    "flip": lambda x: x.flip(0),
    "roll": lambda x: torch.roll(x, 1, 0),
    "roll of all entries": lambda x: x.roll(3),
    "gather": lambda x: x.gather(0, ROWS),
    "take_along_dim": lambda x: x.take_along_dim(ROWS, 0),
    "twice": lambda x: x[ORDER].flip(0),
    "there and back": lambda x: x[ORDER][ORDER.argsort()],
    "repeated": lambda x: x[ORDER].repeat(2, 1).flip(0),
    "detached": lambda x: x[ORDER].detach().clone(),
    "mask of all": lambda x: x[torch.ones(N, dtype=torch.bool)],
    "features first": lambda x: x.T.flip(1).T,
    "flipud": lambda x: x.flipud(),
    "fliplr": lambda x: x.T.fliplr().T,
    "fftshift": lambda x: torch.fft.fftshift(x, 0),
    "ifftshift": lambda x: torch.fft.ifftshift(x, (0,)),
    "rot90": lambda x: x[:, None].rot90(2)[:, 0],
    "take": lambda x: x.take(torch.arange(3 * N).view(N, 3)[ORDER]),
    "split": lambda x: torch.cat([x[1:], x[:1]]),
    "scatter": lambda x: torch.zeros_like(x).scatter(0, ROWS, x),
    "index_copy": lambda x: torch.zeros_like(x).index_copy(0, ORDER, x),
    "stack": lambda x: torch.stack([x[i] for i in ORDER.tolist()]),
    "unbind": lambda x: torch.stack(x.unbind()[::-1]),
    "a loop": lambda x: torch.stack([row for row in x.flip(0)]),
    "in a transform": lambda x: torch.vmap(torch.clone)(x).flip(0),
}
REFUSED = {
    "sort": lambda x: x.sort(0).values,
    "msort": lambda x: x.msort(),
    "shifts of all dimensions": lambda x: torch.fft.fftshift(x.view(2, 6)).view(N, 3),
    "topk": lambda x: x.topk(N, 0).values,
    "each by its own values": lambda x: x[x[:, 0].argsort()],
    "in place": lambda x: x[ORDER].clone().t_().unsqueeze_(1).squeeze_(1).t_(),
    "out=": lambda x: torch.index_select(x, 0, ORDER, out=x.clone()),
    "difference": lambda x: x.diff(dim=0),
    "entries": lambda x: x.flatten()[torch.arange(3 * N).view(N, 3).T.flatten()].view(N, 3),
    "each feature otherwise": lambda x: x.gather(0, torch.stack([ORDER, ORDER.flip(0), ORDER], 1)),
}


def loss(moved, reduction="mean"):
    return lambda p, x, y: F.mse_loss((moved(x) @ p).tanh(), moved(y), reduction=reduction)


STATISTICS = {
    **{name: row.make for name, row in (FIRST_ORDER | OF_DIAGONALS | HESSIANS).items()},
    "chosen": lambda f: batch_grad(f, samples=[0, 3, 1]),
    "ggn of one": lambda f: diag_ggn(f, samples=[1]),
}


@pytest.mark.quick
@pytest.mark.parametrize("moved", FOLLOWED.values(), ids=FOLLOWED)
def test_shares_are_in_the_order_of_the_batch(moved):
    times = len(moved(X)) // N
    wanted = batch_grad(loss(lambda x: x.repeat(times, 1)))(P, X, Y)
    assert_trees_close(batch_grad(loss(moved))(P, X, Y), wanted, EXACT)


@pytest.mark.parametrize("make", STATISTICS.values(), ids=STATISTICS)
def test_of_every_statistic(make):
    assert_trees_close(make(loss(lambda x: x[ORDER]))(P, X, Y), make(loss(lambda x: x))(P, X, Y), EXACT)


@given(st.permutations(range(5)), st.permutations(range(5)))
def test_of_any_order(first, second):
    first, second = torch.tensor(first), torch.tensor(second)
    x, y = Numbers(3)(5, 3), Numbers(4)(5, 3)

    def moved(x):
        return x[first].index_select(0, second)

    assert_trees_close(batch_grad(loss(moved))(P, x, y), batch_grad(loss(lambda x: x))(P, x, y), EXACT)


@pytest.mark.parametrize(
    "chosen", [[1, 2, 3], [3, 1], [2, 2, 2, 2, 0], [0, 0, 1, 2]], ids=["part", "two", "more", "as many"]
)
@pytest.mark.parametrize("before", [lambda x: x, lambda x: x.flip(0)], ids=["as they are", "flipped"])
def test_samples_count_as_often_as_they_are_chosen(chosen, before):
    wanted = torch.zeros(N, 3, 3, dtype=P.dtype)
    one = batch_grad(loss(lambda x: x, "sum"))(P, X, Y)
    for i in chosen:
        i = i if before(X)[0, 0] == X[0, 0] else N - 1 - i
        wanted[i] += one[i]
    assert_trees_close(batch_grad(loss(lambda x: before(x)[torch.tensor(chosen)], "sum"))(P, X, Y), wanted, EXACT)


@pytest.mark.parametrize("moved", REFUSED.values(), ids=REFUSED)
def test_what_is_no_order_is_refused(moved):
    with pytest.raises(SampleAxisError):
        batch_grad(loss(moved, "sum"))(P, X, Y)


@pytest.mark.parametrize(
    "f",
    [
        lambda p, x, y: F.mse_loss(x[ORDER] @ p, y),
        lambda p, x, y: ((x @ p) * (x.flip(0) @ p)).mean(),
    ],
    ids=["data alone", "pairs"],
)
def test_several_orders_are_refused(f):
    with pytest.raises(SampleAxisError):
        batch_grad(f)(P, X, Y)


def test_data_mixed_with_data_are_of_the_samples_in_order():
    """As in mixup."""

    def mean(p, x, y):
        z = (0.7 * x + 0.3 * x[ORDER]) @ p
        return 0.7 * F.mse_loss(z, y) + 0.3 * F.mse_loss(z, y[ORDER])

    def of_mixed(p, x, y, other):
        return 0.7 * F.mse_loss(x @ p, y) + 0.3 * F.mse_loss(x @ p, other)

    wanted = batch_grad(of_mixed)(P, 0.7 * X + 0.3 * X[ORDER], Y, Y[ORDER])
    assert_trees_close(batch_grad(mean)(P, X, Y), wanted, EXACT)


def test_losses_in_another_order_are_refused():
    def f(p, x):
        return (x[ORDER] @ p).square().sum(1)

    with pytest.raises(ArgumentError, match="selected or moved"):
        batch_grad(f)(P, X)
