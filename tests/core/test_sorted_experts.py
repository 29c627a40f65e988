"""Tokens that are sorted by their experts, as mixtures of experts compute on them: each is still of its sample."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from invfunc import batch_grad, diag_ggn, variance
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

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
