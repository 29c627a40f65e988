"""Channels as pixels, and pixels as channels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

from invfunc.errors import ArgumentError
from invfunc.layers.common import keeps_volume, need_axes, need_count, shape
from invfunc.pairs.pair import Invertible


def pixel_shuffle(r: int) -> Invertible:
    """Channels as pixels: `y = F.pixel_shuffle(x, r)`, `x = F.pixel_unshuffle(y, r)`.

    Args:
        r: how many times as high and as wide y is.

    Returns:
        An `Invertible` `x -> y`: x `[*, C * r * r, H, W]`, y `[*, C, H * r, W * r]`. The log-determinant of
        x `[N, C * r * r, H, W]` is zeros `[N]`.

    Raises:
        ArgumentError: `r` is not an integer above 0; x has too few axes, or channels that r * r does not divide; y has
            a size that r does not divide.
        ArgumentTypeError: x is not a tensor.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layers.pixel_shuffle(2)(torch.arange(4.0).reshape(1, 4, 1, 1))
        tensor([[[[0., 1.],
                  [2., 3.]]]])

    Composes with: `invert`, `chain`, and every transform of torch.func.

    Cost: a copy in each direction.

    Source: invtorch's PixelShuffle; Shi et al., "Real-time single image and video super-resolution", CVPR 2016.
    """
    called = f"pixel_shuffle({r!r})"
    return _pair(called, r, _shuffled, _unshuffled)


def pixel_unshuffle(r: int) -> Invertible:
    """Pixels as channels, also called squeeze: `y = F.pixel_unshuffle(x, r)`, `x = F.pixel_shuffle(y, r)`.

    Args:
        r: how many times as high and as wide x is.

    Returns:
        An `Invertible` `x -> y`: x `[*, C, H * r, W * r]`, y `[*, C * r * r, H, W]`. The log-determinant of
        x `[N, C, H * r, W * r]` is zeros `[N]`.

    Raises:
        ArgumentError: `r` is not an integer above 0; x has too few axes, or a size that r does not divide; y has
            channels that r * r does not divide.
        ArgumentTypeError: x is not a tensor.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layers.pixel_unshuffle(2)(torch.arange(4.0).reshape(1, 1, 2, 2)).flatten()
        tensor([0., 1., 2., 3.])

    Composes with: `invert`, `chain`, and every transform of torch.func.

    Cost: a copy in each direction.

    Source: invtorch's PixelUnshuffle; the squeeze of Dinh et al., "Density estimation using Real NVP", ICLR 2017.
    """
    called = f"pixel_unshuffle({r!r})"
    return _pair(called, r, _unshuffled, _shuffled)


def _pair(called: str, r: int, forward: Callable, inverse: Callable) -> Invertible:
    need_count(called, "r", r)
    forward, inverse = partial(forward, f"{called}(x)", "x", r), partial(inverse, f"{called}.inverse(y)", "y", r)
    return Invertible(forward, inverse, log_det=keeps_volume(called, "[N, C, H, W]", 4), name=called)


def _shuffled(call: str, name: str, r: int, x: torch.Tensor) -> torch.Tensor:
    need_axes(call, name, x, "[*, C, H, W]", 3)
    if x.shape[-3] % (r * r):
        raise ArgumentError(f"{call}: {name} has shape {shape(x)}: {r * r} does not divide its {x.shape[-3]} channels.")
    return F.pixel_shuffle(x, r)


def _unshuffled(call: str, name: str, r: int, x: torch.Tensor) -> torch.Tensor:
    need_axes(call, name, x, "[*, C, H, W]", 3)
    if x.shape[-2] % r or x.shape[-1] % r:
        size = shape(x)[-2:]
        raise ArgumentError(
            f"{call}: {name} has shape {shape(x)}: {r} does not divide its size {size}. Pad it, by layers.pad."
        )
    return squeezed(x, r)


def squeezed(x: torch.Tensor, r: int) -> torch.Tensor:
    """`F.pixel_unshuffle`, which gives an x without samples back as it is (torch 2.13)."""
    blocks = x.unflatten(-1, (x.shape[-1] // r, r)).unflatten(-3, (x.shape[-2] // r, r))  # [*, C, H, r, W, r]
    return blocks.movedim((-3, -1), (-4, -3)).flatten(-5, -3)
