"""Losses and what they are made of, in a scalar and in [N]: shares are those of the plain loop."""

import math
from functools import partial

import pytest
import torch
import torch.distributions as D
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st

from invfunc import batch_grad, diag_ggn, ggn_trace, kfac, outputs, sqrt_ggn
from invfunc.kronecker import Kronecker, kfra
from invfunc.testing import assert_trees_close, loop_batch_grad
from tests.networks import total
from tests.rows import BOTH, LOSS, MODEL, ROWS, made_of
from tests.strategies import Numbers, seeded

W, X, Y = Numbers()(3, 3), Numbers(1)(4, 3), Numbers(2)(4, 3)
SIGNS, CLASSES, C = Numbers(3)(4).sign(), Numbers(4).below(3, 4), Numbers(5)(4, 3)
EXACT = 1e-10

OF_TORCH = {
    "triplet": lambda z, y, **how: F.triplet_margin_loss(z, z.sin(), y, **how),
    "cosine": lambda z, y, **how: F.cosine_embedding_loss(z, y, SIGNS[: len(z)], **how),
    "ranking": lambda z, y, **how: F.margin_ranking_loss(z[:, 0], y[:, 0], SIGNS[: len(z)], **how),
    "hinge": lambda z, y, **how: F.hinge_embedding_loss(z[:, 0], SIGNS[: len(z)], **how),
    "margin": lambda z, y, **how: F.multi_margin_loss(z, CLASSES[: len(z)], **how),
    "soft margin": lambda z, y, **how: F.multilabel_soft_margin_loss(z, (y > 0).to(z), **how),
    "Gaussian": lambda z, y, **how: F.gaussian_nll_loss(z[:, 0], y[:, 0], z[:, 1].exp(), **how),
}
PREDICTIVE = {
    "normal": lambda z, y: D.Normal(z, W.exp().sum()).log_prob(y).sum(1),
    "Laplace": lambda z, y: D.Laplace(z, z.exp()).log_prob(y).sum(1),
    "categorical": lambda z, y: D.Categorical(logits=z).log_prob(CLASSES),
    "Bernoulli": lambda z, y: D.Bernoulli(logits=z).log_prob((y > 0).to(z)).sum(1),
}


def assert_shares(losses, scalar, *args):
    """In [N] against the loop; in a scalar as 1/N of it for a mean, and as it is for a sum."""
    shares = loop_batch_grad(losses)(*args)
    assert_trees_close(batch_grad(losses)(*args), shares, EXACT)
    assert_trees_close(batch_grad(scalar("mean"))(*args), shares / len(args[-1]), EXACT)
    assert_trees_close(batch_grad(scalar("sum"))(*args), shares, EXACT)


@pytest.mark.quick
@pytest.mark.parametrize("called", OF_TORCH)
def test_of_torch(called):
    def loss(reduction):
        return lambda w, x, y: OF_TORCH[called](x @ w, y, reduction=reduction)

    assert_shares(loss("none"), loss, W, X, Y)


@pytest.mark.parametrize("called", PREDICTIVE)
def test_of_distributions(called):
    def losses(w, x, y):
        return -PREDICTIVE[called](x @ w, y)

    assert_shares(losses, lambda how: lambda *args: getattr(losses(*args), how)(), W, X, Y)


TERMS = {
    "mse_loss": lambda z, y: F.mse_loss(z, y, reduction="sum"),
    "cross_entropy": lambda z, y: F.cross_entropy(z, y.argmax(1), reduction="sum"),
    "binary_cross_entropy_with_logits": lambda z, y: F.binary_cross_entropy_with_logits(
        z, y.sigmoid(), reduction="sum"
    ),
    "nll_loss": lambda z, y: F.nll_loss(z.log_softmax(1), y.argmax(1), reduction="sum"),
    "huber_loss": lambda z, y: F.huber_loss(z, y, reduction="sum"),
}
OF_A_LOSS = {name: row for name, row in ROWS.items() if BOTH in row.forms and not row.drawn}


@pytest.mark.parametrize("called", OF_A_LOSS)
@given(terms=st.lists(st.sampled_from(list(TERMS)), min_size=2, max_size=2), first=st.booleans())
def test_a_mask_may_select_no_sample(called, terms, first):
    """Of two terms one gets all samples, as with a batch without labels."""
    row, (one, other) = OF_A_LOSS[called], (TERMS[t] for t in terms)

    def loss(z, target):
        y, m = target
        return (one(z[m], y[m]) + other(z[~m], y[~m])) / len(z)

    def alone(z, target):
        return (one if first else other)(z, target[0]) / len(z)

    args = ([W], X, (Y, torch.full((len(X),), first)))
    for form in row.forms:
        if form == LOSS and called == "kfra":  # for which f has one output
            continue
        found, wanted = (made_of(row, lambda p, x: x @ p[0], some, form)(*args) for some in (loss, alone))
        if called == "sqrt_ggn":  # a root with as many columns, or another one
            found, wanted = (comparable(called, s) for s in (found, wanted))
        assert_trees_close(found, wanted, EXACT, 1e-6)


OUTPUTS = {"one target": (4,), "a target at each position": (4, 2)}
TARGETS = {
    "labels": (lambda y, one: y, {}),
    "labels, some ignored": (lambda y, one: torch.where(y == 2, -100, y), {}),
    "labels, smoothed": (lambda y, one: y, {"label_smoothing": 0.3}),
    "labels, smoothed, some ignored": (lambda y, one: y, {"label_smoothing": 0.3, "ignore_index": 2}),
    "probabilities": (lambda y, one: Numbers(7)(4, *one).softmax(1), {}),
    "probabilities, smoothed": (lambda y, one: Numbers(7)(4, *one).softmax(1), {"label_smoothing": 0.3}),
}
OF_WEIGHTED = {name: row for name, row in ROWS.items() if row.forms != (MODEL,) and not row.drawn}
del OF_WEIGHTED["kfra"]  # it takes layers alone


def comparable(called, result):
    """Products of square roots and of factors, of which there are several."""
    if called == "sqrt_ggn":
        return [torch.einsum("vni,vnj->nij", s.flatten(2), s.flatten(2)) for s in result]
    if isinstance(result, list) and isinstance(result[0], Kronecker):
        return [k.dense() for k in result]
    return result


def weighted(target, weight, label_smoothing=0.0, ignore_index=-100):
    """The mean cross entropy with weights of classes as its formula says, of outputs that are marked."""
    if target.is_floating_point():
        mass, size = target, target.sum()  # one for each target
    else:
        counts = target != ignore_index
        mass = F.one_hot(target.clamp(min=0), 4).movedim(-1, 1).double() * counts.unsqueeze(1)
        size = weight[target[counts]].sum()
    mass = (1 - label_smoothing) * mass + label_smoothing / 4 * mass.sum(1, keepdim=True)
    scaled = mass * weight.reshape(4, *[1] * (mass.ndim - 2)) / size

    def loss(z, y):
        z = outputs(z)
        return (y[1] * (z.logsumexp(1, keepdim=True) - z)).sum()

    return loss, scaled


@pytest.mark.parametrize("kind", TARGETS)
@pytest.mark.parametrize("called", OF_WEIGHTED)
def test_a_mean_over_weighted_classes_is_that_of_its_formula(called, kind):
    """Each statistic in each form is that of the formula."""
    row, (made, options), weight = OF_WEIGHTED[called], TARGETS[kind], Numbers(6)(4).exp()
    for one in OUTPUTS.values():
        target = made(torch.tensor([[0, 3], [2, 1], [1, 1], [3, 2]])[:, : math.prod(one[1:])].reshape(4, *one[1:]), one)
        loss, scaled = weighted(target, weight, **options)
        rand = Numbers(8)
        args = [rand(3, math.prod(one)), rand(math.prod(one))], X, (target, scaled)

        def f(p, x, one=one):
            return (x @ p[0] + p[1]).sin().reshape(len(x), *one)

        def of_torch(z, y):
            return F.cross_entropy(z, y[0], weight=weight, **options)

        for form in set(row.forms) - {MODEL}:
            found, wanted = (comparable(called, made_of(row, f, some, form)(*args)) for some in (of_torch, loss))
            assert_trees_close(found, wanted, 1e-9, 1e-6)


# Square roots of Hessians of any loss: what is made of their products has derivatives, also of equal eigenvalues

XR, YR, T = Numbers(1)(4, 2), Numbers(2).below(3, 4), Numbers(3)(4, 3)
P = {"w": Numbers(4)(2, 5), "v": Numbers(5)(5, 3)}


def model(p, x):
    return (x @ p["w"]).tanh() @ p["v"]


LOSSES = {
    "of equal eigenvalues": lambda z, y: (z - T).square().mean(),
    "of a null space": lambda z, y: z.logsumexp(1) - z.gather(1, y[:, None])[:, 0],
    "of one direction": lambda z, y: (z.sum(1) - 1).square().exp().mean(),
    "of a criterion": lambda z, y: (1 + F.cross_entropy(z, y, reduction="none")).square().sum(),
    "two": lambda z, y: F.cross_entropy(z, y) + 0.3 * F.mse_loss(2 * z[:, :2], T[:, :2]),
}


def flat(result):
    """The unique parts of a result: its tensors, and the products of roots and factors."""
    found = []
    for x in result.values() if isinstance(result, dict) else [result]:
        x = x.dense() if hasattr(x, "dense") else x
        if isinstance(x, torch.Tensor) and x.ndim == 4:
            x = torch.einsum("vni,vnj->nij", x.flatten(2), x.flatten(2))
        found.append(x)
    return found


@pytest.mark.parametrize(
    "make", [diag_ggn, partial(diag_ggn, per_sample=True), ggn_trace, sqrt_ggn, partial(kfac, fisher="exact"), kfra]
)
@pytest.mark.parametrize("name", LOSSES)
def test_every_statistic_in_both_forms(make, name):
    """And as its derivative, which is that of the loss that is given apart."""
    loss = LOSSES[name]

    def alone(p, x, y):
        return loss(outputs(model(p, x)), y)

    def weighted(t):
        return lambda p: sum(
            (x * torch.arange(1.0, x.numel() + 1).view(x.shape).cos()).sum() for x in flat(t(p, XR, YR))
        )

    forms = (make(model, loss), make(alone))
    assert_trees_close(*[flat(t(P, XR, YR)) for t in forms], 1e-9)
    assert_trees_close(*[torch.func.grad(weighted(t))(P) for t in forms], 1e-8, 1e-8)


# diag_ggn where probabilities round to 0 and 1, and where nothing counts


class TestExtremes:
    """Probabilities that round to 0 and 1, and losses without a counted entry: finite values, finite gradients."""

    CALLS = {
        "cross_entropy": lambda z, y: F.cross_entropy(z, y),
        "smoothed": lambda z, y: F.cross_entropy(z, y, label_smoothing=0.1),
        "probabilities": lambda z, y: F.cross_entropy(z, F.one_hot(y, 3).to(z.dtype)),
        "nll_loss": lambda z, y: F.nll_loss(z.log_softmax(1), y),
        "bce": lambda z, y: F.binary_cross_entropy_with_logits(z, F.one_hot(y, 3).to(z.dtype)),
    }

    @pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("scale", [1e4, -1e4, 0.0])
    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
    def test_saturated_outputs(self, call, scale, dtype):
        w, x, y = Numbers()(2, 3).to(dtype), Numbers(1)(4, 2).to(dtype), Numbers(2).below(3, 4)
        for drawing in ({}, {"mc_samples": 3, "generator": seeded()}):
            self.assert_finite(diag_ggn(lambda w, x: scale * (x @ w), call, **drawing), w, x, y)
            self.assert_finite(diag_ggn(lambda w, x, y: call(scale * (x @ w), y), **drawing), w, x, y)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64], ids=str)
    @pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
    def test_what_is_drawn_of_a_sure_prediction_is_what_there_is_of_it(self, call, dtype):
        """Nothing, of outputs whose probabilities round to 0 and 1; beside them each has what it has alone."""
        logits, y = torch.tensor([[1e4, -1e4, -1e4], [-1e4, 1e4, -1e4], [0.5, -0.25, 0.0]]).to(dtype), torch.arange(3)

        def columns(x, y):
            sqrt = sqrt_ggn(lambda w, x: x + w, call, mc_samples=64, generator=seeded())
            return sqrt(torch.zeros(3, dtype=dtype), x, y)

        found = columns(logits, y)
        assert not found[:, :2].any() and found[:, 2].any(0).all()

    @pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
    @pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"weight": torch.ones(3).double()}], ids=str)
    def test_all_targets_ignored(self, options, reduction):
        w, x, y = Numbers()(2, 3), Numbers(1)(4, 2), torch.full((4,), -100)

        def loss(z, y):
            return F.cross_entropy(z, y, reduction=reduction, **options)

        for t in diag_ggn(lambda w, x: x @ w, loss), diag_ggn(lambda w, x, y: loss(x @ w, y)):
            assert not t(w, x, y).any()
            self.assert_finite(t, w, x, y)

    @staticmethod
    def assert_finite(t, w, *batch):
        w = w.clone().requires_grad_()
        result = t(w, *batch)
        assert result.isfinite().all()
        if result.requires_grad:
            (slope,) = torch.autograd.grad(total(result), w)
            assert slope.isfinite().all()
