"""Sums over the samples that are moved and combined, and heads that are joined before the loss."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import batch_grad, chunked, diag_ggn, ekfac, kfac, sqrt_ggn
from invfunc.errors import SampleAxisError
from invfunc.testing import assert_trees_close, dense_diag_ggn, loop_batch_grad
from tests.strategies import Numbers

EXACT = 1e-10
SIZES = st.integers(1, 4)
WEIGHTS = Numbers(5)(4, 4)


def linear(w, x):
    return (x @ w).sin()


SUMS = {
    "transposed": lambda w, x: (linear(w, x)[:, :, None] * WEIGHTS[: w.shape[1]]).sum(0).T.sum(),
    "permuted": lambda w, x: ((linear(w, x)[:, :, None] * WEIGHTS[0]).sum(0).permute(1, 0) * WEIGHTS[:, :1]).sum(),
    "unbound": lambda w, x: sum(i * z for i, z in enumerate(linear(w, x).sum(0).unbind(), 1)),
    "in chunks": lambda w, x: 2 * linear(w, x).sum(0).chunk(2)[-1].sum(),
    "expanded": lambda w, x: (linear(w, x).sum(0).expand(4, -1) * WEIGHTS[:, : w.shape[1]]).sum(),
    "weighted losses": lambda w, x: torch.stack([linear(w, x).sum(), linear(w, x).square().sum()]) @ WEIGHTS[0, :2],
    "padded": lambda w, x: (F.pad(linear(w, x).sum(0), (0, 1)) * WEIGHTS[0, :1]).sum(),
    "gathered": lambda w, x: linear(w, x).sum(0).gather(0, torch.zeros(3, dtype=torch.int64, device=x.device)).sum(),
    "masked": lambda w, x: linear(w, x).sum(0).masked_fill(WEIGHTS[0, : w.shape[1]] > 0, 0).sum(),
    "added up": lambda w, x: (
        linear(w, x).sum(0).new_zeros(4).index_add(0, torch.tensor([2]), linear(w, x).sum((0, 1))[None]).sum()
    ),
    "by einsum": lambda w, x: torch.einsum("i,ij->", linear(w, x).sum(0), WEIGHTS[: w.shape[1]]),
}


@pytest.mark.parametrize("f", SUMS.values(), ids=SUMS)
@given(n=SIZES, c=SIZES)
def test_sums_over_the_samples_that_are_moved(f, n, c):
    w, x = Numbers()(3, c), Numbers(1)(n, 3)
    shares = loop_batch_grad(lambda w, x: torch.stack([f(w, row[None]) for row in x]))(w, x)
    assert_trees_close(batch_grad(f)(w, x), shares, EXACT)


@pytest.mark.parametrize(
    "f",
    [lambda t: t @ t, lambda t: torch.einsum("i,i->", t, t), lambda t: (t / t[0]).sum()],
)
def test_products_of_sums_mix_the_samples(f):
    with pytest.raises(SampleAxisError, match="sum"):
        batch_grad(lambda w, x: f(linear(w, x).sum(0)).sum())(Numbers()(3, 2), Numbers(1)(4, 3))


def heads(w, x):
    return x @ w, (x @ w).tanh() @ w


def both(t):
    return torch.cat([t, t])


JOINED = {
    "cat": lambda z, t: F.cross_entropy(torch.cat(z), both(t)),
    "stack": lambda z, t: F.cross_entropy(torch.stack(z, 2), t[:, None].expand(-1, 2)),
    "mean of heads": lambda z, t: F.cross_entropy(torch.stack(z).mean(0), t),
    "sum of heads": lambda z, t: F.cross_entropy((z[0] + 2 * z[1]) / 3, t),
    "difference": lambda z, t: F.mse_loss(z[0] - z[1], F.one_hot(t, z[0].shape[1]).to(z[0])),
    "side by side": lambda z, t: F.cross_entropy(torch.cat(z, 1), t),
    "apart": lambda z, t: F.cross_entropy(z[0], t) + F.mse_loss(z[1], F.one_hot(t, z[0].shape[1]).to(z[0])),
}


@pytest.mark.parametrize("loss", JOINED.values(), ids=JOINED)
@given(n=SIZES, c=st.integers(2, 4))
def test_curvature_of_joined_heads(loss, n, c):
    args = Numbers()(c, c), Numbers(1)(n, c), Numbers(2).below(c, n)
    assert_trees_close(diag_ggn(heads, loss)(*args), dense_diag_ggn(heads, loss)(*args), EXACT)


@pytest.mark.parametrize(
    "loss, columns",
    [(JOINED["cat"], 4), (JOINED["mean of heads"], 2), (JOINED["stack"], 4), (JOINED["side by side"], 5)],
)
def test_joined_heads_keep_the_columns_of_the_softmax(loss, columns):
    args = Numbers()(3, 3), Numbers(1)(4, 3), Numbers(2).below(3, 4)
    assert len(sqrt_ggn(heads, loss)(*args)) == columns


@pytest.mark.parametrize("n", [2, 3, 7])
def test_columns_of_one_output_count_where_only_another_reaches(n):
    """In parts of the columns, of which some are zero at a use of a parameter, or at all of them."""

    def f(p, x):
        return torch.tanh(x @ p["w"]) @ p["v"], (2 * x.sin()) @ p["w"]

    def loss(z, y):
        return F.cross_entropy(z[0], y[0]) + F.mse_loss(z[1], y[1])

    rand = Numbers()
    args = {"w": rand(3, 4), "v": rand(4, 3)}, rand(5, 3), (torch.arange(5) % 3, rand(5, 4))
    made = [
        sqrt_ggn(f, loss),
        *(kfac(f, loss, weight_sharing=s, fisher="exact") for s in ("expand", "reduce", "backpack")),
    ]
    for transform in (*made, ekfac(f, loss, fisher="exact")):
        assert_trees_close(chunked(transform, n, over="outputs")(*args), transform(*args), EXACT)
