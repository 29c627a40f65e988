"""Samples and entries that are selected: each has the share of what was selected of it, and none if nothing was."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.func import grad

from invfunc import InvFuncError, batch_grad, batch_l2_grad, diag_ggn, kfac, variance
from invfunc.errors import SampleAxisError
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


# Sums over the samples, of groups and times a parameter: each sample has the share of what it adds

GROUPS = 3
WEIGHTS = torch.tensor([0.2, 0.3, 0.5], dtype=torch.float64)


def losses_of_groups(params: dict, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(x @ params["w"] + params["b"], y, reduction="none")


def zeros(like: torch.Tensor) -> torch.Tensor:
    return like.new_zeros(GROUPS)


def mean_of_means(z: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    counts = torch.bincount(group, minlength=GROUPS).clamp(min=1)
    return (zeros(z).index_add(0, group, z) / counts).mean()


def counted(z: torch.Tensor, group: torch.Tensor) -> torch.Tensor:
    counts = zeros(z).index_add(0, group, torch.ones_like(group, dtype=z.dtype))
    return (zeros(z).index_add(0, group, z) / counts.clamp(min=1)).sum()


ADDED: dict[str, Callable] = {
    "index_add": lambda z, g: WEIGHTS @ zeros(z).index_add(0, g, z),
    "in place": lambda z, g: WEIGHTS @ zeros(z).index_add_(0, g, z, alpha=2),
    "scatter_add": lambda z, g: WEIGHTS @ zeros(z).scatter_add(0, g, z),
    "scatter_add_": lambda z, g: (zeros(z).scatter_add_(0, g, z) * WEIGHTS).sum() / len(z),
    "rows": lambda z, g: (z.new_zeros(GROUPS, 2).index_add(0, g, torch.stack([z, 3 * z], 1)) * WEIGHTS[:, None]).sum(),
    "means": mean_of_means,
    "counted by index_add": counted,
}


def drawn_groups(rand: Numbers, group: list[int]) -> tuple:
    n = len(group)
    params = {"w": rand(3, 2), "b": rand(2)}
    return params, rand(n, 3), torch.arange(n) % 2, torch.tensor(group)


@pytest.mark.parametrize("added", ADDED.values(), ids=ADDED)
@given(group=st.lists(st.integers(0, GROUPS - 1), min_size=2, max_size=6), seed=st.integers(0, 99))
def test_shares_are_those_of_the_weights(added, group, seed):
    params, x, y, group = drawn_groups(Numbers(seed), group)

    def loss(params, x, y, group):
        return added(losses_of_groups(params, x, y), group)

    weights = grad(added)(losses_of_groups(params, x, y), group)  # as the loss is linear in the losses
    wanted = batch_grad(losses_of_groups)(params, x, y)
    wanted = {name: torch.einsum("n,n...->n...", weights, share) for name, share in wanted.items()}
    found = batch_grad(loss)(params, x, y, group)
    assert_trees_close(found, wanted, 1e-12)
    spread = {name: share.var(0, correction=0) for name, share in wanted.items()}
    assert_trees_close(variance(loss)(params, x, y, group), spread, 1e-10, 1e-12)
    weighted = diag_ggn(lambda params, x, y, w: losses_of_groups(params, x, y) @ w)(params, x, y, weights)
    assert_trees_close(diag_ggn(loss)(params, x, y, group), weighted, 1e-12)


@pytest.mark.parametrize(
    ("mixed", "at"),
    [
        (lambda z, g: zeros(z).index_add(0, g, z).square().sum(), "square"),
        (lambda z, g: (z - zeros(z).index_add(0, g, z)[g]).square().sum(), "getitem"),
        (lambda z, g: (z * zeros(z).scatter_add(0, g, z)[g]).sum(), "getitem"),
    ],
)
def test_what_is_not_linear_in_the_sums_is_named(mixed, at):
    params, x, y, group = drawn_groups(Numbers(0), [0, 1, 0, 2, 1])
    with pytest.raises(SampleAxisError, match=f"`{at}`"):
        batch_grad(lambda params, x, y, group: mixed(losses_of_groups(params, x, y), group))(params, x, y, group)


# A parameter that multiplies a sum over the samples, as a task's weight does: each has the share of what it adds

N, TIGHT = 5, 1e-9
X, Y, C = Numbers(1)(N, 6), Numbers(2)(N, 3), torch.tensor([0, 2, 1, -100, 2])
P = {"w": Numbers(3)(6, 3), "s": Numbers(4)(2), "v": Numbers(5)(3, 3)}


def affine(p, x):
    return torch.tanh(x @ p["w"])


@pytest.mark.parametrize(
    "bent",
    [lambda a, p: (a * p["s"][0]) * (a * p["s"][1]), lambda a, p: a ** p["s"][0].exp(), lambda a, p: p["s"][0] / a],
)
def test_what_is_not_linear_in_the_sum_is_refused(bent):
    with pytest.raises(SampleAxisError):
        batch_grad(lambda p, x, y: bent(F.mse_loss(affine(p, x), y), p))(P, X, Y)
