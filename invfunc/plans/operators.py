"""Facts of an operation of torch by itself: what it writes in place, and whether it draws random numbers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import torch

from invfunc import tree

Operator = type(torch.ops.aten.add.Tensor)
_DROPOUT = "dropout_p"


def draws(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Returns whether an operation may draw random numbers."""
    at = _draws_at(func)
    if at is None or at < 0:
        return at is None
    return (args[at] if at < len(args) else kwargs.get(_DROPOUT, 0.0)) != 0


@cache
def _draws_at(func: Any) -> int | None:
    """The place of the probability of attention's dropout, which draws nothing where it is 0; None of what draws in any
    case, and -1 of what never does, as derivatives, which are given what was drawn."""
    arguments = func._schema.arguments
    if any("Generator" in str(a.type) for a in arguments):
        return None
    if torch.Tag.nondeterministic_seeded not in func.tags or func._schema.name.endswith("_backward"):
        return -1
    return next((i for i, a in enumerate(arguments) if a.name == _DROPOUT), None)


@cache
def writes(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operation writes in place, by number and name."""
    found = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in found if a.alias_info is not None and a.alias_info.is_write)


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes in place."""
    return tree.tensors(tuple(args[i] if i < len(args) else kwargs.get(name) for i, name in writes(func)))
