"""Tables of which rows are looked up: embeddings, and bags of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from invfunc.errors import SampleAxisError
from invfunc.operations.naming import argument
from invfunc.operations.operation import define


def _refuse(name: str, **options: Any) -> None:
    for option, given in options.items():
        if given:
            raise SampleAxisError(f"`{name}`: {option} depends on which indices the whole batch has. Leave it out.")


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
    return _reduced(input, weight, mode, per_sample_weights, padding_idx, None)


def _reduced(
    input: torch.Tensor,
    weight: torch.Tensor,
    mode: str,
    scales: torch.Tensor | None,
    padding_idx: int | None,
    there: torch.Tensor | None,
) -> torch.Tensor:
    """Bags of indices `[N, L]`, without those that are padding, or not `there`."""
    entries = F.embedding(input, weight, padding_idx)
    if scales is not None:
        entries = entries * scales.unsqueeze(-1)
    if padding_idx is not None:
        own = input != padding_idx % len(weight)
        there = own if there is None else own & there
    if there is None:
        return entries.max(1).values if mode == "max" else entries.mean(1) if mode == "mean" else entries.sum(1)
    there = there.unsqueeze(-1)
    if mode == "max":
        largest = entries.masked_fill(~there, -math.inf).max(1).values
        return largest.masked_fill(~there.any(1), 0)
    total = entries.masked_fill(~there, 0).sum(1)
    return total if mode == "sum" else total / there.sum(1).clamp(min=1)


def _bag(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`embedding_bag` composed of other operations, as torch's has no second derivative; bags of different lengths are
    padded, and what counts in the whole batch is left to torch."""
    given = partial(argument, func, args, kwargs)
    input, offsets = given("input"), given("offsets")
    try:
        _refuse("embedding_bag", max_norm=given("max_norm") is not None, by_freq=given("scale_grad_by_freq"))
        if offsets is None or input.ndim != 1:
            return embedding_bag(*args, **kwargs)
    except SampleAxisError:
        return func(*args, **kwargs)
    starts = offsets[:-1] if given("include_last_offset") else offsets
    lengths = torch.cat([starts[1:], starts.new_full((1,), len(input))]) - starts
    step = torch.arange(int(lengths.max()), device=input.device)
    at, scales = (starts[:, None] + step).clamp(max=len(input) - 1), given("per_sample_weights")
    scales = scales if scales is None else scales[at]
    there = step < lengths[:, None]
    return _reduced(input[at], given("weight"), given("mode", "mean"), scales, given("padding_idx"), there)


define("embedding", writes_if=("max_norm", ("weight",)))
define("embedding_bag", composed=embedding_bag, twice=_bag, only_nn=True, writes_if=("max_norm", ("weight",)))
