"""Samples in any places of a scalar loss, any number of times: each has the share of all its places."""

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import (
    batch_grad,
    batch_l2_grad,
    outputs,
)
from invfunc.core.ways import known_way
from invfunc.testing import assert_trees_close, loop_batch_grad
from tests.strategies import Numbers

N = 4
P = {"w": Numbers()(3, 3), "b": Numbers(1)(3)}
X, Y = Numbers(2)(N, 3), Numbers(3)(N, 3)
EXACT = 1e-9


def model(p, x):
    return torch.tanh(x @ p["w"] + p["b"]).cumsum(-1)


def each(z, y):
    return (z - y).square().mean(-1)


def one_by_one(p, x, y, r):
    total = 0
    for i in r:
        z = model(p, x[i])
        total = total + each(z, y[i])
    return total / len(r)


def with_losses(p, x, y, r):
    return torch.stack([each(model(p, x[i]), y[i]) for i in r]).mean()


def sorted_by_data(p, x, y, r):
    """As packed sequences are, by their lengths."""
    x, y = x[r], y[r]
    order = x[:, 1].argsort()
    z = model(p, x[order])
    return F.mse_loss(z[order.argsort()], y)


def sorted_with_targets(p, x, y, r):
    x, y = x[r], y[r]
    _, order = x[:, 1].sort(descending=True)
    return F.mse_loss(model(p, x[order]), y[order])


WAYS = {
    "index": lambda p, x, y, r: F.mse_loss(model(p, x[r]), y[r]),
    "index_select": lambda p, x, y, r: F.mse_loss(
        model(p, x.index_select(0, torch.tensor(r))), y.index_select(0, torch.tensor(r))
    ),
    "one-hot of places": lambda p, x, y, r: F.mse_loss(model(p, x)[r], y[r]),
    "losses": lambda p, x, y, r: each(model(p, x), y)[r].mean(),
    "stack": lambda p, x, y, r: F.mse_loss(torch.stack([model(p, x[i]) for i in r]), y[r]),
    "cat": lambda p, x, y, r: F.mse_loss(torch.cat([model(p, x[i : i + 1]) for i in r]), y[r]),
    "unbind": lambda p, x, y, r: F.mse_loss(torch.stack([model(p, x.unbind()[i]) for i in r]), y[r]),
    "for": lambda p, x, y, r: F.mse_loss(torch.stack([model(p, row) for row in x[r]]), y[r]),
    "for of the rest": lambda p, x, y, r: F.mse_loss(torch.stack([row.exp().log() for row in model(p, x)[r]]), y[r]),
    "sum": one_by_one,
    "losses stacked": with_losses,
    "sorted": sorted_by_data,
    "sorted with targets": sorted_with_targets,
    "topk": lambda p, x, y, r: F.mse_loss(model(p, x[r][x[r][:, 0].topk(len(r))[1]]), y[r][x[r][:, 0].topk(len(r))[1]]),
    "twice": lambda p, x, y, r: F.mse_loss(model(p, torch.cat([x[r], x[r]])), y[r].repeat(2, 1)),
}
PLACES = st.lists(st.integers(0, N - 1), min_size=1, max_size=6)


def weighted(p, x, y, counts):
    return (each(outputs(model(p, x)), y) * counts).sum()


def counts(r):
    return torch.bincount(torch.tensor(r), minlength=N).to(X.dtype) / len(r)


@pytest.mark.quick
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
@given(r=PLACES)
def test_shares_are_summed_over_the_places_of_a_sample(way, r):
    wanted = batch_grad(weighted)(P, X, Y, counts(r))
    assert_trees_close(batch_grad(lambda p, x, y: way(p, x, y, r))(P, X, Y), wanted, EXACT)


# Of all samples, each computed where it belongs


def softmax_of(p, x):
    return (x @ p["w"]).softmax(1)


def by_experts(p, x, y):
    """Each sample is computed by the expert that its data choose."""
    z = torch.zeros_like(x)
    for e in range(2):
        (at,) = torch.where((x[:, 0] > 0) == bool(e))
        z = z.index_add(0, at, model(p, x[at]) * (e + 1))
    return F.mse_loss(z, y)


def by_two_experts(p, x, y):
    """By the two best of three, as parameters say."""
    z = torch.zeros_like(x)
    weights, chosen = softmax_of(p, x).topk(2, 1)
    for e in range(3):
        at, rank = torch.where(chosen == e)
        z.index_add_(0, at, model(p, x[at]) * p["b"][e] * weights[at, rank, None])
    return F.mse_loss(z, y)


def by_experts_that_are_hit(p, x, y):
    """As in transformers."""
    z = torch.zeros_like(x)
    weights, chosen = softmax_of(p, x).topk(2, 1)
    mask = F.one_hot(chosen, 4).permute(2, 1, 0)
    for hit in (mask.sum((-1, -2)) > 0).nonzero():
        rank, at = torch.where(mask[hit[0]])
        z.index_add_(0, at, model(p, x[None, at].reshape(-1, 3)) * weights[at, rank, None])
    return F.mse_loss(z, y)


def into_places(p, x, y):
    z = x.new_zeros(len(x), 3)
    for i in range(len(x)):
        z[i] = model(p, x[i])
    return F.mse_loss(z, y)


def experts_written(p, x, y):
    z = x.new_zeros(len(x), 3)
    for e in range(2):
        (at,) = torch.where((y[:, 0] > 0) == bool(e))
        z[at] = model(p, x[at]) * (e + 1)
    return F.mse_loss(z, y)


def views(p, x, y):
    """Two views of each sample, as in contrastive learning."""
    z = model(p, torch.cat([x, x + y]))
    one, other = z.chunk(2)
    return F.mse_loss(one, other)


def views_in_another_order(p, x, y):
    z = model(p, torch.cat([x, y.flip(0)]))
    return F.mse_loss(z[: len(x)], z[len(x) :].flip(0))


def chunks(p, x, y):
    return sum(F.mse_loss(model(p, a), b, reduction="sum") for a, b in zip(x.split(3), y.split(3), strict=True))


def pairs_of_terms(p, x, y):
    order = torch.arange(len(x)).roll(1)
    return F.mse_loss(model(p, x[order]), y[order]) + F.mse_loss(model(p, x), y)


def both_orders(p, x, y):
    order = torch.arange(len(x)).roll(1)
    return F.mse_loss(model(p, torch.cat([x, x[order]])), torch.cat([y, y[order]]))


def batches_of_one(p, x, y):
    return sum(F.mse_loss(model(p, x[i : i + 1]), y[i : i + 1]) for i in range(len(x)))


def any_operation(p, x, y):
    """Of what belongs to one sample, anything may be computed: here a product of it with itself, and a norm."""
    return sum(torch.linalg.norm(torch.outer(model(p, a), model(p, a)).matrix_exp()) for a in x + y)


def repeated(p, x, y):
    return F.mse_loss(model(p, x.repeat(2, 1)), y.repeat(2, 1))


def repeated_side_by_side(p, x, y):
    return F.mse_loss(model(p, x.repeat_interleave(3, 0)), y.repeat_interleave(3, 0))


def the_best_is_not_counted(p, x, y):
    """Numbers that all data give are constants, as they are to torch: here which loss is the smallest."""
    losses = each(model(p, x), y)
    return losses.sum() - losses[losses.argmin()].detach()


PROGRAMS = [by_experts, by_two_experts, by_experts_that_are_hit, into_places, experts_written, views]
PROGRAMS += [views_in_another_order, chunks, pairs_of_terms, both_orders, batches_of_one, any_operation, repeated]
PROGRAMS += [repeated_side_by_side, the_best_is_not_counted]
SUMS = {chunks, batches_of_one, any_operation, the_best_is_not_counted}


@pytest.mark.parametrize("f", PROGRAMS, ids=lambda f: f.__name__)
def test_samples_are_followed_to_where_they_are_computed(f):
    def apart(p):
        terms = [f(p, X[n : n + 1], Y[n : n + 1]) for n in range(N)]
        return torch.stack(terms) / (1 if f in SUMS else N)

    shares = torch.func.jacrev(apart)(P)
    assert_trees_close(batch_grad(f)(P, X, Y), shares, EXACT)
    norms = {name: g.square().flatten(1).sum(1) for name, g in shares.items()}
    assert_trees_close(batch_l2_grad(f)(P, X, Y), norms, EXACT)


# Samples that are picked, permuted, repeated, or computed one by one are followed, and are right


def test_a_sample_alone_meets_a_parameter_in_an_operation_without_a_rule():
    """The operation sees the tensor of the sample as it is there, with as many dims."""
    w, x = Numbers()(3), Numbers(1)(4, 3)

    def losses(w, x):
        return torch.stack([torch.outer(each, w).tanh().sum() for each in x])

    t = batch_grad(losses)
    assert_trees_close(t(w, x), loop_batch_grad(losses)(w, x), 1e-12)
    assert known_way(losses, t.called) == 0
