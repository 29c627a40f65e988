"""Samples and entries that are selected: each has the share of what was selected of it, and none if nothing was."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import (
    InvFuncError,
    batch_grad,
    batch_l2_grad,
    diag_ggn,
    kfac,
    variance,
)
from invfunc.testing import assert_trees_close, dense_diag_ggn, loop_batch_grad
from tests.strategies import Numbers

EXACT = 1e-10
SIZES = st.integers(1, 4)


def model(params, x):
    return (x @ params["w"]).tanh() @ params["v"] + params["b"]


def drawn(n, c):
    rand = Numbers()
    params = {"w": rand(3, 3), "v": rand(3, c), "b": rand(c)}
    return params, rand(n, 3), Numbers(1).below(c, n), Numbers(2).below(2, n).bool()


def each(z, y):
    return F.cross_entropy(z, y, reduction="none")


def numbered(z):
    return torch.arange(len(z), device=z.device)


def of_layer(params, x, y, mask):
    """The rest of the model is computed of the samples of the mask only, as the head of a masked language model is."""
    h = (x @ params["w"]).tanh()[mask]
    return F.cross_entropy(h @ params["v"] + params["b"], y[mask], reduction="sum")


MASKED = {
    "losses[mask]": lambda p, x, y, m: each(model(p, x), y)[m].sum(),
    "losses of masked outputs": lambda p, x, y, m: F.cross_entropy(model(p, x)[m], y[m], reduction="sum"),
    "masked_select": lambda p, x, y, m: each(model(p, x), y).masked_select(m).sum(),
    "indices of a mask": lambda p, x, y, m: each(model(p, x), y)[m.nonzero().squeeze(1)].sum(),
    "index_select": lambda p, x, y, m: each(model(p, x), y).index_select(0, m.nonzero()[:, 0]).sum(),
    "a layer of masked samples": of_layer,
    "masked data": lambda p, x, y, m: each(model(p, x[m]), y[m]).sum(),
    "written": lambda p, x, y, m: each(model(p, x), y).index_put((~m,), torch.zeros(()).to(x)).sum(),
    "entries of one-hot rows": lambda p, x, y, m: (
        -(model(p, x).log_softmax(1))[(F.one_hot(y, p["b"].numel()) * m[:, None]).bool()].sum()
    ),
}


@pytest.mark.parametrize("program", MASKED.values(), ids=MASKED)
@given(n=SIZES, c=SIZES)
def test_masked_out_samples_have_no_share(program, n, c):
    args = drawn(n, c)
    shares = loop_batch_grad(lambda p, x, y, m: each(model(p, x), y) * m)(*args)
    assert_trees_close(batch_grad(program)(*args), shares, EXACT)
    norms = batch_l2_grad(lambda p, x, y, m: each(model(p, x), y) * m)(*args)
    assert_trees_close(batch_l2_grad(program)(*args), norms, EXACT)


LOSSES = {
    "losses[mask].mean()": lambda z, t: each(z, t[0])[t[1]].mean(),
    "logits[mask]": lambda z, t: F.cross_entropy(z[t[1]], t[0][t[1]]),
    "masked_select": lambda z, t: each(z, t[0]).masked_select(t[1]).mean(),
    "-log_softmax[arange, y]": lambda z, t: -z.log_softmax(1)[numbered(z), t[0]][t[1]].mean(),
    "logsumexp - z[range, y]": lambda z, t: (z.logsumexp(1) - z[range(len(z)), t[0].long()])[t[1]].mean(),
}


PERM = torch.tensor([2, 0, 3, 1])
CRITERIA = {
    "cross_entropy": lambda z, y: F.cross_entropy(z, y),
    "nll_loss": lambda z, y: F.nll_loss(z, y),
    "nll_loss, sum": lambda z, y: F.nll_loss(z, y, reduction="sum"),
    "cross_entropy of rows": lambda z, y: F.cross_entropy(z, F.one_hot(y, 4).to(z)),
    "mse_loss": lambda z, y: F.mse_loss(z, F.one_hot(y, 4).to(z)),
    "by hand": lambda z, y: (z - y[:, None]).square().mean(),
    "gaussian_nll_loss": lambda z, y: F.gaussian_nll_loss(z, F.one_hot(y, 4).to(z), z.square() + 1),
}


@pytest.mark.parametrize("criterion", CRITERIA.values(), ids=CRITERIA)
def test_outputs_and_targets_have_to_be_of_the_same_samples(criterion):
    """So many columns as samples, where a criterion could take ones for the others."""
    params, x, y, _ = drawn(4, 4)
    plain = batch_grad(lambda p, x, y: criterion(model(p, x), y))(params, x, y)
    moved = batch_grad(lambda p, x, y: criterion(model(p, x)[PERM], y[PERM]))(params, x, y)
    assert_trees_close(moved, plain, EXACT)
    for wrong in (lambda p, x, y: criterion(model(p, x)[PERM], y), lambda p, x, y: criterion(model(p, x).T, y)):
        with pytest.raises(InvFuncError, match="samples"):
            batch_grad(wrong)(params, x, y)


@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
@given(n=SIZES, c=SIZES)
def test_curvature_of_a_masked_loss(loss, n, c):
    params, x, y, mask = drawn(n, c)
    mask[0] = True
    args = (params, x, (y, mask))
    wanted = dense_diag_ggn(model, lambda z, t: (each(z, t[0]) * t[1]).sum() / t[1].sum())(*args)
    assert_trees_close(diag_ggn(model, loss)(*args), wanted, EXACT)
    found = diag_ggn(model, loss, per_sample=True)(*args)
    assert_trees_close({k: d.sum(0) for k, d in found.items()}, wanted, EXACT)


def test_factors_count_masked_rows_only():
    x, y, mask = Numbers()(4, 3), Numbers(1).below(3, 4), torch.tensor([True, False, True, True])
    w = Numbers(2)(3, 3)
    found = kfac(lambda w, x, y: F.cross_entropy(x[mask] @ w, y[mask], reduction="sum"), fisher="exact")(w, x, y)
    wanted = kfac(lambda w, x, y: F.cross_entropy(x @ w, y, reduction="sum"), fisher="exact")(w, x[mask], y[mask])
    assert_trees_close(found.dense(), wanted.dense(), EXACT)


# Parts of a batch that do not reach every parameter


# Tokens that are sorted by their experts, as mixtures of experts compute on them: each is still of its sample

EXPERTS, D = 3, 4


def routed(p, x, many):
    """The tokens of all samples, their experts, and how much each of these counts."""
    tokens = x.flatten(0, 1)
    weights, experts = (tokens @ p["router"]).softmax(1).topk(many, 1)
    return tokens, weights, experts


def dense(p, x, many):
    tokens, weights, experts = routed(p, x, many)
    share = weights.new_zeros(len(tokens), EXPERTS).scatter_add(1, experts, weights)
    h = torch.einsum("td,edk->tek", tokens, p["up"]).tanh()
    return ((h * share[..., None]).sum(1) @ p["head"]).unflatten(0, x.shape[:2]).mean(1)


def by_sorting(product, back):
    def model(p, x, many):
        tokens, weights, experts = routed(p, x, many)
        experts, order = experts.flatten().sort()
        counts = experts.to(x.dtype).histc(EXPERTS, 0, EXPERTS - 1)
        ends = counts.cumsum(0, dtype=torch.int32)
        h = product(tokens[order // many], p["up"], ends).tanh() * weights.flatten()[order][:, None]
        return (back(h, order, len(tokens), many) @ p["head"]).unflatten(0, x.shape[:2]).mean(1)

    return model


def split(rows, weights, ends):
    return torch.cat([a @ w for a, w in zip(rows.tensor_split(ends[:-1].tolist()), weights, strict=True)])


def grouped(rows, weights, ends):
    return F.grouped_mm(rows, weights, offs=ends)


BACK = {
    "inverse": lambda h, order, count, many: h[order.argsort()].view(count, many, D).sum(1),
    "written": lambda h, order, count, many: torch.zeros_like(h).index_put((order,), h).view(count, many, D).sum(1),
    "index_add": lambda h, order, count, many: h.new_zeros(count, D).index_add(0, order // many, h),
}


def losses(z, y):
    return F.cross_entropy(z, y, reduction="none")


@pytest.mark.parametrize("back", BACK)
@pytest.mark.parametrize(("product", "dtype", "exact"), [(split, torch.float64, 1e-9), (grouped, torch.float32, 1e-4)])
@settings(max_examples=6)
@given(n=st.integers(1, 3), length=st.integers(1, 3), many=st.integers(1, 2), seed=st.integers(0, 99))
def test_shares_are_those_of_the_dense_mixture(product, dtype, exact, back, n, length, many, seed):
    rand, model = Numbers(seed), by_sorting(product, BACK[back])
    params = {"router": rand(D, EXPERTS), "up": rand(EXPERTS, D, D), "head": rand(D, 2)}
    params = {name: p.to(dtype) for name, p in params.items()}
    x, y = rand(n, length, D).to(dtype), rand.below(2, n)

    def each(p, x, y, model=model):
        return losses(model(p, x, many), y)

    wanted = batch_grad(lambda p, x, y: each(p, x, y, dense))(params, x, y)
    assert_trees_close(batch_grad(each)(params, x, y), wanted, exact)
    assert_trees_close(batch_grad(lambda *args: each(*args).sum())(params, x, y), wanted, exact)
    spread = {name: g.var(0, correction=0) for name, g in wanted.items()}
    assert_trees_close(variance(each)(params, x, y), spread, exact, 1e-7 if n == 1 else 0)
    diagonal = diag_ggn(lambda p, x: dense(p, x, many), F.cross_entropy)(params, x, y)
    assert_trees_close(diag_ggn(lambda p, x: model(p, x, many), F.cross_entropy)(params, x, y), diagonal, exact)


@pytest.mark.parametrize("moved", [False, True])
def test_an_index_of_samples_picks_in_rows_of_a_parameter(moved):
    """The rows are those of its own samples, also where they are sums over data."""
    rand, i = Numbers(), torch.tensor([0, 1, 1])
    w, x = rand(3, 2), rand(3, 2)

    def f(w, x, i):
        rows = (torch.eye(3).flip(0).to(x) @ x) * w if moved else w
        return rows.gather(1, i[:, None])[:, 0] * x[:, 0]

    assert_trees_close(batch_grad(f)(w, x, i), torch.func.jacrev(f)(w, x, i), EXACT)
