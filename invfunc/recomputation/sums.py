"""The sums of all entries of tensors, which tell of a few that are far off, as of one sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from invfunc._torch.values import differentiable
from invfunc.recomputation.rounding import Error, known_at_once, precision


class Sum(NamedTuple):
    """The sum of all entries of a tensor, and their size: the root of the sum of squares."""

    dtype: torch.dtype
    sum: Any
    size: Any
    """Both are numbers, or tensors where these are not known at once."""

    @classmethod
    def of(cls, tensor: torch.Tensor, sized: bool) -> Sum:
        """That of a plain tensor; its size only where that is asked for."""
        at_once, size = known_at_once(tensor.device), 1.0
        total = tensor.sum(dtype=_wide(tensor.dtype))
        if sized and differentiable(tensor):
            size = torch.linalg.vector_norm(tensor, dtype=_wide(tensor.dtype))
            size = size.item() if at_once else size
        return cls(tensor.dtype, total.item() if at_once else total, size)

    def error(self, other: Sum, faint: float, sizes: Sequence[Any]) -> Error:
        """The distance of another sum, beyond what rounds the sum itself, relative to the size; of a faint one, as
        zeros are, relative to the sizes of all; where all are zeros it is itself, as that of entries is."""
        if other.dtype != self.dtype or isinstance(self.sum, torch.Tensor) != isinstance(other.sum, torch.Tensor):
            return 0.0
        rounds = 4 * precision([_wide(self.dtype) or self.dtype])
        beyond = abs(other.sum - self.sum) - rounds * abs(self.sum)
        if isinstance(beyond, torch.Tensor):
            size = torch.as_tensor(self.size)
            there = [s for s in sizes if isinstance(s, torch.Tensor) and s.device == size.device]
            whole = torch.stack([size, *there]).sum()
            size = torch.maximum(size, faint * torch.where(whole.isfinite(), whole, 0))
            size = torch.where(size == 0, 1.0, size)
            return torch.where(size.isfinite() & ~(beyond <= 0), beyond / size, 0.0).nan_to_num(math.inf, math.inf)
        if beyond <= 0 or not math.isfinite(self.size):
            return 0.0
        size = max(self.size, faint * sum(s for s in sizes if isinstance(s, float) and math.isfinite(s)))
        return beyond / (size or 1.0) if math.isfinite(beyond) else math.inf


def _wide(dtype: torch.dtype) -> torch.dtype | None:
    """What entries are added in, where that is not their own dtype."""
    return torch.float32 if dtype.is_floating_point and dtype.itemsize < 4 else None
