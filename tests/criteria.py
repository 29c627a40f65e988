"""Losses for the laws of diag_ggn: the options of torch's convex losses, on outputs of any shape."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from tests.strategies import SIZES, Numbers

REDUCTIONS = {
    "mean": lambda loss: loss,
    "sum": lambda loss: loss,
    "none, summed": lambda loss: loss.sum(),
    "none, halved mean": lambda loss: 0.5 * loss.mean() - 3,
    "none, in the samples": lambda loss: loss if loss.ndim == 1 else loss.flatten(1).mean(1),
    "none, exp": lambda loss: loss.exp().sum() / 8,
}


class Criterion:
    """`loss(z, target)` on outputs of a shape `[N, *one]`; it reads as the call that it is."""

    def __init__(self, called, loss, one, target):
        self.called, self.loss, self.one, self.target = called, loss, tuple(one), target

    def __repr__(self):
        return f"{self.called} of [{len(self.target)}, {', '.join(map(str, self.one))}]"


def model(one):
    """A model function with these outputs, two parameters that reach all of them and one that reaches none."""
    rand, size = Numbers(), math.prod(one)

    def f(params, x):
        return (x @ params["w"] + params["b"]).sin().unflatten(1, one or (1,)).reshape(len(x), *one)

    return f, {"w": rand(2, size), "b": rand(size), "none": rand(2)}


def said(reduction):
    """The `reduction=` of torch's loss."""
    return reduction.split(",")[0]


@st.composite
def cross_entropies(draw):
    """All options of F.cross_entropy, called directly, through a transpose or with the positions merged."""
    rand, n, classes = Numbers(2), draw(SIZES), draw(st.integers(1, 4))
    dims, layout = draw(st.lists(st.integers(1, 3), max_size=2)), draw(st.sampled_from(["direct", "moved", "merged"]))
    reduction = draw(st.sampled_from(list(REDUCTIONS)))
    options = {"reduction": said(reduction)}
    if draw(st.booleans()):
        options["weight"] = rand(classes).exp()
    if draw(st.booleans()):
        options["label_smoothing"] = 0.3
    one = (classes, *dims) if layout == "direct" else (*dims, classes)
    if draw(st.booleans()):
        target = rand(n, *one).softmax(1 if layout == "direct" else -1)
    else:
        target = rand.below(classes, n, *dims)
        if classes > 1 and draw(st.booleans()):
            options["ignore_index"] = 1
            target.view(-1)[0] = 0

    def loss(z, target):
        whole = target.is_floating_point()
        if layout == "moved":
            z, target = z.movedim(-1, 1), target.movedim(-1, 1) if whole else target
        elif layout == "merged":
            z, target = z.reshape(-1, classes), target.reshape(-1, classes) if whole else target.flatten()
        losses = F.cross_entropy(z, target, **options)
        if layout == "merged" and said(reduction) == "none":
            losses = losses.unflatten(0, (n, -1)).sum(1)
        return REDUCTIONS[reduction](losses)

    return Criterion(f"{layout} cross_entropy {reduction} {sorted(options)}", loss, one, target)


ELEMENTWISE = {
    "mse_loss": (F.mse_loss, lambda t: t, {}),
    "mse_loss weight": (F.mse_loss, lambda t: t, {"weight": torch.exp}),
    "bce": (F.binary_cross_entropy_with_logits, torch.sigmoid, {}),
    "bce weight": (F.binary_cross_entropy_with_logits, torch.sigmoid, {"weight": torch.exp}),
    "bce pos_weight": (F.binary_cross_entropy_with_logits, torch.sigmoid, {"pos_weight": torch.exp}),
    "bce 0 or 1": (F.binary_cross_entropy_with_logits, lambda t: (t > 0).to(t), {}),
    "huber_loss": (F.huber_loss, lambda t: t, {}),
    "huber_loss delta": (F.huber_loss, lambda t: t, {"delta": 0.5}),
    "smooth_l1_loss": (F.smooth_l1_loss, lambda t: t, {}),
    "smooth_l1_loss beta": (F.smooth_l1_loss, lambda t: t, {"beta": 2.0}),
    "smooth_l1_loss, l1": (F.smooth_l1_loss, lambda t: t, {"beta": 0.0}),
    "poisson_nll_loss": (F.poisson_nll_loss, lambda t: t.exp().floor(), {}),
    "poisson_nll_loss full": (F.poisson_nll_loss, lambda t: (2 * t).exp().floor(), {"full": True}),
    "poisson_nll_loss of rates": (lambda z, t, **o: F.poisson_nll_loss(z + 2, t, **o), torch.exp, {"log_input": False}),
}


@st.composite
def elementwise(draw):
    """Losses whose Hessian is diagonal, on outputs of any dimensions."""
    rand, n, one = Numbers(3), draw(SIZES), draw(st.lists(st.integers(1, 3), max_size=3))
    name, reduction = draw(st.sampled_from(list(ELEMENTWISE))), draw(st.sampled_from(list(REDUCTIONS)))
    if reduction == "none, exp":
        reduction = "none, summed"
    call, made, options = ELEMENTWISE[name]
    target = made(rand(n, *one))
    spread = n, *one
    options = {
        key: value(rand(*(spread if key == "weight" else one))) if callable(value) else value
        for key, value in options.items()
    }

    def loss(z, target):
        return REDUCTIONS[reduction](call(z, target, reduction=said(reduction), **options))

    return Criterion(f"{name} {reduction}", loss, one, target)


@st.composite
def after_logarithms(draw):
    """nll_loss and kl_div, which are linear in what they get: the outputs are those of the logarithm before."""
    rand, n, name = Numbers(4), draw(SIZES), draw(st.sampled_from(["nll_loss", "kl_div", "kl_div logsigmoid"]))
    classes, steps = draw(st.integers(2, 4)), draw(st.integers(1, 3))
    reduction = draw(st.sampled_from([r for r in REDUCTIONS if r != "none, exp"]))
    layout = draw(st.sampled_from(["direct", "along dim 1", "moved", "merged"])) if name == "nll_loss" else "direct"
    one = {"direct": (classes,), "along dim 1": (classes, steps)}.get(layout, (steps, classes))
    if name == "nll_loss":
        options = {"weight": rand(classes).exp()} if draw(st.booleans()) else {}
        target = rand.below(classes, n, *[steps] * (layout != "direct"))
        if draw(st.booleans()):
            options["ignore_index"] = 1
            target.view(-1)[0] = 0
    else:
        options = {"log_target": True} if draw(st.booleans()) else {}
        target = rand(n, *one).log_softmax(1) if options else rand(n, *one).softmax(1)
        reduction = "batchmean" if draw(st.booleans()) else reduction

    def loss(z, target):
        logs = F.logsigmoid(z) if name == "kl_div logsigmoid" else z.log_softmax(1 if layout == "along dim 1" else -1)
        if layout == "moved":
            logs = logs.transpose(1, 2)
        elif layout == "merged":
            logs, target = logs.view(-1, classes), target.view(-1)
        losses = getattr(F, name.split()[0])(logs, target, reduction=said(reduction), **options)
        if layout == "merged" and said(reduction) == "none":
            losses = losses.unflatten(0, (n, steps)).sum(1)
        return REDUCTIONS.get(reduction, lambda x: x)(losses)

    return Criterion(f"{layout} {name} {reduction} {sorted(options)}", loss, one, target)
