"""Writes in place into tensors of samples: of parameters, through a view, and for one sample alone."""

from contextlib import nullcontext, suppress

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import batch_grad, diag_ggn, diag_hessian, variance
from invfunc.errors import InvFuncError, SampleAxisError
from invfunc.testing import assert_trees_close, dense_diag_ggn, dense_diag_hessian, loop_batch_grad, loop_variance
from tests.strategies import Numbers

N, T, D, EXACT = 4, 3, 4, 1e-9
P = {"w": Numbers()(D, D), "token": Numbers(1)(D), "v": Numbers(2)(D, 2)}


def twice(h, x, m, p):
    h[:, 0] = p["token"]
    h[:, 0] *= p["token"]
    return h


def scaled(h, x, m, p):
    h[:, :, :2] *= p["token"][:2]
    return h


def scaled_data(h, x, m, p):
    z = x.clone()
    z[..., 1:] *= p["token"][1:]
    return z @ p["w"] + h


def features_in_data(h, x, m, p):
    z = x.clone()
    z[:, :2] = h[:, 1:] * p["token"]
    return z.tanh() @ p["w"]


def data_in_features(h, x, m, p):
    z = h * p["token"]
    z[:, 1] = x[:, 0]
    return z


def a_view_of_data(h, x, m, p):
    z = x.clone()
    first = z[:, :1]
    first += h[:, 1:2] * p["token"]
    return z + first


WRITES_INTO_H = {
    "mask_token": lambda h, x, m, p: h.__setitem__(m, p["token"]),
    "derived_token": lambda h, x, m, p: h.__setitem__(m, p["token"].exp() * 2),
    "entries": lambda h, x, m, p: h.__setitem__((m, slice(1, 3)), p["token"][:2]),
    "one_place": lambda h, x, m, p: h.__setitem__((slice(None), 0), p["token"]),
    "one_number": lambda h, x, m, p: h.__setitem__((slice(None), slice(None), 1), p["token"][0]),
    "copied": lambda h, x, m, p: h[:, 0].copy_(p["token"]),
}


def then(write):
    def way(h, *args):
        write(h, *args)
        return h

    return way


WAYS = {name: then(write) for name, write in WRITES_INTO_H.items()} | {
    "twice": twice,
    "scaled": scaled,
    "scaled_data": scaled_data,
    "features_in_data": features_in_data,
    "data_in_features": data_in_features,
    "a_view_of_data": a_view_of_data,
    "filled": lambda h, x, m, p: h.masked_fill_(m[..., None], p["token"][0]),
    "copied_into_what_is_new": lambda h, x, m, p: torch.empty_like(h).copy_(p["token"].exp()) * h,
    "put": lambda h, x, m, p: h.index_put_((m,), p["token"].exp()),
    "added": lambda h, x, m, p: h.index_put_((m,), p["token"], accumulate=True),
}
each_way = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)


def outputs(way):
    return lambda p, x, m: torch.tanh(way((x @ p["w"]).sin(), x, m, p)).mean(1) @ p["v"]


def losses(way):
    return lambda p, x, m, y: F.cross_entropy(outputs(way)(p, x, m), y, reduction="none")


def batch(seed, n=N):
    g = torch.Generator().manual_seed(seed)
    return Numbers(seed)(n, T, D), torch.rand(n, T, generator=g) < 0.4, torch.randint(2, (n,), generator=g)


@each_way
@given(seed=st.integers(0, 99), n=st.integers(1, 5))
def test_shares_are_those_of_the_loop(way, seed, n):
    f, data = losses(way), batch(seed, n)
    wanted = torch.func.jacrev(f)(P, *data)
    assert_trees_close(batch_grad(f)(P, *data), wanted, EXACT)
    mean = batch_grad(lambda *a: f(*a).mean())(P, *data)
    assert_trees_close(mean, {k: v / n for k, v in wanted.items()}, EXACT)


@each_way
def test_of_the_criterion(way):
    f, data = losses(way), batch(0)
    if way in (WAYS["put"], WAYS["added"]):
        with pytest.raises(InvFuncError):  # the last resort has no columns
            diag_ggn(f)(P, *data)
        return
    probs = outputs(way)(P, *data[:2]).softmax(1)
    hessian = torch.diag_embed(probs) - probs[:, :, None] * probs[:, None]
    jacobian = torch.func.jacrev(outputs(way))(P, *data[:2])
    wanted = {k: torch.einsum("nc...,ncd,nd...->...", j, hessian, j) for k, j in jacobian.items()}
    assert_trees_close(diag_ggn(f)(P, *data), wanted, EXACT)


# What is written in place through a view: the base of the view has it, and all that is computed from it afterwards

N_VIEWS = 4
X, Y = Numbers()(N_VIEWS, 3, 5), torch.tensor([0, 2, 1, 2])
P_VIEWS = {"first": Numbers(1)(5, 5), "in place": Numbers(2)(5), "head": Numbers(3)(3, 15)}

VIEWS = {
    "slice": lambda h: h[:, 1:],
    "select": lambda h: h[:, 0],
    "all": lambda h: h[:],
    "view": lambda h: h.view(-1, 5),
    "transposed": lambda h: h.transpose(0, 1),
    "narrow": lambda h: h.narrow(1, 0, 2),
    "view of a view": lambda h: h.view(-1, 5).view_as(h)[:, :2],
}
WRITES = {
    "add_": lambda v, p: v.add_(p),
    "mul_": lambda v, p: v.mul_(p),
    "iadd": lambda v, p: v.__iadd__(p),
    "imul": lambda v, p: v.__imul__(p),
    "div_": lambda v, p: v.div_(p + 4),
    "sub_, keyword": lambda v, p: v.sub_(other=p, alpha=0.5),
    "addcmul_": lambda v, p: v.addcmul_(v.detach().clone(), p),
    "copy_": lambda v, p: v.copy_(v.clone() * p),
    "twice": lambda v, p: v.add_(p).mul_(p),
    "nonlinear": lambda v, p: v.mul_(p).tanh_(),
    "relu": lambda v, p: F.relu(v.add_(p), inplace=True),
    "leaky": lambda v, p: F.leaky_relu_(v.add_(p), 0.1),
}


def model(view, write):
    def f(p, x):
        h = F.linear(x, p["first"]).sin()
        write(view(h), p["in place"])
        return F.linear(h.tanh().flatten(1), p["head"])

    return f


class Added(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h, p):
        ctx.mark_dirty(h)
        return h.add_(p)

    @staticmethod
    def backward(ctx, g):
        return g, g.flatten(0, -2).sum(0)


def listed(v, p):
    torch._foreach_mul_([v], [p])


@pytest.mark.parametrize("write", [Added.apply, listed])
def test_what_writes_unseen_or_into_several(write):
    """Right, sample by sample."""
    f = model(lambda h: h, write)

    def losses(p, x, y):
        return F.cross_entropy(f(p, x), y, reduction="none")

    for loss in (losses, lambda p, x, y: losses(p, x, y).sum()):
        assert_trees_close(batch_grad(loss)(P_VIEWS, X, Y), loop_batch_grad(losses)(P_VIEWS, X, Y), rtol=1e-10)


REPEATED = {
    "+=": lambda b, z: b[:, 0].__iadd__(z[:, 0]),
    "item +=": lambda b, z: b.__setitem__((slice(None), 0), b[:, 0].add_(z[:, 0])),
    "*=": lambda b, z: b[:, 0].mul_(z[:, 0]),
    "copy_": lambda b, z: b[:, 0].copy_(z[:, 0]),
    "[:, 0] =": lambda b, z: b.__setitem__((slice(None), 0), z[:, 0]),
}


@pytest.mark.parametrize("called", REPEATED)
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("form", ["[N]", "sum"])
def test_what_is_written_into_a_repeated_parameter(called, n, form):
    """Right, or an error of ours."""

    def losses(p, x):
        b = p["b"].repeat(len(x), 1)
        REPEATED[called](b, x @ p["w"])
        return b.square().sum(1)

    params, x = {"w": Numbers(1)(3, 2), "b": Numbers(2)(2)}, Numbers(3)(n, 3)
    for make in (batch_grad, diag_hessian):
        try:
            found = make(losses if form == "[N]" else lambda p, x: losses(p, x).sum())(params, x)
        except InvFuncError:
            continue
        wanted = loop_batch_grad if make is batch_grad else dense_diag_hessian
        assert_trees_close(found, wanted(losses)(params, x), 1e-10)


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
class TestWrittenViews:
    def test_shares(self, view, write):
        f = model(view, write)

        def losses(p, x, y):
            return F.cross_entropy(f(p, x), y, reduction="none")

        wanted = loop_batch_grad(losses)(P_VIEWS, X, Y)
        assert_trees_close(batch_grad(losses)(P_VIEWS, X, Y), wanted, rtol=1e-10)
        assert_trees_close(variance(losses)(P_VIEWS, X, Y), loop_variance(losses)(P_VIEWS, X, Y), rtol=1e-10)

        def loss(p, x, y):
            return F.cross_entropy(f(p, x), y, reduction="sum")

        assert_trees_close(batch_grad(loss)(P_VIEWS, X, Y), wanted, rtol=1e-10)

    def test_curvature(self, view, write):
        f = model(view, write)
        wanted = dense_diag_ggn(f, F.cross_entropy)(P_VIEWS, X, Y)
        assert_trees_close(diag_ggn(f, F.cross_entropy)(P_VIEWS, X, Y), wanted, rtol=1e-10)
        each = diag_ggn(f, F.cross_entropy, per_sample=True)(P_VIEWS, X, Y)
        assert_trees_close({k: v.sum(0) for k, v in each.items()}, wanted, rtol=1e-10)

    def test_hessian(self, view, write):
        f = model(view, write)
        wanted = dense_diag_hessian(lambda p, x, y: F.cross_entropy(f(p, x), y))(P_VIEWS, X, Y)
        assert_trees_close(diag_hessian(f, F.cross_entropy)(P_VIEWS, X, Y), wanted, rtol=1e-9)


# What is written into zeros for one sample alone, as the messages in each graph of a batch are, is of that sample

N_ALONE, D_ALONE, EXACT_ALONE = 4, 3, 1e-9
P_ALONE = {"a": Numbers()(2, D_ALONE), "b": Numbers(1)(D_ALONE, 2)}


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


WAYS_ALONE = {
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


def losses_of_alone(write):
    """The losses of N graphs, each with its nodes `[nodes, 2]`, its edges `[2, edges]` and its class."""

    def one(p, x, e, y):
        h = x @ p["a"]
        return F.cross_entropy(torch.tanh(h + write(h, e)).sum(0) @ p["b"], y)

    return lambda p, x, e, y: torch.stack([one(p, x[i], e[i], y[i]) for i in range(len(x))])


def graphs(nodes, edges, seed):
    g = torch.Generator().manual_seed(seed)
    e = torch.stack([torch.randperm(nodes, generator=g)[:edges] for _ in range(2 * N_ALONE)])
    return Numbers(seed)(N_ALONE, nodes, 2), e.unflatten(0, (N_ALONE, 2)), torch.randint(2, (N_ALONE,), generator=g)


@pytest.mark.parametrize("way", WAYS_ALONE)
@given(nodes=st.integers(1, 2 * N_ALONE), edges=st.integers(0, 5), seed=st.integers(0, 99))
def test_shares_are_those_of_the_loop_alone(way, nodes, edges, seed):
    """But with as many nodes as samples, those that are written may seem to be one of each: then [N] losses are."""
    f, data = losses_of_alone(WAYS_ALONE[way]), graphs(nodes, edges, seed)
    wanted = torch.func.jacrev(f)(P_ALONE, *data)
    assert_trees_close(batch_grad(f)(P_ALONE, *data), wanted, EXACT_ALONE)
    with nullcontext() if nodes % N_ALONE else suppress(SampleAxisError):
        assert_trees_close(
            batch_grad(lambda *a: f(*a).mean())(P_ALONE, *data),
            {k: v / N_ALONE for k, v in wanted.items()},
            EXACT_ALONE,
        )
