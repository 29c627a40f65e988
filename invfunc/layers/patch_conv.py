"""A convolution over patches that do not overlap."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from invfunc.errors import ArgumentError
from invfunc.layers.common import at_full_precision, for_each, need_axes, need_size, shape
from invfunc.layers.weights import log_abs_det, no_determinant, no_way_back, solved, weight_and_bias
from invfunc.pairs.pair import Invertible

CONVOLUTIONS = {3: F.conv1d, 4: F.conv2d, 5: F.conv3d}


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

    return Invertible(_forward, _inverse, log_det=_log_det, name="patch_conv()")


def _read(call: str, params: Any) -> tuple[torch.Tensor, torch.Tensor | None, int]:
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


def _forward(x: torch.Tensor, params: Any = None) -> torch.Tensor:
    call = "patch_conv()(x, params)"
    weight, bias, _ = _read(call, params)
    _check(call, x, weight)
    convolution = partial(CONVOLUTIONS[weight.ndim], stride=shape(weight)[2:])
    return at_full_precision(convolution, x, weight, bias)


def _inverse(y: torch.Tensor, params: Any = None) -> torch.Tensor:
    call = "patch_conv().inverse(y, params)"
    weight, bias, _ = _read(call, params)
    need_axes(call, "y", y, f"[N, out, *size] with {weight.ndim - 2} axes of size", weight.ndim, weight.ndim)
    need_size(call, "y", y, 1, weight.shape[0], f"as W has shape {shape(weight)}")
    return _joined(solved(y.movedim(1, -1), weight.flatten(1), bias), shape(weight)[1:])


def _log_det(x: torch.Tensor, params: Any = None) -> torch.Tensor:
    call = "patch_conv().log_det(x, params)"
    weight, _, numbers = _read(call, params)
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
