"""jvp around every transform, also where torch itself has none of a loss's derivative."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch.func import grad, jacfwd, jvp
from torch.utils.checkpoint import checkpoint

import invfunc
from invfunc import tree
from invfunc.testing import assert_trees_close
from invfunc.testing.laws.rows import FIRST_ORDER, LOSS, ROWS
from tests.networks import total
from tests.strategies import Numbers, seeded

X, Y = Numbers(1)(4, 3), Numbers(2)(4, 2).sign()
PARAMS = {"w": Numbers(3)(3, 2), "b": Numbers(4)(2)}
LOSSES = {
    "mse": F.mse_loss,
    "mse, by keywords": lambda z, y: 3 * F.mse_loss(target=y, input=z, reduction="mean"),
    "mse, sum": lambda z, y: F.mse_loss(z, y, reduction="sum"),
    "nn.MSELoss": torch.nn.MSELoss(),
    "huber": lambda z, y: F.huber_loss(z, y, delta=0.7),
    "huber, none": lambda z, y: F.huber_loss(z, y, "none", 0.7).sum(1),
    "soft margin": F.soft_margin_loss,
    "cross entropy": lambda z, y: F.cross_entropy(z, y.softmax(1)),
}


def f(params, x):
    return (x @ params["w"]).tanh() + params["b"]


V = {name: Numbers(5)(*p.shape) for name, p in PARAMS.items()}


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
NO_GGN = ("soft margin",)  # of which no outputs are known


MET = [
    (name, loss, (i + k) % 2 == 1 and name not in FIRST_ORDER)
    for i, name in enumerate(TRANSFORMS)
    for k, loss in enumerate(LOSSES)
    if loss not in NO_GGN or name in (*FIRST_ORDER, "hvp", "diag_hessian")
]
"""Each transform with each loss: a loss function, or a model and its loss, by turns."""


@pytest.mark.parametrize(("name", "loss", "apart"), MET)
def test_jvp_is_the_derivative(name, loss, apart):
    def value(params):
        forms = (f, LOSSES[loss]) if apart else (lambda params, x, y: LOSSES[loss](f(params, x), y),)
        return total(tree.leaves(TRANSFORMS[name](*forms)(params, X, Y)))

    slopes, (got, along) = grad(value)(PARAMS), jvp(value, (PARAMS,), (V,))
    wanted = sum((slopes[k] * V[k]).sum() for k in V)
    assert_trees_close((got, along), (value(PARAMS), wanted), 1e-9, 1e-6)


def test_columns_of_a_jacobian():
    def value(params):
        return invfunc.diag_ggn(f, F.mse_loss)(params, X, Y)["w"]

    assert_trees_close(jacfwd(value)(PARAMS), torch.func.jacrev(value)(PARAMS), 1e-9, 1e-6)


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
