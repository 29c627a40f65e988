"""A scale and a shift of each channel, which start from data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from invfunc.errors import ArgumentError
from invfunc.layers.common import DataDependent, for_each, need_axes, need_number, need_pair, need_size, shape
from invfunc.pairs.couplings import wide
from invfunc.pairs.pair import Law


def actnorm(eps: float = 1e-6) -> DataDependent:
    """A scale and a shift of each channel, started so that a first batch leaves with mean 0 and variance 1.

        y = (x + bias) * exp(log_scale)                             x = y * exp(-log_scale) - bias
        var, mean = torch.var_mean(x, [0, 2, 3], correction=0)      # over all axes but 1: x [N, C, H, W], say
        bias, log_scale = -mean, -(var + eps).log() / 2             # start(x)

    From then on they are ordinary parameters: unlike in `batch_norm`, no sample depends on another.
    Of a deep flow each starts from what the blocks before it make of the batch:

        for block, p in zip(blocks, params):
            x = block(x, block.start(x) if hasattr(block, "start") else p)

    Args:
        eps: added to the variance at the start, above 0, so that a constant channel is not divided by 0.

    Returns:
        An `Invertible` `(x, (log_scale, bias)) -> y`, x and y `[N, C, ...]`, both parameters `[C]`. Its log-determinant
        `[N]` is the sum of log_scale over the numbers of a sample. `start(x)` gives the parameters of a batch.

    Raises:
        ArgumentError: `eps` is not above 0; shapes do not fit; a start from a batch with one number a channel.
        ArgumentTypeError: x or the parameters are not tensors.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> norm, x = layers.actnorm(), torch.tensor([[1.0, 4.0], [3.0, 8.0]])
        >>> log_scale, bias = norm.start(x)
        >>> norm(x, (log_scale, bias)), norm.log_det(x, (log_scale, bias))
        (tensor([[-1.0000, -1.0000],
                [ 1.0000,  1.0000]]), tensor([-0.6931, -0.6931]))

    Composes with: `invert`, `chain`, and every transform of torch.func.

    Cost: each number is read once in either direction.

    Source: Kingma and Dhariwal, "Glow: generative flow with invertible 1x1 convolutions", NeurIPS 2018.
    """
    need_number(f"actnorm(eps={eps!r})", "eps", eps)
    law = _Scaled("actnorm()" if eps == 1e-6 else f"actnorm(eps={eps!r})", eps)
    return DataDependent(law.forward, law.inverse, log_det=law.log_det, name=law.called, law=law)


@dataclass(frozen=True, eq=False)
class _Scaled(Law):
    called: str
    eps: float

    def forward(self, x: torch.Tensor, params: Any = None) -> torch.Tensor:
        log_scale, bias = self._read(f"{self.called}(x, params)", "x", x, params)
        return ((wide(x) + bias) * log_scale.exp()).to(x.dtype)

    def inverse(self, y: torch.Tensor, params: Any = None) -> torch.Tensor:
        log_scale, bias = self._read(f"{self.called}.inverse(y, params)", "y", y, params)
        return (wide(y) * (-log_scale).exp() - bias).to(y.dtype)

    def log_det(self, x: torch.Tensor, params: Any = None) -> torch.Tensor:
        log_scale, _ = self._read(f"{self.called}.log_det(x, params)", "x", x, params)
        return for_each(x, x.shape[2:].numel() * log_scale.sum())

    def start(self, x: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """The parameters for a batch."""
        call = f"{self.called}.start(x)"
        need_axes(call, "x", x, "[N, C, ...]", 2)
        if x.numel() <= x.shape[1]:
            raise ArgumentError(
                f"{call}: x has shape {shape(x)}, at most one number a channel, which has no variance. Give more "
                "samples."
            )
        var, mean = torch.var_mean(wide(x), [0, *range(2, x.ndim)], correction=0)
        return -(var + self.eps).log() / 2, -mean

    @staticmethod
    def _read(call: str, name: str, x: Any, params: Any) -> list[torch.Tensor]:
        """The parameters, each shaped for the channels of x."""
        need_axes(call, name, x, "[N, C, ...]", 2)
        found = dict(zip(("log_scale", "bias"), need_pair(call, "params", params, ("log_scale", "bias")), strict=True))
        for which, v in found.items():
            need_size(call, which, v, 0, x.shape[1], f"as {name} has shape {shape(x)}")
        return [wide(v).reshape(-1, *[1] * (x.ndim - 2)) for v in found.values()]
