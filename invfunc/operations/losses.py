"""Losses, by their reduction: over the samples they are a sum, or one for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

from invfunc._torch.functorch import forward_mode
from invfunc._torch.values import anywhere
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import BATCH_SUM, Call, Mixed, Place, Unknown
from invfunc.operations.operation import define, known, not_torchs
from invfunc.operations.pointwise import pointwise, side_by_side

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
    target = call.arg("target")
    other = call.place(target)
    if other not in (None, entries if target.ndim < x.ndim else axis):
        raise Mixed(f"it combines outputs with samples along {axis} with targets with samples along {other}")
    return BATCH_SUM if reduction(call) != "none" else entries


def entries(call: Call) -> torch.Tensor | None:
    """What each sample adds to a loss."""
    if any(isinstance(a, (str, bool)) for a in call.args) or any(call.kwargs.get(a) is not None for a in _OLD):
        return None
    kwargs = {**call.kwargs, "reduction": "none"}
    losses = call.func(*call.args, **kwargs)
    rule = known(call.name).batch_axis
    place = rule and rule(replace(call, kwargs=kwargs, out=losses))
    added = place.expose(losses, call.n).flatten(1).sum(1) if isinstance(place, Axis) else None
    return added if added is None or reduction(call) == "sum" else added / _count(call, losses)


def _count(call: Call, losses: torch.Tensor) -> Any:
    """What a mean of losses divides their sum by."""
    target = call.arg("target")
    if reduction(call) == "batchmean":
        return len(call.first)
    if call.name not in ("cross_entropy", "nll_loss") or target.is_floating_point():
        return losses.numel()
    ignored, weight = call.arg("ignore_index", -100), call.arg("weight")
    counted = target != ignored
    return counted.sum() if weight is None else (weight[target.where(counted, 0)] * counted).sum()


def counts(call: Call) -> bool:
    """Whether a mean of losses divides by what is in the targets: by their weights, or by how many are not ignored."""
    if call.name not in ("cross_entropy", "nll_loss") or reduction(call) != "mean":
        return False
    target = call.arg("target")
    if target.is_floating_point():
        return False
    ignored = call.arg("ignore_index", -100)
    return call.arg("weight") is not None or anywhere(target == ignored)


_OLD = ("size_average", "reduce")


# In forms that can be differentiated twice


def multi_margin_loss(
    input: torch.Tensor,
    target: torch.Tensor,
    p: int = 1,
    margin: float = 1.0,
    weight: torch.Tensor | None = None,
    size_average: bool | None = None,
    reduce: bool | None = None,
    reduction: str = "mean",
) -> torch.Tensor:
    """`multi_margin_loss` written out, as torch's has no second derivative, and none in forward mode."""
    if p not in (1, 2) or size_average is not None or reduce is not None:
        raise ValueError(
            f"multi_margin_loss: p is 1 or 2, not {p}; in place of size_average and reduce give reduction."
        )
    own = target.unsqueeze(-1)
    over = torch.relu(margin - input.gather(-1, own) + input) ** p
    over = over if weight is None else over * weight.expand(input.shape).gather(-1, own)
    losses = over.scatter(-1, own, 0).mean(-1)
    return losses if reduction == "none" else losses.sum() if reduction == "sum" else losses.mean()


# In forward mode


_SIGNATURES = {func: inspect.signature(func) for func in (F.mse_loss, F.huber_loss, F.soft_margin_loss)}


def _mse(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`mse_loss` with its mean taken separately: in forward mode, the second derivative of torch's writes into a tensor
    of zeros that cannot be written."""
    given = _bound(func, *args, **kwargs)
    if given is None or given["reduction"] != "mean":
        return func(*args, **kwargs)
    return func(**{**given, "reduction": "none"}).mean()


def _huber(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`huber_loss` as a scaled `smooth_l1_loss`, as the backward pass of torch's has no derivative in forward mode."""
    given = _bound(func, *args, **kwargs)
    if given is None:
        return func(*args, **kwargs)
    delta = given.pop("delta")
    return delta * F.smooth_l1_loss(beta=delta, **given)


def _soft_margin(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`soft_margin_loss` written out, as the backward pass of torch's has no derivative in forward mode."""
    given = _bound(func, *args, **kwargs)
    if given is None:
        return func(*args, **kwargs)
    losses = -F.logsigmoid(given["target"] * given["input"])
    return losses if given["reduction"] == "none" else getattr(losses, given["reduction"])()


def _bound(func: Callable, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
    """The arguments of a loss by their names; None outside of forward mode, or if a weight or an old flag is given."""
    if func not in _SIGNATURES or not forward_mode():
        return None
    given = _SIGNATURES[func].bind(*args, **kwargs)
    given.apply_defaults()
    old = (*_OLD, "weight")
    rest = {name: value for name, value in given.arguments.items() if name not in old}
    return rest if all(given.arguments.get(name) is None for name in old) else None


define("mse_loss", twice=_mse, predictive="normal")
define("huber_loss", twice=_huber, cornered=True)
define("soft_margin_loss", twice=_soft_margin)
define("smooth_l1_loss", cornered=True)
define("binary_cross_entropy_with_logits", predictive="bernoulli")
define("multi_margin_loss", composed=multi_margin_loss, twice=not_torchs(multi_margin_loss), only_nn=True)
