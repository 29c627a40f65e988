"""Chunks and batches give what the whole batch gives."""

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc.testing import assert_trees_close
from tests.strategies import Numbers

N = 12
P = {"w": Numbers(0)(6, 8), "b": Numbers(1)(8), "v": Numbers(2)(8, 3)}
X, Y = Numbers(3)(N, 6), torch.arange(N) % 3


def model(p, x):
    return torch.tanh(x @ p["w"] + p["b"]) @ p["v"]


def losses(p, x, y):
    return F.cross_entropy(model(p, x), y, reduction="none")


def mean(p, x, y):
    return losses(p, x, y).mean()


MAKES = {
    "variance": lambda: invfunc.variance(losses),
    "squares of a mean": lambda: invfunc.sum_grad_squared(mean),
    "clipped": lambda: invfunc.clipped_grad(losses, 0.1),
    "rows": lambda: invfunc.batch_grad(losses),
    "GGN": lambda: invfunc.diag_ggn(model, F.cross_entropy),
    "GGN of a mean": lambda: invfunc.diag_ggn(mean),
    "drawn factors": lambda: invfunc.kfac(model, F.cross_entropy, generator=torch.Generator().manual_seed(0)),
    "empirical factors": lambda: invfunc.kfac(model, F.cross_entropy, fisher="empirical"),
    "eigenvalues": lambda: invfunc.ekfac(model, F.cross_entropy, fisher="exact"),
    "Hessian": lambda: invfunc.diag_hessian(model, F.cross_entropy),
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("over", ["samples", "outputs", "params", "a loader"])
def test_are_those_of_the_whole(name, over):
    t, make = MAKES[name](), MAKES[name]
    if over == "a loader":
        if name.endswith("a mean") or name.startswith("drawn"):
            return  # of one number nobody knows what it counts, and samples of a loader draw by their places
        found = invfunc.streamed(make())(P, [(X[a : a + 4], Y[a : a + 4]) for a in range(0, N, 4)])
    elif over not in t.axes:
        return
    else:
        found = invfunc.chunked(make(), 3, over=over)(P, X, Y)
    assert_trees_close(found, t(P, X, Y), 1e-10)


REPEATED = {
    "stack": lambda v, n: torch.stack([v] * n)[:, None],
    "stack in a dim": lambda v, n: torch.stack([v] * n, dim=0)[:, None],
    "cat": lambda v, n: torch.cat([v.view(1, 1, -1)] * n),
    "expand": lambda v, n: v.expand(n, 1, -1),
    "repeat": lambda v, n: v.view(1, 1, -1).repeat(n, 1, 1),
}


@pytest.mark.parametrize("form", REPEATED)
@pytest.mark.parametrize("n", [1, 4])
def test_factors_of_what_f_repeats_for_each_sample_are_the_same_in_parts(form, n):
    """A token that is also a scale counts its positions, also of one sample."""

    def f(p, x):
        z = torch.cat([REPEATED[form](p["v"], len(x)), x], 1) * p["v"]
        return torch.tanh(z @ p["w"]).mean(1)

    p, x, y = {"v": Numbers(0)(5), "w": Numbers(1)(5, 3)}, Numbers(2)(n, 2, 5), torch.arange(n) % 3
    t = invfunc.kfac(f, F.cross_entropy, fisher="exact")
    whole = t(p, x, y)
    assert_trees_close(invfunc.chunked(t, chunk_size=1, over="samples")(p, x, y), whole, 1e-10)
    assert_trees_close(invfunc.chunked(t, chunk_size=3, over="samples")(p, x, y), whole, 1e-10)
    assert_trees_close(t(p, x.repeat(2, 1, 1), y.repeat(2)), whole, 1e-10)


def test_parts_of_which_no_sample_is_chosen_are_in_the_loss():
    t = invfunc.sum_grad_squared(mean, samples=[2, 0])
    assert_trees_close(invfunc.chunked(t, chunk_size=1, over="samples")(P, X, Y), t(P, X, Y), 1e-10)


def test_a_penalty_of_slopes_runs_in_parts_of_one():
    def f(p, x):
        x = x.clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(p, x).sum(), x, create_graph=True)
        return (slope.norm(dim=1) - 1).square().mean()

    t = invfunc.batch_l2_grad(f)
    found = invfunc.chunked(t, chunk_size=2, over="samples")(P, X[:5])
    assert_trees_close({k: found[k] for k in "wv"}, {k: t(P, X[:5])[k] for k in "wv"}, 1e-8)
