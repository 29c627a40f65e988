"""Element by element: arithmetic, activations, masks, and casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invfunc import tree
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import Call, Mixed, Place
from invfunc.operations.operation import define, known

# The batch axis


def pointwise(call: Call) -> Place:
    """The samples are where they are in all that is read."""
    place, back = side_by_side(call)
    return place.at(tree.tensors(call.out)[0].ndim + back)


def side_by_side(call: Call) -> tuple[Axis, int]:
    """The sample axis that all operands of an entrywise operation share, and its dimension counted from the end."""
    first, place = call.samples[0]
    assert isinstance(place, Axis) and place.dim is not None
    back = place.dim - first.ndim
    for x, other in call.samples[1:]:
        assert isinstance(other, Axis) and other.dim is not None
        if other.dim - x.ndim != back or not other.like(place):
            shapes = f"of a tensor {list(first.shape)} with samples along {other} of one {list(x.shape)}"
            raise Mixed(f"it combines samples along {place} {shapes}")
    return place, back


def entrywise(name: str) -> bool:
    """Whether each entry of the result is computed from those at its place."""
    return known(name).batch_axis is pointwise


# The others


def _prelu(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`prelu` written out, as the derivative of torch's is wrong where torch.vmap batches both arguments."""
    if weight.numel() > 1 and input.ndim > 1:
        weight = weight.reshape(-1, *[1] * (input.ndim - 2))
    return torch.where(input > 0, input, weight * input)


def _abs(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The absolute value of a complex number, with derivatives of 0 at 0, where torch's become NaN."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, torch.Tensor) or not x.is_complex() or "out" in kwargs:
        return func(*args, **kwargs)
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).abs())


define("abs absolute", twice=_abs)
define("__abs__", twice=_abs)
define("detach", keeps=True)
define("to type_as", reads="first")
define("log_sigmoid", predictive="bernoulli")
define("prelu", composed=_prelu)
define("requires_grad", keeps=True)
