"""The base of reductions that keep a matrix for each parameter, its own block of the curvature."""

from __future__ import annotations

import math
from typing import Any

import torch

from invfunc.errors import ArgumentError
from invfunc.kronecker.matrix import Kronecker
from invfunc.kronecker.origin import Origin
from invfunc.reductions.reduction import Found, Reduction, State


class KroneckerReduction(Reduction):
    """A reduction whose result is a `Kronecker` for each parameter."""

    squares = True
    most: float = math.inf
    """The largest dimension of a factor that is kept whole."""

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        dims = tuple(range(leaf.ndim))
        groups = (dims[:1], dims[1:]) if leaf.ndim > 1 else (dims,)
        zeros = tuple(leaf.new_zeros(math.prod(leaf.shape[d] for d in group)) for group in groups)
        return (Kronecker(zeros, groups, leaf.shape, origin=Origin(n=n, reached=False)),)

    def bound(self, shape: torch.Size) -> list[list[int]]:
        sizes = [shape[0], shape[1:].numel()] if shape.count(1) < len(shape) - 1 else [shape.numel()]
        return [[size] if size > self.most else [size, size] for size in sizes]

    def assemble(self, results: list[Any], found: Found) -> Any:
        if found.refused:
            which = "; ".join(f"{name}: {why}" for name, why in found.refused.items())
            raise ArgumentError(
                f"there are no Kronecker factors of {which}. They are of parameters that a linear layer, convolution, "
                "embedding, scale or shift reads. Pass unsupported='diagonal' for the diagonals of their blocks or "
                "unsupported='skip' for None in their places, close over them, or keep them in another argument."
            )
        return results[0]


def added(parts: list[torch.Tensor]) -> torch.Tensor:
    """The sum of symmetric matrices; a vector stands for a diagonal matrix."""
    if len(parts) == 1:
        return parts[0]
    dense = max([x.ndim for x in parts])
    found = parts[0] if parts[0].ndim == dense else torch.diag_embed(parts[0])
    for x in parts[1:]:
        found = found + (x if x.ndim == dense else torch.diag_embed(x))
    return found
