"""Tensors without entries have results without entries, or zeros; what holds no numbers, or no samples, is refused."""

from functools import partial

import pytest
import torch.nn.functional as F

import invfunc
from invfunc import tree
from invfunc.errors import ArgumentError
from invfunc.testing.laws.rows import CASES, FACTORS, LOSS, MODEL
from tests.strategies import Numbers, seeded


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
        case: lambda f, loss, row=row, form=form: row.of(f, loss, form)
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
