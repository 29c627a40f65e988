"""Sparse matrices, as the adjacency matrix of a graph: they have no memory of their own that a node could look at."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import unwrapped, vmaps_of

_STRIDED = (torch.strided, torch.jagged)


def is_sparse(tensor: torch.Tensor) -> bool:
    """Whether a tensor has another layout than tensors with strides have."""
    return tensor.layout not in _STRIDED


def any_sparse(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether one of them is sparse."""
    return not all([t.layout in _STRIDED for t in tensors])


def separate(given: Any) -> tuple[list[torch.Tensor], tree.Form]:
    """The tensors of a tree, and the rest of it, to which sparse ones belong that no gradient is asked of."""
    tensors, form = tree.separate(given)
    if not any_sparse(tensors):
        return tensors, form
    constants = {place: _constant(t) for place, t in zip(form.places, tensors, strict=True)}
    others = tuple(constants.get(place, other) for place, other in enumerate(form.others))
    kept = [(p, t) for p, t in zip(form.places, tensors, strict=True) if constants[p] is None]
    return [t for _, t in kept], tree.Form(form.structure, others, tuple(place for place, _ in kept))


def _constant(tensor: torch.Tensor) -> torch.Tensor | None:
    """What a sparse tensor is below the transforms of torch.func that ask nothing of it."""
    if not is_sparse(tensor) or vmaps_of(tensor):
        return None
    inner: torch.Tensor | None = tensor
    while inner is not None:
        if inner.requires_grad:
            return None
        tensor, inner = inner, unwrapped(inner)
    return tensor
