"""A batch of no samples, as Poisson sampling gives: sums are zeros, samples `[0, ...]`, and a mean stays an error."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc
from invfunc import chunked, compiled, functional, reduced, streamed, together, tree
from invfunc.errors import ArgumentError
from invfunc.testing import assert_trees_close
from tests.rows import CASES, FACTORS, LOSS, MODEL, made_of
from tests.strategies import Numbers, seeded

F_, PARAMS = functional(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double())
X, Y = Numbers(2)(6, 4), Numbers(3).below(2, 6)
ZEROS = tree.map_leaves(torch.zeros_like, PARAMS)


def loss(reduction):
    return lambda p, x, y: F.cross_entropy(F_(p, x), y, reduction=reduction)


def generator():
    return torch.Generator().manual_seed(0)


STATISTICS = {
    "batch_grad": invfunc.batch_grad,
    "batch_l2_grad": invfunc.batch_l2_grad,
    "sum_grad_squared": invfunc.sum_grad_squared,
    "clipped_grad": lambda f: invfunc.clipped_grad(f, 1.0),
    "gram": invfunc.gram,
    "sketched_grad": lambda f: invfunc.sketched_grad(f, rows=2, columns=2, generator=generator()),
    "reduced": lambda f: reduced(invfunc.batch_grad(f), lambda g: g.sum(0)),
    "together": lambda f: together(invfunc.batch_grad(f), invfunc.clipped_grad(f, 1.0)),
}


def cut(result, n):
    """The result of n samples without them: axes of n become 0, and sums zeros."""
    return tree.map_leaves(lambda x: x.new_zeros([0 if d == n else d for d in x.shape]), result)


@pytest.mark.parametrize("reduction", ["none", "sum"])
@pytest.mark.parametrize("of", STATISTICS)
class TestNoSamples:
    def test_are_those_of_some_without_these(self, of, reduction):
        t = STATISTICS[of](loss(reduction))
        wanted = cut(t(PARAMS, X, Y), 6)
        assert_trees_close(t(PARAMS, X[:0], Y[:0]), wanted, 0)

    def test_in_all_modes(self, of, reduction):
        t = STATISTICS[of](loss(reduction))
        wanted, args = t(PARAMS, X[:0], Y[:0]), (PARAMS, X[:0], Y[:0])
        modes = [compiled, *[lambda t: chunked(t, 2, over="params")] * ("params" in t.axes)]
        modes += [lambda t: chunked(t, chunk_size=2, over="samples")] * (of not in ("gram", "together"))
        for mode in modes:
            assert_trees_close(mode(t)(*args), wanted, 0)
        if reduction == "none" and of not in ("reduced", "gram"):
            loader = [args[1:], args[1:]]
            assert_trees_close(streamed(t)(PARAMS, loader), wanted, 0)


class TestAMeanOfNothing:
    @pytest.mark.parametrize("of", STATISTICS)
    def test_is_an_error(self, of):
        with pytest.raises(ArgumentError, match=r"x has no samples \(N = 0\), and the mean of no losses"):
            STATISTICS[of](loss("mean"))(PARAMS, X[:0], Y[:0])

    def test_as_is_a_variance(self):
        for of in (invfunc.variance, invfunc.grad_and_variance, invfunc.noise_scale):
            with pytest.raises(ArgumentError, match="0 sample"):
                of(loss("none"))(PARAMS, X[:0], Y[:0])

    def test_as_are_curvature_and_an_empty_loader(self):
        with pytest.raises(ArgumentError, match=r"no samples \(N = 0\)"):
            invfunc.diag_ggn(F_, F.cross_entropy)(PARAMS, X[:0], Y[:0])
        with pytest.raises(ArgumentError, match="the loader gave no samples"):
            streamed(invfunc.batch_grad(loss("none")))(PARAMS, [])


def test_a_step_of_private_training_goes_through_every_batch():
    t = invfunc.clipped_grad(loss("none"), 0.1, value=True)
    for n in (3, 0, 1):
        total, norms, value = t(PARAMS, X[:n], Y[:n])
        assert norms.shape == value.shape == (n,)
        assert_trees_close(total, total if n else ZEROS, 0)


# Tensors without entries have results without entries, or zeros; what holds no numbers, or no samples, is refused


def product(make, **options):
    return lambda f, loss: lambda params, *batch: make(f, loss, **options)(params, params, *batch)


def blocks(make):
    def of(f, loss):
        return lambda params, *batch: make(f, loss)(tree.map_leaves(lambda p: p, params), stacked(params), *batch)

    return of


def stacked(params):
    return tree.map_leaves(lambda p: p[None], params)


TRANSFORMS = {
    **{
        case: lambda f, loss, row=row, form=form: made_of(row, f, loss, form)
        for case, (row, form) in CASES.items()
        if not row.drawn and (form != LOSS or row.of_shares)
    },
    "chunked": lambda *f: invfunc.chunked(invfunc.diag_ggn(*f), 2),
    "hvp": product(invfunc.hvp),
    "ggnvp": product(invfunc.ggnvp),
    "ggnvp empirical": product(partial(invfunc.ggnvp, fisher="empirical")),
    "ggnvp of blocks": blocks(partial(invfunc.ggnvp, blocks=True)),
    "hvp of blocks": blocks(partial(invfunc.hvp, blocks=True)),
    "estimate_trace": lambda *f: invfunc.estimate_trace(invfunc.ggnvp(*f), probes=2, generator=seeded()),
    "estimate_diagonal": lambda *f: invfunc.estimate_diagonal(invfunc.hvp(*f), probes=2, generator=seeded()),
}
LOSSES = {
    "mse": lambda z, y: F.mse_loss(z, y, reduction="sum"),
    "bce": lambda z, y: F.binary_cross_entropy_with_logits(z, y, reduction="sum"),
    "general": lambda z, y: (z - y).pow(4).sum(),
}


def f(params, x):
    return (x @ params["w"] + params["b"]).tanh() @ params["v"]


def arranged(steps=(), hidden=4, outputs=2):
    params = {"w": Numbers()(3, hidden), "b": Numbers(1)(hidden), "v": Numbers(2)(hidden, outputs)}
    return params, Numbers(3)(5, *steps, 3), Numbers(4)(5, *steps, outputs).sigmoid()


each = pytest.mark.parametrize("name", TRANSFORMS)


@each
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("shape", [{"outputs": 0}, {"steps": (0,)}, {"hidden": 0}], ids=str)
def test_no_entries_are_no_curvature(name, loss, shape):
    if "kfoc" in name and "hidden" in shape:
        pytest.skip("a layer without columns has no rank-one factors")
    args = arranged(**shape)
    found = TRANSFORMS[name](f, LOSSES[loss])(*args)
    factors = name in CASES and CASES[name][0].gives == FACTORS
    for leaf in [K.dense() for K in found.values()] if factors else tree.leaves(found):
        assert leaf.isfinite().all()
        assert "hidden" in shape or not leaf.any()


@each
@pytest.mark.parametrize("part", [0, 1, 2], ids=["params", "inputs", "target"])
def test_what_holds_no_numbers_is_refused(name, part):
    args = list(arranged())
    args[part] = tree.map_leaves(lambda x: x.to("meta"), args[part])
    if part == 2 and name.endswith(MODEL):
        return
    with pytest.raises(ArgumentError, match=r"a tensor of shape .* is on the meta device"):
        TRANSFORMS[name](f, LOSSES["mse"])(*args)
