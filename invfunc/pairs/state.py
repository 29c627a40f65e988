"""States of two parts, and of many tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import ArgumentError, ArgumentTypeError


def two_parts(state: Any, call: str, name: str) -> tuple[Any, Any]:
    """The parts of x or y."""
    several = isinstance(state, (tuple, list))
    if several and len(state) == 2:
        if type(state[0]) is torch.Tensor or all(isinstance(t, torch.Tensor) for t in tree.leaves(state)):
            return state[0], state[1]
    came = type(state).__name__ + (f" of {', '.join(type(t).__name__ for t in state)}" if several else "")
    raise ArgumentError(
        f"{call}: {name} has to be a pair of tensors, but is {came}. (One tensor as the state: split_dim=. Methods of a "
        "pair get the functions that they share in front of it: pair.log_det(*pair.shared, x).)"
    )


def fitting(result: Any, like: Any, call: str, what: str, name: str) -> Any:
    """A result, if it has the form and the shapes of what it changes; others would be broadcast in silence."""
    tensors = isinstance(result, torch.Tensor) and isinstance(like, torch.Tensor)
    if tensors and result.shape == like.shape:
        return result
    (came, form), (wanted, like_form) = tree.flatten(result), tree.flatten(like)
    if form is None or form != like_form:
        kind = ArgumentError if tensors or form else ArgumentTypeError
        raise kind(f"{call}: {what} is {_described(result)}, but {name}, which it changes, is {_described(like)}.")
    return tree.unflatten([fitting(*each, call, what, name) for each in zip(came, wanted, strict=True)], form)


def _described(state: Any) -> str:
    if isinstance(state, torch.Tensor):
        return f"a tensor of shape {list(state.shape)}"
    paths = ", ".join(path for path, _ in tree.named_leaves(state) if path)
    return f"a {type(state).__name__} of {paths}" if paths else f"of type {type(state).__name__}"


def combined(fn: Callable, first: Any, *others: Any) -> Any:
    """What a function makes of the tensors of states of one form, each in its place."""
    if isinstance(first, torch.Tensor):
        return fn(first, *others)
    leaves, form = tree.flatten(first)
    return tree.unflatten([fn(*each) for each in zip(leaves, *map(tree.leaves, others), strict=True)], form)


def per_sample(t: torch.Tensor) -> torch.Tensor:
    """The sum over all axes but the leading one, at least in float32."""
    return wide(t).flatten(1).sum(1) if t.dim() > 1 else wide(t)


def wide(t: torch.Tensor) -> torch.Tensor:
    """At least in float32."""
    return t.to(torch.promote_types(t.dtype, torch.float32))
