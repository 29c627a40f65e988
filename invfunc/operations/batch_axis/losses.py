"""Losses, by their reduction: over the samples they are a sum, or one for each."""

from __future__ import annotations

import torch

from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import (
    BATCH_SUM,
    Call,
    Mixed,
    Place,
    Unknown,
    pointwise,
    rule,
    side_by_side,
)

_ELEMENTWISE_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss soft_margin_loss"
).split()


def reduction(call: Call) -> str:
    """The reduction of a loss, also if it is given by the deprecated flags."""
    average, reduced = call.kwargs.get("size_average"), call.kwargs.get("reduce")
    if average is not None or reduced is not None:
        return "none" if reduced is False else "sum" if average is False else "mean"
    said = [a for a in call.args if isinstance(a, str)]
    return said[0] if said else call.kwargs.get("reduction", "mean")


@rule("margin_ranking_loss", "hinge_embedding_loss", "gaussian_nll_loss")
def elementwise_loss(call: Call) -> Place:
    side_by_side(call)
    return pointwise(call) if call.out.ndim else BATCH_SUM


_ROWS = {"triplet_margin_loss": 3, "cosine_embedding_loss": 2, "multilabel_margin_loss": 2}
_ROWS |= {"multilabel_soft_margin_loss": 2}
"""Losses that compare rows, and how many of their arguments have rows."""


@rule(*_ROWS)
def row_loss(call: Call) -> Place:
    rows = [a for a in call.args[: _ROWS[call.name]] if isinstance(a, torch.Tensor)]
    if len(rows) < _ROWS[call.name] or any(x.ndim != rows[0].ndim or x.ndim < 2 for x in rows):
        raise Unknown("its arguments are not rows of the same number of dimensions, given by position")
    if any(axis != Axis(0) for _, axis in call.samples):
        raise Mixed("it compares along the sample axis")
    return Axis(0) if call.out.ndim else BATCH_SUM


@rule(*_ELEMENTWISE_LOSSES, "cross_entropy", "nll_loss")
def loss(call: Call) -> Place:
    if call.name in _ELEMENTWISE_LOSSES:
        side_by_side(call)
        return BATCH_SUM if reduction(call) != "none" else pointwise(call)
    x, axis = call.first, call.place(call.first)
    if not isinstance(axis, Axis) or axis.dim is None:
        if reduction(call) != "none":
            return BATCH_SUM
        raise Unknown("its target depends on the samples, but nothing is known of its input")
    classes = 0 if x.ndim == 1 else 1
    if axis.dim == classes:
        raise Mixed("it normalises over the sample axis as if these were classes")
    entries = axis.at(axis.dim - (axis.dim > classes))
    target = call.arg(1, "target")
    other = call.place(target)
    if other not in (None, entries if target.ndim < x.ndim else axis):
        raise Mixed(f"it combines outputs with samples along {axis} with targets with samples along {other}")
    return BATCH_SUM if reduction(call) != "none" else entries
