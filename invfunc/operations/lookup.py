"""Tables of which rows are looked up: embeddings, and bags of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from invfunc.errors import SampleAxisError
from invfunc.operations.operation import define


def _refuse(name: str, **options: Any) -> None:
    for option, given in options.items():
        if given:
            raise SampleAxisError(f"`{name}`: {option} depends on which indices the whole batch has. Leave it out.")


def embedding(
    input: torch.Tensor,
    weight: torch.Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> torch.Tensor:
    _refuse("embedding", max_norm=max_norm is not None, scale_grad_by_freq=scale_grad_by_freq)
    if padding_idx is not None and not -len(weight) <= padding_idx < len(weight):
        raise ValueError(f"embedding: padding_idx is {padding_idx}, but there are {len(weight)} rows.")
    return torch.embedding(weight, input, -1 if padding_idx is None else padding_idx % len(weight))


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    if offsets is not None or input.ndim != 2 or input.is_nested:
        raise SampleAxisError(
            "`embedding_bag`: bags of different lengths lie one behind the other, where they cannot be followed. Give "
            "[N, L] indices, padded with padding_idx"
        )
    _refuse("embedding_bag", max_norm=max_norm is not None, scale_grad_by_freq=scale_grad_by_freq)
    if mode not in ("sum", "mean", "max") or (per_sample_weights is not None and mode != "sum"):
        raise ValueError(f"embedding_bag: mode is {mode!r}; it is one of sum, mean, max, with per_sample_weights sum.")
    if padding_idx is not None and padding_idx < 0:
        padding_idx += weight.shape[0]
    entries = F.embedding(input, weight, padding_idx)
    if per_sample_weights is not None:
        entries = entries * per_sample_weights.unsqueeze(-1)
    if padding_idx is None:
        return entries.max(1).values if mode == "max" else entries.mean(1) if mode == "mean" else entries.sum(1)
    padding = (input == padding_idx).unsqueeze(-1)
    if mode == "max":
        largest = entries.masked_fill(padding, -math.inf).max(1).values
        return largest.masked_fill(padding.all(1), 0)
    total = entries.masked_fill(padding, 0).sum(1)
    return total if mode == "sum" else total / padding.logical_not().sum(1).clamp(min=1)


def _bag(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`embedding_bag` composed of other operations, as torch's has no second derivative; bags of different lengths are
    left to torch."""
    try:
        return embedding_bag(*args, **kwargs) if func is F.embedding_bag else func(*args, **kwargs)
    except SampleAxisError:
        return func(*args, **kwargs)


define("embedding", composed=embedding, only_nn=True, writes_if=("max_norm", ("weight",)))
define("embedding_bag", composed=embedding_bag, twice=_bag, only_nn=True, writes_if=("max_norm", ("weight",)))
