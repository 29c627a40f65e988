"""How large rounding errors are, and what is told of tensors on devices that are not waited for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cache

import torch

from invfunc import thresholds
from invfunc._torch.functorch import innermost
from invfunc._torch.precision import double_on, doubled
from invfunc._torch.values import differentiable

Error = float | torch.Tensor
"""The distance of some entries from what they were, relative to their size; a tensor where a device has not told it."""


def largest(errors: Sequence[Error]) -> Error:
    """The largest of some errors."""
    there = [e for e in errors if isinstance(e, torch.Tensor)]
    if not there:
        return max(errors, default=0.0)
    return torch.stack([torch.as_tensor(e, device=there[0].device) for e in errors]).max()


def numbers_of(errors: Sequence[Error]) -> list[float]:
    """Errors as numbers, for which each device is waited for once."""
    waiting = dict[torch.device, list[torch.Tensor]]()
    for e in errors:
        if isinstance(e, torch.Tensor):
            waiting.setdefault(e.device, []).append(doubled(e))
    found = {device: iter(torch.stack(there).tolist()) for device, there in waiting.items()}
    return [next(found[e.device]) if isinstance(e, torch.Tensor) else e for e in errors]


def finite(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether all entries of some tensors are finite."""
    return all(bool(innermost(t).isfinite().all()) for t in tensors)


def summed_finite(tensors: Sequence[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Whether the sums of some tensors are finite, on a device that is not waited for; sums that overflow are not."""
    sums = [innermost(t).sum(dtype=torch.float32).isfinite().to(device) for t in tensors if t.is_floating_point()]
    return torch.stack([torch.ones((), dtype=torch.bool, device=device), *sums]).all()


def mean_size(tensor: torch.Tensor) -> float:
    """The root of the mean square of the entries that are numbers."""
    wide = doubled(tensor.abs())
    return math.sqrt(torch.where(wide.isfinite(), wide, 0).square().mean().item()) if tensor.numel() else 0.0


def rounded(tensors: Sequence[torch.Tensor], seed: int) -> list[torch.Tensor]:
    """The tensors, each of whose entries is moved by some roundings to either side."""
    generator = torch.Generator().manual_seed(seed)

    def moved(t: torch.Tensor) -> torch.Tensor:
        sign = torch.randint(0, 2, t.shape, generator=generator).to(t.device) * 2 - 1
        return t + (t * (ROUNDED * torch.finfo(t.dtype).eps * sign)).to(t.dtype)

    return [moved(t.detach()) if differentiable(t) else t for t in tensors]


def near(error: float, moved: float) -> bool:
    """Whether an error is as that by which another rounding moves a number."""
    return error <= _NEAR * moved


_NEAR = 8.0
"""How many times farther one rounding may move it than another."""
ROUNDED = 4.0
"""How many roundings a value is moved by."""


def known_at_once(device: torch.device) -> bool:
    """Whether reading a number does not make anybody wait."""
    return device.type in thresholds.AT_ONCE


def precision(dtypes: Iterable[torch.dtype]) -> float:
    """The precision of the coarsest dtype; 0 where all are whole numbers."""
    return max(map(_precision, dtypes), default=0.0)


@cache
def _precision(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps if dtype.is_floating_point or dtype.is_complex else 0.0


def default_tolerance(x: torch.Tensor) -> float:
    """The error of an inverse that is taken for rounding, relative to the largest entry."""
    return precision([x.dtype]) ** 0.5


def relative_error(came: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry of what was wanted; over all entries of any vmap."""
    wide = double_on(wanted.device).to_complex() if wanted.is_complex() else double_on(wanted.device)
    came, wanted = came.to(wide), wanted.to(wide)
    error, size = innermost((came - wanted).abs()), innermost(wanted.abs())
    return error.max().item() / (size.max().item() or 1.0) if size.numel() else 0.0
