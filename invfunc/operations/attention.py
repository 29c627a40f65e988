"""Attention."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import Call, Mixed, Place
from invfunc.operations.naming import argument
from invfunc.operations.operation import define
from invfunc.operations.pointwise import pointwise


def attention(call: Call) -> Place:
    for x, axis in call.samples:
        assert isinstance(axis, Axis) and axis.dim is not None
        if axis.dim >= x.ndim - 2:
            raise Mixed("it attends across the sample axis")
    return pointwise(call)


def _unfused(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention with torch's unfused kernel, as the fused ones have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return func(*args, **kwargs)


def _drops(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    return bool(argument(func, args, kwargs, "dropout_p"))


define("scaled_dot_product_attention", twice=_unfused)
