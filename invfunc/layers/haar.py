"""Two-dimensional Haar wavelets."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from invfunc.errors import ArgumentError
from invfunc.layers.common import keeps_volume, need_axes, shape
from invfunc.layers.pixel_shuffle import squeezed
from invfunc.pairs.pair import Invertible


def haar() -> Invertible:
    """The Haar wavelets of blocks of 2 x 2 pixels: an orthonormal squeeze.

        a, b, c, d = x[..., ::2, ::2], x[..., ::2, 1::2], x[..., 1::2, ::2], x[..., 1::2, 1::2]
        (a + b + c + d) / 2, (a - b + c - d) / 2, (a + b - c - d) / 2, (a - b - c + d) / 2

    Args: none.

    Returns:
        An `Invertible` `x -> y`: x `[*, C, H, W]` and y `[*, 4 * C, H / 2, W / 2]`, in which the four of a channel are
        neighbours: twice the mean, the differences along W and along H, and the one along both. The log-determinant of
        x `[N, C, H, W]` is zeros `[N]`.

    Raises:
        ArgumentError: x has too few axes, or an odd size; y has channels that 4 does not divide.
        ArgumentTypeError: x is not a tensor.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layers.haar()(torch.arange(4.0).reshape(1, 1, 2, 2)).flatten()
        tensor([ 3., -1., -2.,  0.])

    Composes with: `invert`, `chain`, and every transform of torch.func.

    Cost: x is read a few times in each direction.

    Source: Haar, "Zur Theorie der orthogonalen Funktionensysteme", 1910; Ardizzone et al., "Guided image generation
    with conditional invertible neural networks", 2019.
    """

    return Invertible(_forward, _inverse, log_det=keeps_volume("haar()", "[N, C, H, W]", 4), name="haar()")


def _forward(x: torch.Tensor) -> torch.Tensor:
    need_axes("haar()(x)", "x", x, "[*, C, H, W]", 3)
    if x.shape[-2] % 2 or x.shape[-1] % 2:
        raise ArgumentError(f"haar()(x): x has shape {shape(x)}, but H and W have to be even. Pad it, by layers.pad.")
    return _mixed(squeezed(x, 2))


def _inverse(y: torch.Tensor) -> torch.Tensor:
    need_axes("haar().inverse(y)", "y", y, "[*, 4 * C, H, W]", 3)
    if y.shape[-3] % 4:
        raise ArgumentError(f"haar().inverse(y): y has shape {shape(y)}: 4 does not divide its {y.shape[-3]} channels.")
    return F.pixel_shuffle(_mixed(y), 2)


def _mixed(z: torch.Tensor) -> torch.Tensor:
    """The symmetric Hadamard matrix, halved, on each four channels: its own inverse."""
    a, b, c, d = (z / 2).unflatten(-3, (z.shape[-3] // 4, 4)).unbind(-3)
    p, q, r, s = a + b, c + d, a - b, c - d
    return torch.stack([p + q, r + s, p - q, r - s], -3).flatten(-4, -3)
