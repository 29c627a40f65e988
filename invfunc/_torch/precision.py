"""The precision of sums that nearly cancel: float64, where a device has it."""

from __future__ import annotations

import torch

from invfunc.errors import ArgumentError

WITHOUT_FLOAT64 = {"mps"}
"""The kinds of devices that refuse tensors of float64. There no way is taken in which sums of products cancel."""


def has_float64(device: torch.device) -> bool:
    """Tells whether a device has it."""
    return device.type not in WITHOUT_FLOAT64


def double_on(device: torch.device) -> torch.dtype:
    """The dtype of the most digits that a device has."""
    return torch.float64 if has_float64(device) else torch.float32


def doubled(x: torch.Tensor) -> torch.Tensor:
    """A tensor in that dtype."""
    return x.to(double_on(x.device))


def in_float64(x: torch.Tensor, why: str) -> torch.Tensor:
    """A tensor in float64, or the error that says why there is no other way."""
    if not has_float64(x.device):
        raise ArgumentError(f"{why} in float64, which {x.device.type} has not. Keep its tensors on the CPU.")
    return x.to(torch.promote_types(x.dtype, torch.float64))
