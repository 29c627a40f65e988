"""What is known of an operation of torch by itself."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from invfunc import tree
from invfunc.plans.draws import may_draw

_ATEN = torch.ops.aten
Operator = type(_ATEN.add.Tensor)
_OF_SHAPES = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("new_empty_strided",),
}
"""Operations whose result does not depend on the numbers of what they are given."""
_BOOLEAN = (torch.bool, torch.uint8)


@dataclass(frozen=True)
class Facts:
    """What is known of an operation by itself."""

    operator: bool
    draws: bool
    """Whether it may draw random numbers."""
    decides: bool
    """Whether it hands out numbers."""
    sized: bool
    """Whether the shape of what it gives depends on numbers."""
    of_shapes: bool
    """Whether it takes no numbers."""
    writes: tuple[tuple[int, str], ...]
    turns: bool
    """Whether it makes another view of what it is given."""


@cache
def facts_of(func: Any) -> Facts:
    """What is known of something that is called with tensors."""
    if not isinstance(func, Operator):
        return Facts(False, False, False, False, False, (), False)
    tags, name = func.tags, func.overloadpacket.__name__
    sized = torch.Tag.dynamic_output_shape in tags or func is _ATEN._pack_padded_sequence.default
    decides, turns = torch.Tag.data_dependent_output in tags, torch.Tag.inplace_view in tags
    return Facts(True, may_draw(func), decides, sized, name in _OF_SHAPES, writes(func), turns)


def by_numbers(func: Any, args: tuple) -> bool:
    """Whether the shape of what an operation gives depends on numbers."""
    if torch.Tag.dynamic_output_shape in func.tags:
        indexes = func.overloadpacket.__name__ in ("index", "_unsafe_index")
        return not indexes or any(x.dtype in _BOOLEAN for x in tree.tensors((args[1:],)))
    return func is _ATEN._pack_padded_sequence.default


@cache
def writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Which arguments an operation writes in place, by number and name."""
    found = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in found if a.alias_info is not None and a.alias_info.is_write)


def written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes in place."""
    found = [args[i] if i < len(args) else kwargs.get(name) for i, name in writes(func)]
    return tree.tensors(tuple(found))
