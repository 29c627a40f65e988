"""Chunks and batches give what the whole batch gives; functions that read parameters by place are refused."""

from contextlib import suppress

import hypothesis
import pytest
import torch
import torch.nn.functional as F
from hypothesis import strategies as st

import invfunc
from invfunc import batch_grad, batch_jacobian, chunked, diag_ggn
from invfunc.errors import SampleAxisError
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


# A function that reads its parameters by the place of a sample gives other shares on a part of the batch, although
# the outputs may be the same there: it does not run in parts unless somebody asks, and then there is an error

EXACT = 1e-10
N_PLACE = 7
FORMS = {
    "slice": lambda z, x: x + z[: len(x)],
    "indices": lambda z, x: x + z[torch.arange(len(x))],
    "rows": lambda z, x: torch.stack([x[i] + z[i] for i in range(len(x))]),
    "factor": lambda z, x: x * (1 + z[: len(x)]),
    "length": lambda z, x: x + len(x) * z[0],
    "the first": lambda z, x: torch.cat([x[:1] + z[:1], x[1:]]),
}


def drawn():
    rand = Numbers()
    return {"z": torch.zeros(N_PLACE, 3).double(), "w": rand(3, 3)}, rand(N_PLACE, 3), Numbers(1).below(3, N_PLACE)


def given(form):
    def model(p, x):
        return FORMS[form](p["z"], x) @ p["w"]

    return model, lambda p, x, y: F.cross_entropy(model(p, x), y, reduction="none")


@pytest.mark.parametrize("form", FORMS)
def test_parts_that_are_asked_for_are_refused(form):
    (p, x, y), (model, losses) = drawn(), given(form)
    asked = [
        (batch_grad(losses), (p, x, y)),
        (batch_grad(lambda *args: losses(*args).mean()), (p, x, y)),
        (batch_grad(lambda p, x, y: F.cross_entropy(model(p, x), y)), (p, x, y)),
        (batch_jacobian(model), (p, x)),
        (diag_ggn(model, F.cross_entropy), (p, x, y)),
    ]
    for statistic, args in asked:
        for n in (2, N_PLACE):
            with pytest.raises(SampleAxisError, match=r"by the place|not kept apart|neither the mean nor the sum"):
                chunked(statistic, n, over="samples")(*args)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_parameters_that_are_the_same_for_all_run_in_parts(dtype):
    """Zeros, ones and expanded tokens, as layers have them at first."""
    rand = Numbers()
    p = {"b": torch.zeros(N_PLACE), "g": torch.ones(N_PLACE), "token": torch.zeros(1, N_PLACE), "w": rand(N_PLACE, 3)}
    p = {name: v.to(dtype) for name, v in p.items()}
    x, y = rand(N_PLACE, N_PLACE).to(dtype), Numbers(1).below(3, N_PLACE)

    def f(p, x, y):
        h = torch.cat([p["token"].expand(len(x), -1), F.layer_norm(x, (N_PLACE,), p["g"], p["b"])], 1)
        return F.cross_entropy((h[:, :N_PLACE] + h[:, N_PLACE:]) @ p["w"], y, reduction="none")

    found = chunked(batch_grad(f), 3)(p, x, y)
    assert_trees_close(found, batch_grad(f)(p, x, y), 1e-5 if dtype == torch.float32 else 0.05)


MIXED = {
    "next": lambda x: torch.cat([x[1:], x[-1:]]),
    "previous": lambda x: torch.cat([x[:1], x[:-1]]),
    "roll": lambda x: x.roll(1, 0),
    "roll back": lambda x: x.roll(-1, 0),
    "flip": lambda x: x.flip(0),
    "pairs": lambda x: x[torch.arange(len(x)).bitwise_xor(1).clamp(max=len(x) - 1)],
    "mean": lambda x: x - x.mean(0),
    "total": lambda x: x / len(x),
    "first": lambda x: x - x[:1],
    "last": lambda x: x - x[-1:],
}


@pytest.mark.parametrize("mixed", MIXED)
@hypothesis.given(total=st.integers(1, 7), size=st.integers(1, 6))
def test_samples_that_are_mixed_unseen_are_not_divided(mixed, total, size):
    """vmap hides what it gives: nothing is known of it but its values."""
    p, x = Numbers()(3, 2), Numbers(1)(total, 3)

    def f(p, x):
        return (torch.vmap(torch.sin)(MIXED[mixed](x)) @ p).tanh()

    with suppress(SampleAxisError):
        found = chunked(batch_jacobian(f), chunk_size=size, over="samples")(p, x)
        assert_trees_close(found, torch.func.jacrev(f)(p, x), EXACT)
