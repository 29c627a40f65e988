"""A law that cannot fail is worthless: for each of them a fault is planted that it finds, and it holds without."""

from dataclasses import fields, replace

import pytest
import torch

import invfunc
from invfunc import thresholds, tree
from invfunc._torch import functorch
from invfunc.testing import laws
from invfunc.testing.laws import problem as of_functions
from invfunc.testing.laws.rows import ROWS
from invfunc.testing.laws.run import Failure, weighed
from tests import ways
from tests.networks import LOSSES, network
from tests.strategies import Numbers

KEPT = []


def spoilt(result):
    """One number of it is wrong by a tenth."""

    def one(x):
        x = x.clone(memory_format=torch.contiguous_format)
        x.view(-1)[:1] *= 1.1
        return x

    leaves, form = tree.separate(result)
    return form.join([one(leaves[0]), *leaves[1:]])


def written(given, result):
    tree.tensors(given)[0].mul_(1)
    return result


def kept(given, result):
    KEPT.append(given)
    return result


def drawn(given, result):
    torch.rand(())
    return result


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
    "the GGN equals its loop": ("diag_ggn", of_one),
    "the Hessian equals its loop": ("diag_hessian", of_one),
    "statistics agree with each other": ("ggn_trace", of_one),
    "Jacobians equal their loop": ("batch_jacobian", of_one),
    "K-factors of one sample are its block": ("kfac empirical", of_one),
    "the order of the samples does not matter": (ALWAYS, of_one),
    "samples= picks": (ALWAYS, when(lambda t: t.samples is not None)),
    "together is the same": (
        ALWAYS,
        lambda t, given, result: (spoilt(result[0]), *result[1:]) if t.members else result,
    ),
    "no argument is written": (ALWAYS, lambda t, given, result: written(given, result)),
    "results have memory of their own": (
        ALWAYS,
        lambda t, given, result: tree.map_tensors(lambda g: g[:1].expand(g.shape), result),
    ),
    "the generators end where f leaves them": (ALWAYS, lambda t, given, result: drawn(given, result)),
    "nothing stays alive": (ALWAYS, lambda t, given, result: kept(given, result)),
    "fast equals generic": (ALWAYS, when(lambda t: not t.options.fast)),
    "blocks do not matter": (ALWAYS, when(lambda t: thresholds.CACHE["cpu"] < 100)),
    "chunks do not matter": (ALWAYS, when(lambda t: t.options.plan.asked("params"))),
    "chunks within chunks do not matter": (
        ALWAYS,
        when(lambda t: t.options.plan.asked("params") and t.options.plan.asked("samples")),
    ),
    "grad of grad of a statistic is that of its loop": (
        ALWAYS,
        lambda t, given, result: tree.map_tensors(lambda g: g + (g - g.detach()).square(), result),
    ),
    "grad of a statistic in the data is that of its loop": (
        ALWAYS,
        lambda t, given, result: tree.map_tensors(lambda g: 1.1 * g - 0.1 * g.detach(), result),
    ),
    "grad of a statistic is that of its loop": (
        ALWAYS,
        lambda t, given, result: tree.map_tensors(lambda g: g.detach(), result),
    ),
    "vmap over parameters is the loop": (ALWAYS, when(lambda t: functorch.transforming())),
    "jacrev of a statistic is that of its loop": (ALWAYS, when(lambda t: functorch.transforming())),
    "modes do not matter": (ALWAYS, when(lambda t: not torch.is_grad_enabled())),
    "vmap over data sets is the loop": (ALWAYS, when(lambda t: functorch.transforming())),
    "vmap of grad of a statistic is that of its loop": (
        ALWAYS,
        when(lambda t: functorch.transforming()),
    ),
    "grad of chunks of some samples is that of its loop": (
        ALWAYS,
        lambda t, given, result: tree.map_tensors(lambda g: 1.1 * g - 0.1 * g.detach(), result),
    ),
    "what f closes over is differentiated": (ALWAYS, when(lambda t: functorch.transforming())),
    "derivatives of the Hessian are those of its loop": (
        "diag_hessian",
        lambda t, given, result: tree.map_tensors(lambda g: 1.1 * g - 0.1 * g.detach(), result),
    ),
    "jvp of a statistic is that of its loop": (
        ALWAYS,
        lambda t, given, result: tree.map_tensors(lambda g: 1.1 * g - 0.1 * g.detach(), result),
    ),
}
ELSEWHERE = {"products equal those of the matrix", "samples do not mix"}
OF_F = {name: law for name, law in {**laws.LAWS, **ways.BOOK}.items() if law.subject == "a function"}


def checked(*args, only):
    return (ways if only in ways.BOOK else laws).check(*args, loss=LOSSES[0], only=only)


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
    KEPT.clear()


def detached_unless_transforming(t, given, result):
    return result if functorch.transforming() else tree.map_tensors(lambda g: g.detach(), result)


def recording(t, given, result):
    return tree.map_tensors(lambda g: g.detach().requires_grad_(), result)


WAYS = {
    "grad of a statistic is that of its loop": ("batch_grad by autograd", detached_unless_transforming),
    "grad of a statistic in the data is that of its loop": ("batch_grad by autograd", detached_unless_transforming),
    "grad of grad of a statistic is that of its loop": ("batch_grad by autograd", detached_unless_transforming),
    "what f closes over is differentiated": ("sum_grad_squared by autograd", detached_unless_transforming),
    "vmap over data sets is the loop": (
        "sum_grad_squared over data sets along the last axis",
        when(lambda t: functorch.transforming()),
    ),
    "modes do not matter": ("batch_l2_grad", recording),
    "vmap of grad of a statistic is that of its loop": (
        "batch_l2_grad, autograd of vmap",
        lambda t, given, result: tree.map_tensors(
            lambda g: 1.1 * g - 0.1 * g.detach() if functorch.transforming() else g, result
        ),
    ),
}
"""One of several ways in which a law tries a statistic, and a fault on it."""


@pytest.mark.parametrize("law", WAYS)
def test_finds_a_fault_on_one_of_its_ways(law, monkeypatch):
    net, args = given()
    claim, fault = WAYS[law]
    name = claim.partition(",")[0].partition(" by ")[0].partition(" over ")[0]

    def outcome():
        problem = of_functions.problem("laws.check", net.f, net.params, args[2:], LOSSES[0], 0, None, 0)
        (found,) = [one for one in OF_F[law].claims(problem) if one.of == claim]
        return weighed(OF_F[law], found, problem)

    assert not isinstance(outcome(), Failure)
    planted(fault, name, monkeypatch)
    assert isinstance(outcome(), Failure)


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
