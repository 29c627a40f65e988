"""Losses of outputs that networks with structure have: of pixels, of some of them, in another order, of all at once."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from hypothesis import strategies as st

from invfunc import outputs
from tests.criteria import ELEMENTWISE, REDUCTIONS, Criterion, said
from tests.strategies import Numbers

ELEMENTS = [name for name in ELEMENTWISE if name not in ("poisson_nll_loss of rates", "smooth_l1_loss, l1")]
LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "as they are": lambda z: z,
    "halved": lambda z: z / 2,
    "weighted": lambda z: z * torch.linspace(1, 2, z.shape[-1]).to(z),
    "shifted": lambda z: 1 - z,
    "cropped": lambda z: z[..., 1:-1] if z.ndim > 2 and z.shape[-1] > 2 else z,
    "every second": lambda z: z[..., ::2],
    "flipped": lambda z: z.flip(-1),
    "turned": lambda z: z.movedim(-1, 2) if z.ndim > 2 else z,
    "pooled": lambda z: z.unfold(-1, 2, 1).mean(-1) if z.ndim > 2 and z.shape[-1] > 1 else z,
    "copied": lambda z: torch.cat([z, z], -1) if z.ndim > 2 else z,
}
MERGED = ["classes along 1", "classes last", "pixels as samples", "all as classes"]


@st.composite
def cross_entropies_of(draw, shape: tuple[int, ...]) -> Criterion:
    """For each pixel, or one for each sample."""
    merged, layout = draw(st.sampled_from(MERGED)), draw(st.sampled_from(list(LAYOUTS)))
    reduction = draw(st.sampled_from(list(REDUCTIONS)))

    def arranged(z: torch.Tensor) -> torch.Tensor:
        z = LAYOUTS[layout](z)
        if merged == "classes last":
            return z.movedim(-1, 1)
        if merged == "pixels as samples":
            return z.movedim(1, -1).flatten(0, -2)
        return z.flatten(1) if merged == "all as classes" else z

    rand, arrangement = Numbers(2), arranged(torch.zeros(shape)).shape
    classes, options = arrangement[1], dict[str, Any](reduction=said(reduction))
    target = rand.below(classes, arrangement[0], *arrangement[2:])
    if draw(st.booleans()):
        options["weight"] = rand(classes).exp()
    if draw(st.booleans()):
        options["label_smoothing"] = 0.3
    if draw(st.booleans()):
        target = rand(*arrangement).softmax(1)
    elif classes > 1 and draw(st.booleans()):
        options["ignore_index"] = 1
        target.view(-1)[0] = 0

    def loss(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {k: v.to(z) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        losses = F.cross_entropy(arranged(z), target.flatten(0, 1 if split else 0), **given)
        return REDUCTIONS[reduction](losses.unflatten(0, (len(z), -1)) if split and losses.ndim else losses)

    split = merged == "pixels as samples"
    target = target.unflatten(0, (shape[0], -1)) if split else target
    return Criterion(f"cross_entropy, {merged}, {layout}, {reduction}, {sorted(options)}", loss, shape[1:], target)


@st.composite
def elementwise_of(draw, shape: tuple[int, ...]) -> Criterion:
    """For each entry."""
    layout, name = draw(st.sampled_from(list(LAYOUTS))), draw(st.sampled_from(ELEMENTS))
    reduction = draw(st.sampled_from([r for r in REDUCTIONS if r != "none, exp"]))
    rand, (call, made, options) = Numbers(3), ELEMENTWISE[name]
    arrangement = LAYOUTS[layout](torch.zeros(shape)).shape
    target = made(rand(*arrangement))
    options = {
        key: value(rand(*(arrangement if key == "weight" else arrangement[1:]))) if callable(value) else value
        for key, value in options.items()
    }

    def loss(z: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        given: dict[str, Any] = {k: v.to(z) if isinstance(v, torch.Tensor) else v for k, v in options.items()}
        return REDUCTIONS[reduction](call(LAYOUTS[layout](z), target, reduction=said(reduction), **given))

    return Criterion(f"{name}, {layout}, {reduction}", loss, shape[1:], target)


GENERAL: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "log cosh": lambda z, y: (z - y).cosh().log().sum(),
    "distance of samples": lambda z, y: ((z - y).square().flatten(1).sum(1) + 1).sqrt(),
    "distance of pixels": lambda z, y: ((z - y).square().sum(1) + 1).sqrt().mean(),
    "log-sum-exp of pixels": lambda z, y: z.logsumexp(1).sum() - (z * y).sum(),
    "differences": lambda z, y: (z.diff(dim=-1) - y.diff(dim=-1)).square().sum() + z.square().mean(),
    "square of a sum": lambda z, y: (z - y).flatten(1).sum(1).square().mean(),
    "two losses": lambda z, y: F.cross_entropy(z, y.softmax(1)) + 0.5 * F.mse_loss(z, y),
    "two losses of parts": lambda z, y: F.mse_loss(z[..., :1], y[..., :1]) + F.huber_loss(3 * z, y, reduction="sum"),
    "product of losses": lambda z, y: (1 + F.mse_loss(z, y, reduction="none").flatten(1).sum(1)).square().sum() / 9,
}


@st.composite
def general_of(draw, shape: tuple[int, ...]) -> Criterion:
    """Nothing is known about them but that they are convex; their outputs are marked."""
    called = draw(st.sampled_from(list(GENERAL)))
    return Criterion(called, lambda z, y: GENERAL[called](outputs(z), y), shape[1:], Numbers(4)(*shape))


def criteria_of(shape: tuple[int, ...]) -> Any:
    """Losses of outputs of this shape, with targets for them."""
    assert math.prod(shape)
    return cross_entropies_of(shape) | elementwise_of(shape) | general_of(shape)
