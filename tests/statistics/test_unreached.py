"""A result that no parameter reaches is an error, not zeros; zeros of a derivative are zeros."""

import warnings
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import invfunc
from invfunc import InvFuncWarning, batch_grad, clipped_grad, functional, grad_and_variance, noise_scale, reduced
from invfunc.errors import ArgumentError
from invfunc.testing.oracles import assert_trees_close, loop_batch_grad
from tests.rows import CASES, made_of
from tests.strategies import Numbers

N = 5
X, Y = Numbers(0)(N, 4), Numbers(1).below(3, N)
torch.manual_seed(0)
MODULE = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3)).double()
F_, PARAMS = invfunc.functional(MODULE)
UNREACHED = r"\): no parameter of params reaches the result\. Call f\(params, x\) of .*, not the module"


def module(params, x):
    return MODULE(x)


def no_grad(params, x):
    with torch.no_grad():
        return F_(params, x)


def detached(params, x):
    return F_(params, x).detach()


WAYS = [(f, reduction) for f in (module, no_grad, detached) for reduction in ("none", "mean")]


def loss_of(f, reduction="none"):
    return lambda params, x, y: F.cross_entropy(f(params, x), y, reduction=reduction)


def refused(t, *args):
    with pytest.raises(ArgumentError, match=UNREACHED):
        t(*args)


@pytest.mark.parametrize(("row", "form"), CASES.values(), ids=CASES)
def test_statistics(row, form):
    for f, reduction in WAYS:
        refused(made_of(row, f, partial(F.cross_entropy, reduction=reduction), form), PARAMS, X, Y)


class TestProducts:
    MAKE = {
        "hvp": invfunc.hvp,
        "ggnvp": invfunc.ggnvp,
        "ggnvp empirical": partial(invfunc.ggnvp, fisher="empirical"),
        "ggnvp drawn": partial(invfunc.ggnvp, mc_samples=2, generator=torch.Generator(), fisher="mc"),
        "hvp of blocks": partial(invfunc.hvp, blocks=True),
        "ggnvp of blocks": partial(invfunc.ggnvp, blocks=True),
        "hvp of positive blocks": partial(invfunc.hvp, blocks=True, modify="abs"),
    }

    @pytest.mark.parametrize("make", MAKE.values(), ids=MAKE)
    def test_are_refused_with_their_linearisation(self, make):
        for f, reduction in WAYS:
            for product in (make(loss_of(f, reduction)), make(f, partial(F.cross_entropy, reduction=reduction))):
                v = {path: p.expand(2, *p.shape) for path, p in PARAMS.items()} if product.lead else PARAMS
                refused(product, PARAMS, v, X, Y)
                refused(product.linearize, PARAMS, X, Y)


class TestZerosStay:
    @pytest.mark.parametrize("f", [
        lambda w, x: (x @ w - 100).relu(),
        lambda w, x: (x @ w).clamp(100, 200),
        lambda w, x: 0 * (x @ w),
        lambda w, x: (x @ w).round(),
        lambda w, x: (x @ w) * (x.sum(1, keepdim=True) > 100),
    ], ids=["relu", "clamp", "zero", "round", "mask"])  # fmt: skip
    def test_of_what_has_no_slope(self, f):
        w = torch.ones(4, 3).double()
        for loss in (lambda w, x, y: f(w, x).square().sum(1), lambda w, x, y: f(w, x).square().mean()):
            assert not invfunc.variance(loss)(w, X, Y).any()
            assert not invfunc.clipped_grad(loss, 1.0)(w, X, Y)[1].any()
            assert not invfunc.hvp(loss)(w, w, X, Y).any()
            assert not invfunc.linearize(f)(w, X)[1](w).any()
        assert not invfunc.diag_ggn(f, F.cross_entropy)(w, X, Y).any()
        assert not invfunc.ggnvp(f, F.cross_entropy)(w, w, X, Y).any()

    def test_of_one_parameter_among_others(self):
        """A head is trained on frozen features, beside a term that is detached."""
        head = {"w": Numbers(2)(6, 3), "unread": Numbers(3)(2)}

        def f(p, x):
            return MODULE[:2](x) @ p["w"] + F_(PARAMS, x).detach() + p["unread"].detach().sum()

        loss = loss_of(f)
        assert_trees_close(invfunc.batch_grad(loss)(head, X, Y), loop_batch_grad(loss)(head, X, Y), 1e-10)
        for found in (
            invfunc.diag_ggn(f, F.cross_entropy)(head, X, Y),
            invfunc.hvp(loss)(head, head, X, Y),
            invfunc.ggnvp(f, F.cross_entropy)(head, head, X, Y),
        ):
            assert found["w"].any() and torch.equal(found["unread"], torch.zeros(2).double())


# Ordinary programs: a mean loss that is clipped, `squeeze()` with one sample, plain names, the value beside


def problem(n=8):
    f, params = functional(nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double())
    return f, {k: Numbers(1)(*p.shape) for k, p in params.items()}, Numbers(2)(n, 4), Numbers(3).below(2, n)


def loss(f, reduction):
    return lambda p, x, y: F.cross_entropy(f(p, x), y, reduction=reduction)


class TestAMeanLossThatIsClipped:
    def test_is_told_once(self):
        f, *args = problem()
        t = clipped_grad(loss(f, "mean"), 1.0)
        with pytest.warns(InvFuncWarning, match=r"clipped_grad\(<lambda>\): no norm reaches.*N = 8.*reduction='none'"):
            t(*args)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            t(*args)

    @pytest.mark.parametrize("reduction, most", [("none", 1e3), ("sum", 1e3), ("mean", 1e-3)])
    def test_and_nothing_else_is(self, reduction, most):
        f, *args = problem()
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            clipped_grad(loss(f, reduction), most)(*args)
            torch.func.grad(lambda p: clipped_grad(loss(f, "mean"), 1.0)(p, *args[1:])[1].sum())(args[0])


class TestSqueezeWithOneSample:
    def test_is_that_of_an_output_with_its_axis(self):
        f, params = functional(nn.Linear(4, 1).double())
        squeezed, whole = lambda p, x: f(p, x).squeeze(), lambda p, x: f(p, x)[:, 0]
        x, y = Numbers(2)(1, 4), Numbers(3)(1)
        for of in (invfunc.diag_ggn, partial(invfunc.kfac, fisher="exact"), invfunc.sqrt_ggn):
            assert_trees_close(of(squeezed, F.mse_loss)(params, x, y), of(whole, F.mse_loss)(params, x, y), 1e-12)
        for of in (invfunc.batch_jacobian, lambda f: invfunc.predictive_covariance(f, 1.0)):
            assert_trees_close(of(squeezed)(params, x), of(whole)(params, x), 1e-12)
        t, (x, y) = invfunc.diag_ggn(squeezed, F.mse_loss), (Numbers(2)(3, 4), Numbers(3)(3))
        assert_trees_close(invfunc.chunked(t, chunk_size=1, over="samples")(params, x, y), t(params, x, y), 1e-12)


class TestPlainNames:
    def test_of_groups(self):
        f, *args = problem()
        found = noise_scale(loss(f, "none"), groups={"0.weight": "first", "['2.bias']": "last"})(*args)[1]
        names = {"['0.weight']": "first", "['2.bias']": "last"}
        assert_trees_close(found, noise_scale(loss(f, "none"), groups=names.get)(*args)[1], 0)
        with pytest.raises(ArgumentError, match="a name for none"):
            noise_scale(loss(f, "none"), groups={"weight": "first"})(*args)

    def test_of_reduced(self):
        f, *args = problem()
        G = batch_grad(loss(f, "none"))(*args)
        found = reduced(batch_grad(loss(f, "none")), {"0.weight": torch.sum, "2.bias": lambda path, g: path})(*args)
        wanted = {**G, "0.weight": G["0.weight"].sum(), "2.bias": "['2.bias']"}
        assert_trees_close(found, wanted, 1e-12)
        assert repr(reduced(batch_grad(f), {"0.weight": torch.sum})) == "reduced(batch_grad(Sequential), {0.weight})"

    def test_of_a_deeper_tree(self):
        t = reduced(batch_grad(lambda p, x: (x @ p["a"]["b"]).square()), {"a.b": torch.sum})
        assert t({"a": {"b": torch.ones(2)}}, torch.ones(3, 2))["a"]["b"].ndim == 0


@pytest.mark.parametrize("reduction", ["none", "mean"])
@pytest.mark.parametrize("of", [grad_and_variance, noise_scale, lambda f, **o: clipped_grad(f, 1e-2, **o)])
class TestTheValueBeside:
    def test_is_what_f_returns(self, of, reduction):
        f, *args = problem()
        plain, value = loss(f, reduction), loss(f, reduction)(*args)
        found = of(plain, value=True)(*args)
        assert_trees_close(found, (*of(plain)(*args), value), 1e-12)
        with_aux = of(lambda *args: (plain(*args), "aux"), value=True, has_aux=True)(*args)
        assert_trees_close(with_aux, (*of(plain)(*args), (value, "aux")), 1e-12)
        assert repr(of(plain, value=True)) == repr(of(plain)) and not found[2].requires_grad
