"""jvp around every transform, also where torch itself has none of a loss's derivative."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import invfunc
from invfunc import tree
from invfunc.testing import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.networks import total
from tests.rows import CASES, LOSS, ROWS, made_of
from tests.strategies import Numbers, seeded

X, Y = Numbers(1)(4, 3), Numbers(2)(4, 2).sign()
PARAMS = {"w": Numbers(3)(3, 2), "b": Numbers(4)(2)}


def f(params, x):
    return (x @ params["w"]).tanh() + params["b"]


V = {name: Numbers(5)(*p.shape) for name, p in PARAMS.items()}
LOSSES = {
    "mse": F.mse_loss,
    "mse, by keywords": lambda z, y: 3 * F.mse_loss(target=y, input=z, reduction="mean"),
    "huber, none": lambda z, y: F.huber_loss(z, y, "none", 0.7).sum(1),
    "soft margin": F.soft_margin_loss,
    "cross entropy": lambda z, y: F.cross_entropy(z, y.softmax(1)),
}


@pytest.mark.parametrize("make", [invfunc.variance, invfunc.diag_hessian, invfunc.hvp], ids=lambda make: make.__name__)
@pytest.mark.parametrize("loss", LOSSES.values(), ids=LOSSES)
def test_jvp_is_the_derivative(make, loss):
    t = make(lambda params, x, y: loss(f(params, x), y))
    vectors = (V,) if make is invfunc.hvp else ()

    def value(params):
        return total(tree.leaves(t(params, *vectors, X, Y)))

    slopes, (got, along) = grad(value)(PARAMS), jvp(value, (PARAMS,), (V,))
    wanted = sum((slopes[k] * V[k]).sum() for k in V)
    assert_trees_close((got, along), (value(PARAMS), wanted), 1e-9, 1e-6)


def product(make, **options):
    return lambda *f: lambda params, *batch: make(*f, **options)(params, V, *batch)


TRANSFORMS = {
    **{name: row.make for name, row in ROWS.items() if LOSS in row.forms},
    "hvp": product(invfunc.hvp),
    "ggnvp": product(invfunc.ggnvp),
    "ggnvp empirical": product(partial(invfunc.ggnvp, fisher="empirical")),
    "ggnvp drawn": lambda *f: product(invfunc.ggnvp, fisher="mc", mc_samples=2, generator=seeded())(*f),
    "estimate_trace": lambda *f: invfunc.estimate_trace(invfunc.hvp(*f), probes=2, generator=seeded()),
}


def in_parts(part):
    return lambda params, x: part(lambda x, w: (x @ w).tanh(), x, params["w"]) + params["b"]


def checkpointed(f, x, w):
    return checkpoint(f, x, w, use_reentrant=False)


def on_cpu(f, x, w):
    with torch.autograd.graph.save_on_cpu():
        return f(x, w)


@pytest.mark.parametrize("part", [checkpointed, on_cpu], ids=lambda part: part.__name__)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_hooks_on_saved_tensors_that_lose_tangents_are_told_of(name, part):
    """The error names a checkpoint that keeps them."""

    def of(part):
        t = TRANSFORMS[name](lambda params, x, y: F.mse_loss(in_parts(part)(params, x), y))
        return lambda params: total(tree.leaves(t(params, X, Y)))

    with pytest.raises(invfunc.InvFuncError):
        jvp(of(part), (PARAMS,), (V,))
    wanted = jvp(of(lambda f, x, w: f(x, w)), (PARAMS,), (V,))
    found = jvp(of(lambda f, x, w: invfunc.invertible_checkpoint(f, None)(x, w)), (PARAMS,), (V,))
    assert_trees_close(found, wanted, 1e-9, 1e-6)


@pytest.mark.parametrize("name", ["ekfac exact", "sqrt_ggn"])
def test_reverse_over_forward_where_there_are_eigenvectors(name):
    """Torch's own derivative of eigenvectors is NaN there."""

    def loss(z, y):
        return (invfunc.outputs(z) - y).cosh().log().sum(1)

    functions = (f, F.cross_entropy) if name == "ekfac exact" else (lambda p, x, y: loss(f(p, x), y),)
    t = ROWS[name].make(*functions)

    def of(params):
        found = t(params, X, Y.softmax(1) if name == "ekfac exact" else Y)
        return total([k.dense() for k in found.values()] if name == "ekfac exact" else found)

    forward = grad(lambda p: jvp(of, (p,), (V,))[1])(PARAMS)
    assert_trees_close(forward, jvp(grad(of), (PARAMS,), (V,))[1], 1e-9)


# FakeTensorMode, in which tensors have no numbers: shapes as outside of it, to find out what a statistic takes

N = 4
NUMBERS = 4 * 8
"""Bytes of the single numbers that FakeTensorMode keeps a little longer: fewer than the smallest parameter has."""


def model(p, x):
    return F.linear(torch.tanh(F.linear(x, p["w"], p["b"])), p["v"])


def loss(p, x, y):
    return F.cross_entropy(model(p, x), y)


def given():
    rand = Numbers()
    return {"w": rand(5, 3), "b": rand(5), "v": rand(3, 5)}, rand(N, 3), torch.arange(N) % 3


def shapes_and_bytes(t):
    """The shapes of a result, and the most bytes that were alive on the way."""
    args = given()
    with nothing_collected(), Meter() as meter:
        leaves = _pytree.tree_leaves(t(*args))
    return [tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor)], meter.peak()


@pytest.mark.parametrize("case", CASES)
def test_shapes_and_bytes_are_those_of_numbers(case):
    row, form = CASES[case]
    t = made_of(row, model, F.cross_entropy, form)
    chunks = [invfunc.chunked(t, 2)] if getattr(t, "axes", ()) else []
    for some in (t, *chunks):
        shapes, peak = shapes_and_bytes(some)
        with FakeTensorMode():
            found, predicted = shapes_and_bytes(some)
        assert found == shapes
        assert peak <= predicted <= peak + NUMBERS, some
