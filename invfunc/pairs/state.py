"""States of two parts, and of many tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import ArgumentError


def two_parts(state: Any, call: str, name: str) -> tuple[Any, Any]:
    """The parts of x or y."""
    if not isinstance(state, (tuple, list)) or len(state) != 2:
        raise ArgumentError(
            f"{call}: {name} has to be a pair of tensors, but is {type(state).__name__}. (One tensor as the state is "
            "split with split_dim=.)"
        )
    return state[0], state[1]


def combined(fn: Callable, first: Any, *others: Any) -> Any:
    """What a function makes of the tensors of states of one form, each in its place."""
    leaves, form = tree.flatten(first)
    return tree.unflatten([fn(*each) for each in zip(leaves, *map(tree.leaves, others), strict=True)], form)


def per_sample(t: torch.Tensor) -> torch.Tensor:
    """The sum over all axes but the leading one, at least in float32."""
    return wide(t).flatten(1).sum(1) if t.dim() > 1 else wide(t)


def wide(t: torch.Tensor) -> torch.Tensor:
    """At least in float32."""
    return t.to(torch.promote_types(t.dtype, torch.float32))
