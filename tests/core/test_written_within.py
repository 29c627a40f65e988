"""What is written into zeros for one sample alone, as the messages in each graph of a batch are, is of that sample."""

from contextlib import nullcontext, suppress

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import batch_grad
from invfunc.errors import SampleAxisError
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

N, D, EXACT = 4, 3, 1e-9
P = {"a": Numbers()(2, D), "b": Numbers(1)(D, 2)}


def along(h, e):
    return e[1][:, None].expand(-1, h.shape[1])


def adjacency(h, e):
    a = torch.zeros(len(h), len(h), dtype=h.dtype)
    a[e[1], e[0]] = 1.0
    return a @ h


def by_mask(h, e):
    z = torch.zeros_like(h)
    reached = torch.arange(len(h)) == e[1][:, None]
    z[reached.any(0)] = 2.0
    return z * h


def by_degree(h, e):
    degree = torch.zeros(len(h), dtype=h.dtype).scatter_add(0, e[1], torch.ones(e.shape[1], dtype=h.dtype))
    return h / (1 + degree[:, None])


WAYS = {
    "index_add": lambda h, e: torch.zeros_like(h).index_add(0, e[1], h[e[0]]),
    "index_add_": lambda h, e: torch.zeros_like(h).index_add_(0, e[1], h[e[0]]),
    "index_copy": lambda h, e: torch.zeros_like(h).index_copy(0, e[1], h[e[0]]),
    "scatter_add": lambda h, e: torch.zeros_like(h).scatter_add(0, along(h, e), h[e[0]]),
    "scatter": lambda h, e: torch.zeros_like(h).scatter(0, along(h, e), 1.0) * h,
    "index_put": lambda h, e: torch.zeros_like(h).index_put((e[1],), h[e[0]], accumulate=True),
    "index_put of nothing": lambda h, e: torch.zeros_like(h).index_put((e[1][:0],), h[e[0]][:0]) + h,
    "index_add of nothing": lambda h, e: torch.zeros_like(h).index_add(0, e[1][:0], h[e[0]][:0]).movedim(0, 1).T + h,
    "adjacency": adjacency,
    "mask": by_mask,
    "degree": by_degree,
}


def losses(write):
    """The losses of N graphs, each with its nodes `[nodes, 2]`, its edges `[2, edges]` and its class."""

    def one(p, x, e, y):
        h = x @ p["a"]
        return F.cross_entropy(torch.tanh(h + write(h, e)).sum(0) @ p["b"], y)

    return lambda p, x, e, y: torch.stack([one(p, x[i], e[i], y[i]) for i in range(len(x))])


def graphs(nodes, edges, seed):
    g = torch.Generator().manual_seed(seed)
    e = torch.stack([torch.randperm(nodes, generator=g)[:edges] for _ in range(2 * N)])
    return Numbers(seed)(N, nodes, 2), e.unflatten(0, (N, 2)), torch.randint(2, (N,), generator=g)


@pytest.mark.parametrize("way", WAYS)
@given(nodes=st.integers(1, 2 * N), edges=st.integers(0, 5), seed=st.integers(0, 99))
def test_shares_are_those_of_the_loop(way, nodes, edges, seed):
    """But with as many nodes as samples, those that are written may seem to be one of each: then [N] losses are."""
    f, data = losses(WAYS[way]), graphs(nodes, edges, seed)
    wanted = torch.func.jacrev(f)(P, *data)
    assert_trees_close(batch_grad(f)(P, *data), wanted, EXACT)
    with nullcontext() if nodes % N else suppress(SampleAxisError):
        assert_trees_close(batch_grad(lambda *a: f(*a).mean())(P, *data), {k: v / N for k, v in wanted.items()}, EXACT)
