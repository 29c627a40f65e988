"""Layers that scale and shift each channel, or change each number by itself."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from invfunc.errors import ArgumentError
from invfunc.layers.common import (
    DataDependent,
    for_each,
    need_axes,
    need_number,
    need_pair,
    need_size,
    need_tensor,
    shape,
)
from invfunc.pairs.couplings import wide
from invfunc.pairs.pair import Invertible, PairLaw


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
    law = _ScaledChannels("actnorm()" if eps == 1e-6 else f"actnorm(eps={eps!r})", eps)
    return DataDependent(law.forward, law.inverse, log_det=law.log_det, name=law.called, law=law)


@dataclass(frozen=True, eq=False)
class _ScaledChannels(PairLaw):
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


Params = tuple[torch.Tensor, torch.Tensor] | None
Statistics = tuple[torch.Tensor, torch.Tensor]


def batch_norm(eps: float = 1e-5, *, statistics: Statistics | None = None) -> Invertible:
    """Batch normalisation: `y = (x - mean) / sqrt(var + eps) * weight + bias`, per channel.

        var, mean = torch.var_mean(x, [0, 2, 3], correction=0)      # over all axes but 1: x [N, C, H, W], say
        x = (y - bias) / weight * sqrt(var + eps) + mean

    The statistics of the batch are hidden beside y and stay in memory, two numbers a channel. They leave, for running
    averages, as what the pair returns beside y:

        y, (mean, var) = invertible_checkpoint(layers.batch_norm(), has_aux=True)(x, (weight, bias))

    and the averages come back, for evaluation, as `batch_norm(eps, statistics=(mean, var))`. The variance is the biased
    one that normalises; torch's modules average the unbiased one, which is var * n / (n - 1) for n numbers a channel.

    Args:
        eps: added to the variance, above 0.
        statistics: `(mean, var)`, both `[C]`: constants to use in place of those of the batch. Then nothing is hidden.

    Returns:
        An `Invertible` `(x, params=None) -> y`: x and y `[N, C, ...]`, and params is `(weight, bias)`, both `[C]` and
        no entry of weight 0, or None for 1 and 0. `forward` returns `(y, (mean, var))`, and the inverse is `inverse(y,
        (mean, var), params=None) -> x`; with `statistics` they are y and `inverse(y, params=None)`. The log-determinant
        `[N]`, the sum of log|weight / sqrt(var + eps)| over the numbers of a sample, takes the statistics for
        constants, as usual with normalising flows: with them varying, dy/dx is singular.

    Raises:
        ArgumentError: `eps` is not above 0; shapes do not fit; statistics of a batch with one number a channel.
        ArgumentTypeError: x, the parameters or the statistics are not tensors.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> norm, x = layers.batch_norm(), torch.tensor([[1.0, 2.0], [3.0, 2.0]])
        >>> y, (mean, var) = norm.forward(x)
        >>> y.round(decimals=3), mean, var
        (tensor([[-1.,  0.],
                [ 1.,  0.]]), tensor([2., 2.]), tensor([1., 0.]))
        >>> norm.inverse(y, (mean, var))
        tensor([[1., 2.],
                [3., 2.]])

    Composes with: `invert` with `statistics`; `chain`, and every transform of torch.func. A `vmap` over the samples
    leaves no batch; give `statistics` there.

    Cost: x is read twice, for the statistics and for y; the inverse reads y once.

    Source: invtorch's BatchNorm1d, BatchNorm2d and BatchNorm3d; Ioffe and Szegedy, "Batch normalization", ICML 2015;
    the log-determinant as in Dinh et al., "Density estimation using Real NVP", ICLR 2017.
    """
    need_number(f"batch_norm(eps={eps!r})", "eps", eps)
    called = "batch_norm()" if eps == 1e-5 else f"batch_norm(eps={eps!r})"
    if statistics is None:
        return _OfBatch(called, eps).pair(called, hidden=True)
    called = f"{called[:-1]}{'' if eps == 1e-5 else ', '}statistics=...)"
    return _Given(called, eps, need_pair(called, "statistics", statistics, ("mean", "var"))).pair(called)


@dataclass(frozen=True, eq=False)
class _OfBatch(PairLaw):
    called: str
    eps: float

    def forward(self, x: torch.Tensor, params: Params = None) -> tuple[torch.Tensor, Statistics]:
        call = f"{self.called}(x, params)"
        statistics = _statistics(call, x)
        return _normal(call, x, statistics, params, self.eps), statistics

    def inverse(self, y: torch.Tensor, statistics: Statistics, params: Params = None) -> torch.Tensor:
        call = f"{self.called}.inverse(y, statistics, params)"
        return _back(call, y, need_pair(call, "statistics", statistics, ("mean", "var")), params, self.eps)

    def log_det(self, x: torch.Tensor, params: Params = None) -> torch.Tensor:
        call = f"{self.called}.log_det(x, params)"
        return _batch_norm_log_det(call, x, _statistics(call, x), params, self.eps)


@dataclass(frozen=True, eq=False)
class _Given(PairLaw):
    called: str
    eps: float
    statistics: Statistics

    def forward(self, x: torch.Tensor, params: Params = None) -> torch.Tensor:
        return _normal(f"{self.called}(x, params)", x, self.statistics, params, self.eps)

    def inverse(self, y: torch.Tensor, params: Params = None) -> torch.Tensor:
        return _back(f"{self.called}.inverse(y, params)", y, self.statistics, params, self.eps)

    def log_det(self, x: torch.Tensor, params: Params = None) -> torch.Tensor:
        return _batch_norm_log_det(f"{self.called}.log_det(x, params)", x, self.statistics, params, self.eps)


# What they compute


def _statistics(call: str, x: Any) -> Statistics:
    need_axes(call, "x", x, "[N, C, ...]", 2)
    if x.numel() <= x.shape[1]:
        raise ArgumentError(
            f"{call}: x has shape {shape(x)}, at most one number a channel, which is not a batch to take statistics "
            "of. Give more samples, or batch_norm(statistics=(mean, var))."
        )
    var, mean = torch.var_mean(wide(x), [0, *range(2, x.ndim)], correction=0)
    return mean, var


def _normal(call: str, x: Any, statistics: Statistics, params: Params, eps: float) -> torch.Tensor:
    (mean, var), (weight, bias) = _batch_norm_read(call, "x", x, statistics, params)
    y = (wide(x) - mean) / (var + eps).sqrt()
    return (y if weight is None else y * weight + bias).to(x.dtype)


def _back(call: str, y: Any, statistics: Statistics, params: Params, eps: float) -> torch.Tensor:
    (mean, var), (weight, bias) = _batch_norm_read(call, "y", y, statistics, params)
    x = wide(y) if weight is None else (wide(y) - bias) / weight
    return (x * (var + eps).sqrt() + mean).to(y.dtype)


def _batch_norm_log_det(call: str, x: Any, statistics: Statistics, params: Params, eps: float) -> torch.Tensor:
    (_, var), (weight, _) = _batch_norm_read(call, "x", x, statistics, params)
    logs = -(var + eps).log() / 2
    return for_each(x, x.shape[2:].numel() * (logs if weight is None else logs + weight.abs().log()).sum())


# What they are given


def _batch_norm_read(call: str, name: str, x: Any, statistics: Statistics, params: Params) -> tuple[tuple, tuple]:
    """The statistics and the parameters, each shaped for the channels of x."""
    need_axes(call, name, x, "[N, C, ...]", 2)
    pairs = {"mean": statistics[0], "var": statistics[1]}
    if params is not None:
        pairs["weight"], pairs["bias"] = need_pair(call, "params", params, ("weight", "bias"))
    for which, v in pairs.items():
        need_size(call, which, v, 0, x.shape[1], f"as {name} has shape {shape(x)}")
    shaped = [wide(v).reshape(-1, *[1] * (x.ndim - 2)) for v in pairs.values()]
    return tuple(shaped[:2]), tuple(shaped[2:]) or (None, None)


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
class _LeakyReLU(PairLaw):
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
