"""Sizes of rounding errors."""

from __future__ import annotations

import torch

from invfunc._torch.functorch import innermost
from invfunc._torch.precision import double_on


def default_tolerance(x: torch.Tensor) -> float:
    """The error of an inverse that is taken for rounding, relative to the largest entry."""
    return torch.finfo(x.dtype).eps ** 0.5 if x.is_floating_point() or x.is_complex() else 0.0


def relative_error(came: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest entry of what was wanted; over all entries of any vmap."""
    wide = double_on(wanted.device).to_complex() if wanted.is_complex() else double_on(wanted.device)
    came, wanted = came.to(wide), wanted.to(wide)
    error, size = innermost((came - wanted).abs()), innermost(wanted.abs())
    return error.max().item() / (size.max().item() or 1.0) if size.numel() else 0.0
