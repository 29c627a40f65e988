"""The activation that keeps the sign."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from invfunc.layers.common import need_axes, need_number, need_tensor
from invfunc.pairs.couplings import wide
from invfunc.pairs.pair import Invertible, Law


def leaky_relu(negative_slope: float = 0.01) -> Invertible:
    """A leaky ReLU: `y = where(x > 0, x, slope * x)`, `x = where(y > 0, y, y / slope)`.

    Args:
        negative_slope: above 0. With the slope as small as 0.01, `float16` loses negative entries below 1e-5 or so.

    Returns:
        An `Invertible` `x -> y` for x of any shape. The log-determinant `[N]` of x `[N, ...]` is log(negative_slope)
        times the number of entries of a sample that are not above 0.

    Raises:
        ArgumentError: `negative_slope` is not above 0; log_det of an x without axes.
        ArgumentTypeError: x is not a tensor.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layer, x = layers.leaky_relu(0.5), torch.tensor([[1.0, -4.0]])
        >>> layer(x), layer.inverse(layer(x)), layer.log_det(x)
        (tensor([[ 1., -2.]]), tensor([[ 1., -4.]]), tensor([-0.6931]))

    Composes with: `invert`, `chain`, and every transform of torch.func.

    Cost: that of `F.leaky_relu` in each direction.

    Source: `torch.nn.functional.leaky_relu`.
    """
    called = "leaky_relu()" if negative_slope == 0.01 else f"leaky_relu({negative_slope!r})"
    need_number(called, "negative_slope", negative_slope)

    return _LeakyReLU(called, negative_slope).pair(called)


@dataclass(frozen=True, eq=False)
class _LeakyReLU(Law):
    called: str
    slope: float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        need_tensor(f"{self.called}(x)", "x", x)
        return F.leaky_relu(x, self.slope)

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        need_tensor(f"{self.called}.inverse(y)", "y", y)
        return F.leaky_relu(y, 1 / self.slope)

    def log_det(self, x: torch.Tensor) -> torch.Tensor:
        need_axes(f"{self.called}.log_det(x)", "x", x, "[N, ...]", 1)
        below = wide(x).le(0).reshape(x.shape[0], x.shape[1:].numel()).sum(1)
        return below.to(wide(x).dtype) * math.log(self.slope)
