"""The sums of all entries of tensors, which tell of a few that are far off, as of one sample."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch

from invfunc._functorch import batch_first, unwatched
from invfunc.invertible.rounding import Error, known_at_once, precision


class Sum(NamedTuple):
    """The sum of all entries of a tensor, and their size: the root of the sum of squares."""

    dtype: torch.dtype
    sum: Any
    size: Any
    """Both are numbers, or tensors where these are not known at once."""

    @classmethod
    def of(cls, tensor: torch.Tensor, seen: int) -> Sum | None:
        """That of a tensor of which some entries are seen; None where these are all."""
        tensor = batch_first(tensor)
        if tensor.numel() <= seen:
            return None
        with unwatched(), torch.no_grad():
            total, size = _sum(tensor), 1.0
            if tensor.is_floating_point() or tensor.is_complex():
                size = torch.linalg.vector_norm(tensor, dtype=_wide(tensor))
                size = size.item() if known_at_once(tensor.device) else size
            return cls(tensor.dtype, total, size)

    def error(self, tensor: torch.Tensor, faint: float, sizes: Sequence[Any]) -> Error:
        """The distance of the sum of another tensor, beyond what rounds the sum itself, relative to the size; of a
        faint one, as zeros are, relative to the sizes of all."""
        tensor = batch_first(tensor)
        if tensor.dtype != self.dtype or known_at_once(tensor.device) == isinstance(self.sum, torch.Tensor):
            return 0.0
        with unwatched(), torch.no_grad():
            other, rounds = _sum(tensor), 4 * precision([_wide(tensor) or tensor.dtype])
        beyond = abs(other - self.sum) - rounds * abs(self.sum)
        if isinstance(beyond, torch.Tensor):
            size = torch.as_tensor(self.size)
            there = [s for s in sizes if isinstance(s, torch.Tensor) and s.device == size.device]
            whole = torch.stack([size, *there]).sum()
            size = torch.maximum(size, faint * torch.where(whole.isfinite(), whole, 0))
            return torch.where(size.isfinite() & ~(beyond <= 0), beyond / size, 0.0).nan_to_num(math.inf, math.inf)
        if beyond <= 0 or not math.isfinite(self.size):
            return 0.0
        size = max(self.size, faint * sum(s for s in sizes if isinstance(s, float) and math.isfinite(s)))
        return beyond / size if math.isfinite(beyond) and size else math.inf


def _wide(tensor: torch.Tensor) -> torch.dtype | None:
    """What entries are added in, where that is not their own dtype."""
    return torch.float32 if tensor.is_floating_point() and tensor.dtype.itemsize < 4 else None


def _sum(tensor: torch.Tensor) -> Any:
    total = tensor.sum(dtype=_wide(tensor))
    return total.item() if known_at_once(tensor.device) else total
