"""Layers over channels: element-wise functions, permutations, scales, and linear maps."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from invfunc.errors import ArgumentError
from invfunc.layers.shapes import (
    DataDependent,
    at_full_precision,
    for_each,
    keeps_volume,
    log_abs_det,
    matrix_and_bias,
    need_axes,
    need_number,
    need_pair,
    need_size,
    need_tensor,
    no_determinant,
    no_way_back,
    rotation,
    shape,
    solved,
    weight_and_bias,
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
        mean, var = _moments(f"{self.called}.start(x)", x)
        return -(var + self.eps).log() / 2, -mean

    @staticmethod
    def _read(call: str, name: str, x: Any, params: Any) -> list[torch.Tensor]:
        need_axes(call, name, x, "[N, C, ...]", 2)
        log_scale, bias = need_pair(call, "params", params, ("log_scale", "bias"))
        return _by_channel(call, name, x, log_scale=log_scale, bias=bias)


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
        return _BatchNorm(called, eps).pair(called, hidden=True)
    called = f"{called[:-1]}{'' if eps == 1e-5 else ', '}statistics=...)"
    return _BatchNorm(called, eps, need_pair(called, "statistics", statistics, ("mean", "var"))).pair(called)


@dataclass(frozen=True, eq=False)
class _BatchNorm(PairLaw):
    """Channels by given statistics, or by those of x, which then come beside y."""

    called: str
    eps: float
    statistics: Statistics | None = None

    def forward(self, x: torch.Tensor, params: Params = None) -> Any:
        call = f"{self.called}(x, params)"
        statistics = self.statistics or _statistics(call, x)
        (mean, var), (weight, bias) = _batch_norm_read(call, "x", x, statistics, params)
        y = (wide(x) - mean) / (var + self.eps).sqrt()
        y = (y if weight is None else y * weight + bias).to(x.dtype)
        return (y, statistics) if self.statistics is None else y

    def inverse(self, y: torch.Tensor, *more: Any) -> torch.Tensor:
        call = f"{self.called}.inverse(y, {'statistics, ' * (self.statistics is None)}params)"
        given, params, *_ = (*(more if self.statistics is None else (self.statistics, *more)), None, None)
        statistics = need_pair(call, "statistics", given, ("mean", "var"))
        (mean, var), (weight, bias) = _batch_norm_read(call, "y", y, statistics, params)
        x = wide(y) if weight is None else (wide(y) - bias) / weight
        return (x * (var + self.eps).sqrt() + mean).to(y.dtype)

    def log_det(self, x: torch.Tensor, params: Params = None) -> torch.Tensor:
        call = f"{self.called}.log_det(x, params)"
        (_, var), (weight, _) = _batch_norm_read(call, "x", x, self.statistics or _statistics(call, x), params)
        logs = -(var + self.eps).log() / 2
        return for_each(x, x.shape[2:].numel() * (logs if weight is None else logs + weight.abs().log()).sum())


def _moments(call: str, x: Any, more: str = "") -> Statistics:
    need_axes(call, "x", x, "[N, C, ...]", 2)
    if x.numel() <= x.shape[1]:
        raise ArgumentError(
            f"{call}: x has shape {shape(x)}, at most one number a channel, which has no variance. Give more samples"
            f"{more}."
        )
    var, mean = torch.var_mean(wide(x), [0, *range(2, x.ndim)], correction=0)
    return mean, var


def _statistics(call: str, x: Any) -> Statistics:
    return _moments(call, x, ", or batch_norm(statistics=(mean, var))")


def _batch_norm_read(call: str, name: str, x: Any, statistics: Statistics, params: Params) -> tuple[tuple, tuple]:
    """The statistics and the parameters, each shaped for the channels of x."""
    need_axes(call, name, x, "[N, C, ...]", 2)
    pairs = {"mean": statistics[0], "var": statistics[1]}
    if params is not None:
        pairs["weight"], pairs["bias"] = need_pair(call, "params", params, ("weight", "bias"))
    shaped = _by_channel(call, name, x, **pairs)
    return tuple(shaped[:2]), tuple(shaped[2:]) or (None, None)


def _by_channel(call: str, name: str, x: torch.Tensor, **given: torch.Tensor) -> list[torch.Tensor]:
    """Numbers of the channels, each shaped for those of x."""
    for which, v in given.items():
        need_size(call, which, v, 0, x.shape[1], f"as {name} has shape {shape(x)}")
    return [wide(v).reshape(-1, *[1] * (x.ndim - 2)) for v in given.values()]


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


def linear() -> Invertible:
    """A linear layer that gives at least as many numbers as it gets: `y = x W^T + b`.

        x = torch.linalg.solve(W, y - b)            # W square, one row of y
        x = torch.linalg.lstsq(W, y - b).solution   # W tall

    The inverse is as exact as W is well conditioned: it multiplies the rounding errors of y by up to the condition
    number of W. Orthogonal initial values are a good start; `orthogonal_linear` stays there.

    Args: none.

    Returns:
        An `Invertible` `(x, params) -> y`: x `[..., in]`, y `[..., out]`, and params is `(W, b)`, `(W, None)` or `W`,
        with W `[out, in]`, out >= in, and b `[out]`. The log-determinant `[N]`, for out == in, is log|det W| times the
        number of positions of a sample: of all axes between the first and the last.

    Raises:
        ArgumentError: out < in, which has no inverse; shapes that do not fit; log_det of out > in.
        ArgumentTypeError: x or the parameters are not tensors.
        torch.linalg.LinAlgError: the inverse of a square W that is singular; its log-determinant is -inf. A tall W with
            dependent columns goes unnoticed, and what the inverse gives is arbitrary.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layer, params = layers.linear(), (torch.tensor([[2.0, 0.0], [0.0, 4.0]]), torch.ones(2))
        >>> layer(torch.tensor([[1.0, 1.0]]), params)
        tensor([[3., 5.]])
        >>> layer.inverse(torch.tensor([[3.0, 5.0]]), params)
        tensor([[1., 1.]])

    Composes with: `invert` for out == in; `chain`, and every transform of torch.func.

    Cost: forward that of `F.linear`. The inverse factorises W, by LU for out == in and by QR for out > in, and then is
    about as much as forward.

    Source: invtorch's Linear.
    """
    return _Matrix("linear()").pair("linear()")


def orthogonal_linear() -> Invertible:
    """A linear layer whose matrix is a rotation for any parameter: `y = x Q^T + b`, `x = (y - b) Q`.

        v[i] = [0, ..., 0, 1, A[i + 1, i], ..., A[C - 1, i]]
        Q = -H[0] @ ... @ H[C - 1]                  # H[i] = eye(C) - 2 * outer(v[i], v[i]) / (v[i] @ v[i])

    Householder vectors rather than a matrix exponential: Q is orthogonal to rounding however large A is, at a fraction
    of the cost. Every rotation is reached or, on a set of measure zero, approached; A = 0 is the identity.

    Args: none.

    Returns:
        An `Invertible` `(x, params) -> y`: x and y `[..., C]`, and params is `(A, b)`, `(A, None)` or `A`, with an
        unconstrained A `[C, C]`, of which what is below the diagonal counts, and b `[C]`. The log-determinant is zeros
        `[N]`.

    Raises:
        ArgumentError: A is not square, or shapes do not fit.
        ArgumentTypeError: x or the parameters are not tensors.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layer, A = layers.orthogonal_linear(), torch.tensor([[0.0, 0.0], [1.0, 0.0]])
        >>> layer(torch.tensor([[1.0, 2.0]]), A)
        tensor([[-2.,  1.]])

    Composes with: `invert`, `chain`, and every transform of torch.func.

    Cost: in each direction that of `F.linear`, and some 4/3 C^3 operations for Q.

    Source: Mhammedi et al., "Efficient orthogonal parametrisation of recurrent neural networks using Householder
    reflections", ICML 2017.
    """
    return _Matrix("orthogonal_linear()", True).pair("orthogonal_linear()")


FORM = "[N, C, *spatial] with one to three spatial axes"
CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


def conv1x1(*, orthogonal: bool = False) -> Invertible:
    """A 1x1 convolution: `y[n, :, p] = W @ x[n, :, p] + b` at each position p.

    Args:
        orthogonal: whether the matrix is a rotation Q for any parameter, as in `orthogonal_linear`: then the inverse is
            its transpose, and nothing has to be solved.

    Returns:
        An `Invertible` `(x, params) -> y`: x and y `[N, C, *spatial]` with one to three spatial axes, and params is
        `(W, b)`, `(W, None)` or `W`, with W `[C, C]` and b `[C]`; with `orthogonal=True` an unconstrained A `[C, C]`
        stands in W's place. The log-determinant `[N]` is log|det W| times the number of positions, of a rotation zeros.

    Raises:
        ArgumentError: the matrix is not square, or shapes do not fit.
        ArgumentTypeError: x or the parameters are not tensors.
        torch.linalg.LinAlgError: the inverse of a W that is singular; its log-determinant is -inf.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layer, W = layers.conv1x1(), torch.tensor([[1.0, 1.0], [0.0, 2.0]])
        >>> y = layer(torch.ones(1, 2, 1, 3), W)
        >>> y[0, :, 0, 0], torch.equal(layer.inverse(y, W), torch.ones(1, 2, 1, 3)), layer.log_det(y, W)
        (tensor([2., 2.]), True, tensor([2.0794]))

    Composes with: `invert`, `chain`, and every transform of torch.func.

    Cost: forward that of the convolution. The inverse factorises W, some 2/3 C^3 operations, and then is about as much
    as two of them.

    Source: Kingma and Dhariwal, "Glow: generative flow with invertible 1x1 convolutions", NeurIPS 2018.
    """
    called = "conv1x1(orthogonal=True)" if orthogonal else "conv1x1()"
    return _Matrix(called, orthogonal, axis=1).pair(called)


@dataclass(frozen=True, eq=False)
class _Matrix(PairLaw):
    """A product with a matrix W, or with the rotation of A, along the last axis or that of channels."""

    called: str
    orthogonal: bool = False
    axis: int = -1

    def forward(self, x: torch.Tensor, params: Any = None) -> torch.Tensor:
        return self._product(x, *self._read("(x, params)", "x", x, params))

    def inverse(self, y: torch.Tensor, params: Any = None) -> torch.Tensor:
        matrix, bias = self._read(".inverse(y, params)", "y", y, params)
        if not self.orthogonal:
            return solved(y.movedim(self.axis, -1), matrix, bias).movedim(-1, self.axis).contiguous()
        z = wide(y) if bias is None else (wide(y).movedim(self.axis, -1) - wide(bias)).movedim(-1, self.axis)
        return self._product(z, matrix.mT).to(y.dtype)

    def log_det(self, x: torch.Tensor, *params: Any) -> torch.Tensor:
        if self.orthogonal:
            volume = (
                keeps_volume(self.called, "[N, ..., C]", 2) if self.axis == -1 else keeps_volume(self.called, FORM, 3)
            )
            return volume(x)
        matrix, _ = self._read(".log_det(x, params)", "x", x, *(params or (None,)), samples=True)
        if matrix.shape[0] != matrix.shape[1]:
            raise no_determinant(f"{self.called}.log_det(x, params)", matrix, matrix.shape[1])
        return for_each(x, x.movedim(self.axis, -1).shape[1:-1].numel() * log_abs_det(matrix))

    def _read(
        self, of: str, which: str, x: Any, params: Any, samples: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The matrix and the bias, once they fit x; `samples` asks for an axis of them."""
        call, name, last = f"{self.called}{of}", "A" if self.orthogonal else "W", self.axis == -1
        square = self.orthogonal or not last
        matrix, bias = matrix_and_bias(call, params, square=name if square else "")
        channels = "C" if square else "in" if which == "x" else "out"
        if last:
            need_axes(call, which, x, f"[{'N, ' * samples}..., {channels}]", 1 + samples)
        else:
            need_axes(call, which, x, FORM, 3, 5)
        need_size(call, which, x, self.axis, matrix.shape[which == "x"], f"as {name} has shape {shape(matrix)}")
        return rotation(matrix) if self.orthogonal else matrix, bias

    def _product(self, x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if self.axis == -1:
            return at_full_precision(F.linear, x, matrix, bias)
        return at_full_precision(CONVOLUTIONS[x.ndim], x, matrix.reshape(*matrix.shape, *[1] * (x.ndim - 2)), bias)


def patch_conv() -> Invertible:
    """A convolution whose stride is the size of its kernel: a linear layer on each of its patches.

        y = F.conv2d(x, W, b, stride=W.shape[2:])
        x[n, :, i:i+k, j:j+k] = lstsq(W.flatten(1), y[n, :, i/k, j/k] - b)

    Args: none.

    Returns:
        An `Invertible` `(x, params) -> y`: x `[N, in, *size]` with one to three spatial axes, y `[N, out, *(size /
        k)]`, and params is `(W, b)`, `(W, None)` or `W`, with W `[out, in, *k]`, out >= in * prod(k), and b `[out]`.
        The log-determinant `[N]`, for out == in * prod(k), is log|det W.flatten(1)| times the number of patches.

    Raises:
        ArgumentError: out < in * prod(k), which has no inverse; a size of x that the kernel does not divide; shapes
            that do not fit; log_det of out > in * prod(k).
        ArgumentTypeError: x or the parameters are not tensors.
        torch.linalg.LinAlgError: as in `linear`.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layer, W = layers.patch_conv(), torch.eye(4).reshape(4, 1, 2, 2)
        >>> y = layer(torch.arange(16.0).reshape(1, 1, 4, 4), W)
        >>> y[0, :, 0, 1]
        tensor([2., 3., 6., 7.])
        >>> layer.inverse(y, W)[0, 0, 0]
        tensor([0., 1., 2., 3.])

    Composes with: `invert` for out == in * prod(k); `chain`, and every transform of torch.func.

    Cost: forward that of the convolution. The inverse factorises `W.flatten(1)`, by LU if it is square and by QR if it
    is tall, and then is about as much as forward.

    Source: invtorch's Conv1d, Conv2d and Conv3d, where the stride is the size of the kernel.
    """

    return Invertible(_patch_conv_forward, _patch_conv_inverse, log_det=_patch_conv_log_det, name="patch_conv()")


def _patch_conv_read(call: str, params: Any) -> tuple[torch.Tensor, torch.Tensor | None, int]:
    weight, bias = weight_and_bias(call, params)
    need_axes(call, "W", weight, "[out, in, *k] with one to three axes k", 3, 5)
    numbers = weight.shape[1:].numel()
    if weight.shape[0] < numbers:
        raise no_way_back(call, weight, numbers)
    return weight, bias, numbers


def _check(call: str, x: Any, weight: torch.Tensor) -> None:
    kernel = shape(weight)[2:]
    need_axes(call, "x", x, f"[N, in, *size] with {len(kernel)} axes of size", weight.ndim, weight.ndim)
    need_size(call, "x", x, 1, weight.shape[1], f"as W has shape {shape(weight)}")
    if any(s % k for s, k in zip(shape(x)[2:], kernel, strict=True)):
        raise ArgumentError(
            f"{call}: x has size {shape(x)[2:]}, which the kernel {kernel} does not divide. Pad x, by layers.pad."
        )


def _patch_conv_forward(x: torch.Tensor, params: Any = None) -> torch.Tensor:
    call = "patch_conv()(x, params)"
    weight, bias, _ = _patch_conv_read(call, params)
    _check(call, x, weight)
    convolution = partial(CONVOLUTIONS[weight.ndim], stride=shape(weight)[2:])
    return at_full_precision(convolution, x, weight, bias)


def _patch_conv_inverse(y: torch.Tensor, params: Any = None) -> torch.Tensor:
    call = "patch_conv().inverse(y, params)"
    weight, bias, _ = _patch_conv_read(call, params)
    need_axes(call, "y", y, f"[N, out, *size] with {weight.ndim - 2} axes of size", weight.ndim, weight.ndim)
    need_size(call, "y", y, 1, weight.shape[0], f"as W has shape {shape(weight)}")
    return _joined(solved(y.movedim(1, -1), weight.flatten(1), bias), shape(weight)[1:])


def _patch_conv_log_det(x: torch.Tensor, params: Any = None) -> torch.Tensor:
    call = "patch_conv().log_det(x, params)"
    weight, _, numbers = _patch_conv_read(call, params)
    _check(call, x, weight)
    if weight.shape[0] != numbers:
        raise no_determinant(call, weight, numbers)
    patches = x.shape[2:].numel() // weight.shape[2:].numel()
    return for_each(x, patches * log_abs_det(weight.flatten(1)))


def _joined(patches: torch.Tensor, one: tuple[int, ...]) -> torch.Tensor:
    """Patches `[N, *counts, in * prod(k)]` as one `[N, in, *(counts * k)]`; `one` is `[in, *k]`."""
    n, *counts = patches.shape[:-1]
    d = len(counts)
    order = [0, d + 1]
    for i in range(d):
        order += [1 + i, d + 2 + i]
    size = [count * k for count, k in zip(counts, one[1:], strict=True)]
    return patches.reshape(n, *counts, *one).permute(order).reshape(n, one[0], *size)
