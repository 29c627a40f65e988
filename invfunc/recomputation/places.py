"""Some entries of a tensor, which stand for all: places that lie in all of its rows, columns and channels."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

_FAR = 10007
"""A prime number: how far apart the places are at which looks begin, and the steps that are tried."""


class Places(NamedTuple):
    """Places in a flat tensor, from a start that is another one in each turn."""

    count: int
    step: int
    """How far apart they are."""
    left: int
    """How many places there are to begin."""

    def of(self, tensor: torch.Tensor, turn: int) -> torch.Tensor:
        """The entries of a tensor of the shape."""
        start = turn * _FAR % self.left
        if tensor.is_contiguous():
            return tensor.as_strided((self.count,), (self.step,), int(tensor.storage_offset()) + start)
        at = torch.arange(self.count, device=tensor.device) * self.step + start
        return tensor[torch.unravel_index(at, tensor.shape)]

    def of_rows(self, flat: torch.Tensor, turn: int) -> torch.Tensor:
        """Those of some tensors, each of which is a row."""
        start = turn * _FAR % self.left
        return flat[:, start : start + (self.count - 1) * self.step + 1 : self.step]


@lru_cache(1024)
def places_of(shape: torch.Size, most: int) -> Places:
    """At most so many places of a tensor."""
    number = shape.numel()
    if number <= most:
        return Places(number, 1, 1)
    widest = number // most
    steps = {widest - i * _FAR % (widest // 8 + 1) | 1 for i in range(24)}  # odd ones, as most sizes are even
    places = (range(0, number, step)[:most] for step in sorted(steps))
    best = max(places, key=lambda places: _spread(shape, places))
    return Places(len(best), best.step, number - best[-1])


def _spread(shape: torch.Size, places: Sequence[int]) -> float:
    """The fraction of all rows, columns, channels ... that places lie in: the product over the axes."""
    spread, inner = 1.0, 1
    for size in reversed(shape):
        parts = min(size, len(places))
        spread *= len({place // inner % size * parts // size for place in places}) / parts
        inner *= size
    return spread


def evenly(tensor: torch.Tensor, most: int) -> torch.Tensor:
    """Entries of a tensor within a graph, whose sizes need not be numbers there."""
    at = torch.arange(most, device=tensor.device) * (tensor.numel() - 1) // (most - 1)
    return tensor.reshape(-1)[at]
