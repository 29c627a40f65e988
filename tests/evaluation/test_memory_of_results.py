"""Each tensor of a result has memory of its own: it can be written, or added up over machines, without the others."""

import gc
from collections import Counter
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import grad, jvp
from torch.utils import _pytree
from torch.utils.checkpoint import checkpoint

import invfunc
from invfunc import functional, tree
from invfunc.testing import assert_trees_close
from tests.meter import Meter, nothing_collected
from tests.networks import total
from tests.rows import BOTH, CASES, LOSS, PRODUCTS, ROWS, made_of
from tests.strategies import Numbers, seeded


def storages(tensors):
    """The addresses of the memory of tensors with entries."""
    return [x.untyped_storage().data_ptr() for x in tensors if x.numel()]


def shared(result, args):
    """The leaves of a result that share memory with each other, or with arguments."""
    theirs, own = set(storages(tree.tensors(args))), Counter(storages(tree.tensors(result)))
    found = []
    for path, x in tree.named_leaves(result):
        if isinstance(x, torch.Tensor) and x.numel():
            at = x.untyped_storage().data_ptr()
            overlaps = any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True))
            found += [path] if at in theirs or own[at] > 1 or overlaps else []
    return found


def squares(z, y):
    return F.mse_loss(z, y, reduction="none").flatten(1).sum(1)


def losses(f):
    return lambda p, x, y: squares(f(p, x), y)


MODELS = {
    "linear": lambda: nn.Linear(2, 3),
    "chain": lambda: nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)),
    "shift": lambda: Shift(),
}


class Shift(nn.Module):
    """A parameter that is the result's own shape, and one without influence."""

    def __init__(self):
        super().__init__()
        self.shift, self.none, self.scale = (nn.Parameter(torch.ones(k)) for k in (2, 2, 1))

    def forward(self, x):
        return self.scale[0] * x + self.shift


def assert_apart(result, given):
    assert tree.tensors(result) and not shared(result, given)


@st.composite
def problems(draw):
    f, params = functional(MODELS[draw(st.sampled_from(sorted(MODELS)))]().double())
    rand, n = Numbers(draw(st.integers(0, 3))), draw(st.integers(1, 3))
    x = rand(n, 2)
    return f, params, x, rand(*f(params, x).shape)


@pytest.mark.parametrize("case", CASES)
@settings(max_examples=4)
@given(problem=problems())
def test_of_statistics(case, problem):
    (row, form), (f, *args) = CASES[case], problem
    assume(row.fewest <= len(args[1]))
    if row.make is not invfunc.kronecker.kfra or "none" not in args[0]:  # of which it takes chains
        assert_apart(made_of(row, f, F.mse_loss if form == BOTH else squares, form)(*args), args)


@pytest.mark.parametrize("name", ["hvp", "ggnvp", "ggnvp empirical"])
@settings(max_examples=4)
@given(problem=problems())
def test_of_products(name, problem):
    f, params, *batch = problem
    of = PRODUCTS[name](*((losses(f),) if name.endswith("empirical") else (f, F.mse_loss)))
    v = tree.map_leaves(torch.ones_like, params)
    assert_apart(of(params, v, *batch), (params, v, batch))
    assert_apart(of.linearize(params, *batch)(v), (params, v, batch))


def test_of_linearize():
    """Also of linear maps that give back what they are given."""
    p, x = torch.ones(2), torch.ones(3, 2)
    _, pushed, pulled = invfunc.linearize(lambda p, x: [p, p, x])(p, x)
    assert_apart(pushed(p), (p, x))
    assert_apart(pulled([p, p, x]), (p, x))


# jvp around every transform, also where torch itself has none of a loss's derivative

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


def arguments():
    rand = Numbers()
    return {"w": rand(5, 3), "b": rand(5), "v": rand(3, 5)}, rand(N, 3), torch.arange(N) % 3


def shapes_and_bytes(t):
    """The shapes of a result, and the most bytes that were alive on the way."""
    args = arguments()
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


@pytest.mark.parametrize("case", [*CASES, *PRODUCTS])
def test_a_warm_call_leaves_no_tensors_to_be_collected(case):
    """A call keeps its result alone alive: a stream would keep its batches until Python collects garbage."""
    params, *batch = arguments()
    if case in PRODUCTS:
        v = tree.map_tensors(lambda p: p.new_ones(*[1] * ("blocks" in case), *p.shape), params)
        t, args = PRODUCTS[case](model, F.cross_entropy), (params, v, *batch)
    else:
        t, args = made_of(CASES[case][0], model, F.cross_entropy, CASES[case][1]), (params, *batch)
    t(*args)
    with nothing_collected():
        gc.collect()
        gc.set_debug(gc.DEBUG_SAVEALL)
        try:
            t(*args)
            gc.collect()
            assert not [x for x in gc.garbage if isinstance(x, torch.Tensor)]
        finally:
            gc.set_debug(0)
            gc.garbage.clear()
