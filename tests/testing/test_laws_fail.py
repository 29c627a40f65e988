"""A law that cannot fail is worthless: for each of them a fault is planted that it finds, and it holds without."""

from dataclasses import fields, replace

import pytest
import torch

import invfunc
from invfunc import tree
from invfunc._torch import functorch
from invfunc.testing import laws
from invfunc.testing.laws.rows import ROWS
from tests.networks import LOSSES, network
from tests.strategies import Numbers


def spoilt(result):
    """One number of it is wrong by a tenth."""

    def one(x):
        x = x.clone(memory_format=torch.contiguous_format)
        x.view(-1)[:1] *= 1.1
        return x

    leaves, form = tree.separate(result)
    return form.join([one(leaves[0]), *leaves[1:]])


def when(condition):
    return lambda t, given, result: spoilt(result) if condition(t) else result


def of_one(t, given, result):
    return spoilt(result)


ALWAYS = "batch_grad"
FAULTS = {
    "per-sample gradients sum to the gradient": (ALWAYS, of_one),
    "per-sample gradients equal their loop": (
        ALWAYS,
        lambda t, given, result: tree.map_tensors(lambda g: g.flip(0), result),
    ),
    "the GGN equals its loop": ("sqrt_ggn", of_one),
    "the Hessian equals its loop": ("diag_hessian", of_one),
    "Jacobians equal their loop": ("batch_jacobian", of_one),
    "K-factors of one sample are its block": ("kfac empirical", of_one),
    "grad of a statistic is that of its loop": (
        ALWAYS,
        lambda t, given, result: result if functorch.transforming() else tree.map_tensors(torch.detach, result),
    ),
    "vmap over parameters is the loop": (ALWAYS, when(lambda t: functorch.transforming())),
}
ELSEWHERE = {"products equal those of the matrix", "samples do not mix"}
OF_F = [name for name, law in laws.LAWS.items() if "a function" in law.subjects]


def checked(*args, only):
    return laws.check(*args, loss=LOSSES[0], only=only)


def given():
    """A small model that all laws apply to."""
    net = network("affine", 3)
    return net, (net.f, net.params, net.x, LOSSES[0].target(Numbers(1), 3))


def faulty(t, fault):
    """A statistic that computes with a fault."""

    class Wrong(type(t)):
        owned = False  # else copies are made of what shares memory

        def compute(self, args, kwargs, names):
            result, aux = super().compute(args, kwargs, names)
            return fault(self, args, result), aux

    return Wrong(**{f.name: getattr(t, f.name) for f in fields(t) if f.init})


def planted(fault, name, monkeypatch):
    """The statistic of a row has a fault."""
    row = ROWS[name]

    def make(*functions, **options):
        return faulty(row.make(*functions, **options), fault)

    monkeypatch.setitem(ROWS, name, replace(row, make=make))


def test_each_law_of_functions_has_a_fault():
    assert {*FAULTS} | ELSEWHERE == {*OF_F}


@pytest.mark.parametrize("law", FAULTS)
def test_finds_its_fault(law, monkeypatch):
    net, args = given()
    assert checked(*args, only=law).outcomes[0].state == "holds"
    name, fault = FAULTS[law]
    planted(fault, name, monkeypatch)
    with pytest.raises(AssertionError, match=f"a law does not hold: {law}"):
        checked(*args, only=law)


@pytest.mark.parametrize("product", ["hvp", "ggnvp"])
@pytest.mark.parametrize("linearized", [False, True])
def test_finds_a_wrong_product(product, linearized, monkeypatch):
    net, args = given()
    right = getattr(invfunc, product)

    class Wrong:
        def __init__(self, *given, **options):
            self.of = right(*given, **options)

        def __call__(self, *given):
            return self.of(*given) if linearized else spoilt(self.of(*given))

        def linearize(self, *given):
            at = self.of.linearize(*given)
            return lambda v: spoilt(at(v))

    law = "products equal those of the matrix"
    assert checked(*args, only=law).outcomes[0].state == "holds"
    monkeypatch.setattr(invfunc, product, Wrong)
    with pytest.raises(AssertionError, match=product):
        checked(*args, only=law)
