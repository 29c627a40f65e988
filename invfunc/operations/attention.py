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
from invfunc.operations.pointwise import entry_by_entry, pointwise
from invfunc.operations.receptive_fields.step import Rows, Step, columns_of, joined, most, raised, rows_of


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


def _fused_attention(step: Step, out: torch.Tensor) -> Rows | list[Rows]:
    inputs = [step[n] for n in ("src", "query", "key", "value") if n in step]
    if not all(any(x is i for i in inputs) for x in step.labelled) or out.ndim != 3:
        return None
    return joined(*(most(step.filled(x), (2, 3)) for x in step.labelled))


_KERNELS = "flash_attention_for_cpu flash_attention efficient_attention cudnn_attention fused_attention_overrideable"


def _attended(step: Step, out: torch.Tensor) -> Rows | list[Rows]:
    query, key, value = step["query"], step["key"], step["value"]
    if not query.shape[1] == key.shape[1] == value.shape[1]:
        return None
    names = [name for name in ("attn_mask", "attn_bias") if name in step]
    mask, k = step.rows(step[names[0]]) if names else None, step.rows(key)
    parts = [rows_of(step.rows(query)), None if k is None else most(k, (3, 4)), columns_of(step.rows(value))]
    return [joined(*parts, None if mask is None else raised(most(mask, (mask.ndim - 1,)), out.ndim))]


def _drops(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    return bool(argument(func, args, kwargs, "dropout_p"))


define("scaled_dot_product_attention", batch_axis=attention, twice=_unfused, paired=entry_by_entry, draws=_drops)
define([f"_scaled_dot_product_{kernel}" for kernel in _KERNELS.split()], receptive_field=_attended)
define("_transformer_encoder_layer_fwd _native_multi_head_attention", receptive_field=_fused_attention)
define("multi_head_attention_forward", draws=lambda func, args, kwargs: False)  # it is opened
