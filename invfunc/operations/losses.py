"""Losses, by their reduction: over the samples they are a sum, or one for each."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from invfunc._torch.functorch import forward_mode
from invfunc.operations.operation import define


def reduction(call: Any) -> str:
    """The reduction of a loss, also if it is given by the deprecated flags."""
    average, reduced = call.kwargs.get("size_average"), call.kwargs.get("reduce")
    if average is not None or reduced is not None:
        return "none" if reduced is False else "sum" if average is False else "mean"
    said = [a for a in call.args if isinstance(a, str)]
    return said[0] if said else call.kwargs.get("reduction", "mean")


_OLD = ("size_average", "reduce")


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
