"""Random numbers come from an explicit generator: on any device, and only where something is drawn."""

import inspect

import pytest
import torch
import torch.nn.functional as F

import invfunc
from invfunc import tree
from invfunc.errors import ArgumentError
from invfunc.kronecker import kfoc
from invfunc.loss.drawn import by
from invfunc.testing import assert_trees_close
from invfunc.testing.models import moved
from tests.strategies import Numbers, seeded

PARAMS, X, Y = {"w": Numbers()(3, 2), "b": Numbers(1)(2)}, Numbers(2)(4, 3), Numbers(3)(4, 2).sigmoid()
FUNCTIONS = {name: f for name, f in vars(invfunc).items() if inspect.isfunction(f)} | {"kfoc": kfoc}
DRAWING = [name for name, f in FUNCTIONS.items() if {"generator", "sample"} <= set(inspect.signature(f).parameters)]
ALWAYS = {"kfac", "kfoc", "ekfac"}  # unless another Fisher matrix is asked for
LOSSES = {
    "mse": F.mse_loss,
    "bce": F.binary_cross_entropy_with_logits,
    "poisson": F.poisson_nll_loss,
    "cross entropy": F.cross_entropy,
}


def f(params, x):
    return (x @ params["w"]).tanh() + params["b"]


@pytest.mark.parametrize("name", DRAWING)
def test_is_refused_where_nothing_is_drawn(name):
    make = FUNCTIONS[name]
    cases = [{"fisher": "exact"}, {"fisher": "empirical"}] if name in ALWAYS else [{}]
    for options in cases:
        with pytest.raises(ArgumentError, match=rf"{name}\(.*nothing is drawn"):
            make(f, F.mse_loss, generator=seeded(3), **options)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", DRAWING)
def test_of_the_cpu_draws_the_same_numbers_everywhere(name, loss, device):
    def found(*args):
        drawn = {"fisher": "mc"} if name in ("eigenpairs", "ggnvp") else {}
        t = FUNCTIONS[name](f, LOSSES[loss], mc_samples=3, generator=seeded(3), **drawn)
        result = t(args[0], *args[:1] * (name == "ggnvp"), *args[1:])
        return result.values if name == "eigenpairs" else result

    args = PARAMS, X, Y
    there = found(*moved(args, torch.float64, device))
    assert all(leaf.device.type == device.type for leaf in tree.leaves(there))
    if name != "ekfac":  # whose eigenvectors have signs of their own
        assert_trees_close(moved(there, torch.float64, torch.device("cpu")), found(*args), 1e-9)


@pytest.mark.parametrize("draw", [torch.rand, torch.randn], ids=["rand", "randn"])
def test_draws_where_it_is(draw):
    there = by(seeded(3), draw, (2, 3), torch.float32, torch.device("meta"))
    assert there.is_meta and there.shape == (2, 3) and there.dtype == torch.float32
    here = by(seeded(3), draw, (2, 3), torch.float32, torch.device("cpu"))
    assert torch.equal(here, draw(2, 3, generator=seeded(3)))
