"""A number that is none spoils what it spoils in the plain loop, and nothing else: it is never dropped."""

from functools import cache

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch.func import hessian, jacrev

import invfunc
from invfunc import chunked, reduced, together, tree
from tests.rows import FIRST_ORDER, OF_DIAGONALS
from tests.strategies import Numbers

N, BAD = 6, 2


def dense(params, x):
    return ((x @ params["w"] + params["b"]).tanh() @ params["v"]).tanh()


def steps(params, x):
    return dense(params, x.unflatten(1, (2, 2)))


def scaled(params, x):
    return (x * params["w"]).sin() ** 2 + params["b"]


def convolved(params, x):
    z = F.conv2d(x.reshape(-1, 1, 2, 2), params["w"], params["b"], padding=1).tanh()
    return F.conv2d(z, params["v"], padding=1).flatten(1)


def numbers(seed, **shapes):
    return {name: Numbers(seed + i)(*shape) for i, (name, shape) in enumerate(shapes.items())}


MODELS = {
    "dense": (dense, numbers(0, w=(4, 5), b=(5,), v=(5, 3))),
    "steps": (steps, numbers(0, w=(2, 4), b=(4,), v=(4, 3))),
    "scaled": (scaled, numbers(0, w=(4,), b=(4,))),
    "convolved": (convolved, numbers(0, w=(2, 1, 3, 3), b=(2,), v=(2, 2, 3, 3))),
}


def general(z, y, reduction="mean"):
    """Convex, and known to nobody."""
    losses = (z - y).square().square().flatten(1).sum(1) + z.flatten(1).logsumexp(1)
    return losses if reduction == "none" else losses.mean()


def classes(z, y, reduction="mean"):
    """Of [N, C], or of each step of [N, T, C]."""
    return F.cross_entropy(z.movedim(-1, 1), (0 * y[..., 0]).nan_to_num(0, 0, 0).long(), reduction=reduction)


def of_each(loss):
    """The [N] losses."""
    return lambda z, y: loss(z, y, reduction="none").reshape(len(z), -1).sum(1)


LOSSES = {
    "mse": F.mse_loss,
    "cross entropy": classes,
    "bce": F.binary_cross_entropy_with_logits,
    "huber": F.huber_loss,
    "poisson": F.poisson_nll_loss,
    "general": general,
}


def poisoned(model, place, value):
    """Parameters, inputs and target with one entry that is not a number."""
    f, params = MODELS[model]
    x, params = Numbers(7)(N, 4), {name: p.clone() for name, p in params.items()}
    y = f(params, x).sigmoid()
    {"input": x[BAD], "target": y[BAD], "parameter": params["w"]}[place].view(-1)[0] = value
    return params, x, y


def flat(result):
    return torch.cat([g.flatten(1) for g in result.values()], 1)


def one_by_one(function, params, *batch):
    """Results of each sample alone, stacked."""
    found = [function(params, *(x[n : n + 1] for x in batch)) for n in range(N)]
    return {name: torch.stack([g[name] for g in found]) for name in params}


def shares(f, loss):
    """`[N, *p]`: the gradient of each sample alone, which no other one can spoil."""
    return lambda *args: one_by_one(jacrev(lambda p, x, y: loss(f(p, x), y).sum()), *args)


def squares(f, loss):
    """`[N, *p]`: the diagonal of the GGN of each sample."""

    def one(params, x, y):
        z = f(params, x)
        size = z.numel()
        curved = hessian(lambda z: loss(z, y))(z).reshape(size, size)
        if loss is F.huber_loss:  # torch compares, and NaN is not below the corner
            curved = curved.masked_fill((z - y).isnan().flatten().diag(), torch.nan)
        rows = {name: j.reshape(size, *params[name].shape) for name, j in jacrev(f)(params, x).items()}
        return {name: torch.einsum("i...,ij,j...->...", j, curved, j) for name, j in rows.items()}

    return lambda *args: one_by_one(one, *args)


def bent(f, loss):
    """`[N, *p]`: the diagonal of the Hessian of each sample."""

    def one(params, x, y):
        found = hessian(lambda p: loss(f(p, x), y))(params)
        size = {name: p.numel() for name, p in params.items()}
        return {k: found[k][k].reshape(size[k], size[k]).diagonal().reshape(params[k].shape) for k in params}

    return lambda *args: one_by_one(one, *args)


def composed(f, loss):
    return lambda params, x, y: loss(f(params, x), y)


def summed(result):
    return {name: g.sum(0) for name, g in result.items()}


def clipped(G):
    norms = flat(G).square().sum(1).sqrt()
    return {name: torch.tensordot((0.01 / norms).clamp(max=1), g, 1) for name, g in G.items()}, norms


def total(result):
    return sum(g.sum() for g in result.values())


OF_SHARES = {
    **{name: (row.make, row.of_shares) for name, row in FIRST_ORDER.items()},
    "samples=": (lambda f: invfunc.batch_grad(f, samples=[0, BAD]), lambda G: {k: g[[0, BAD]] for k, g in G.items()}),
    "chunked": (lambda f: chunked(invfunc.batch_grad(f), 2, over="samples"), lambda G: G),
    "chunked clipped": (lambda f: chunked(invfunc.clipped_grad(f, 0.01), 2, over="samples"), clipped),
    "together": (
        lambda f: together(invfunc.clipped_grad(f, 0.01), invfunc.batch_grad(f)),
        lambda G: (clipped(G), G),
    ),
}
OF_DIAGONALS = {
    **{name: (row.make, row.of_each) for name, row in OF_DIAGONALS.items()},
    "chunked over outputs": (lambda *f: chunked(invfunc.diag_ggn(*f), 2), summed),
    "samples=": (lambda *f: invfunc.diag_ggn(*f, samples=[BAD, 0]), lambda D: summed({k: d[:3] for k, d in D.items()})),
    "together": (lambda *f: together(invfunc.diag_ggn(*f), invfunc.ggn_trace(*f)), lambda D: (summed(D), total(D))),
    "reduced": (
        lambda *f: reduced(invfunc.diag_ggn(*f, per_sample=True), lambda path, d: d.flatten(1).sum(1)),
        lambda D: {k: d.flatten(1).sum(1) for k, d in D.items()},
    ),
}


def spoiled(result):
    """For each leaf, True if an entry is not finite; for a leaf with a sample axis, for each of its rows."""
    return [
        (~x.isfinite()).reshape(len(x) if rows else 1, -1).any(1)
        for x in tree.leaves(result)
        for rows in [x.ndim > 0 and len(x) == N]
    ]


def assert_spoiled_alike(got, wanted):
    paths = [path for path, _ in tree.named_leaves(wanted)]
    for path, a, b in zip(paths, spoiled(got), spoiled(wanted), strict=True):
        assert torch.equal(a, b), f"{path}: {a.tolist()} is not {b.tolist()}"


def cases(losses=tuple(LOSSES), values=(torch.nan, torch.inf, -torch.inf)):
    places = st.sampled_from(["input", "target", "parameter"])
    return st.tuples(st.sampled_from(list(MODELS)), st.sampled_from(losses), places, st.sampled_from(values))


def posed(case):
    model, loss, place, value = case
    return MODELS[model][0], LOSSES[loss], poisoned(model, place, value)


@cache
def expected(of, case):
    """The plain loop of a case, of which each copy of a law draws the same ones."""
    f, loss, args = posed(case)
    return of(f, loss)(*args)


def shares_of_each(f, loss):
    return shares(f, of_each(loss))


class TestStatistics:
    @pytest.mark.parametrize("name", OF_SHARES)
    @given(case=cases())
    def test_of_the_shares(self, name, case):
        f, loss, args = posed(case)
        make, of = OF_SHARES[name]
        got, wanted = make(composed(f, of_each(loss)))(*args), of(expected(shares_of_each, case))
        assert_spoiled_alike(got, wanted)
        for x, y in zip(tree.leaves(got), tree.leaves(wanted), strict=True):
            assert not (x.isfinite() & ~y.isfinite()).any()

    @pytest.mark.parametrize("name", OF_DIAGONALS)
    @given(case=cases(), found=st.booleans())
    def test_of_the_ggn(self, name, case, found):
        f, loss, args = posed(case)
        make, of = OF_DIAGONALS[name]
        forms = (composed(f, loss),) if found and loss is not general else (f, loss)
        assert_spoiled_alike(make(*forms)(*args), of(expected(squares, case)))

    @given(case=cases(values=(torch.nan,)))
    def test_of_the_hessian(self, case):
        f, loss, args = posed(case)
        each, wanted = invfunc.diag_hessian(f, loss, per_sample=True)(*args), bent(f, loss)(*args)
        of_sum = invfunc.diag_hessian(composed(f, loss))(*args)
        for name in wanted:
            assert not (each[name].isfinite() & ~wanted[name].isfinite()).any()  # columns that meet may spoil more
            assert not (of_sum[name].isfinite() & ~wanted[name].isfinite().all(0)).any()
            if case[2] != "parameter":
                assert each[name].isfinite().flatten(1).all(1).tolist() >= [n != BAD for n in range(N)]
