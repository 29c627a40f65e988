"""A linear layer."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from invfunc.layers.common import at_full_precision, for_each, need_axes, need_size, shape
from invfunc.layers.weights import log_abs_det, matrix_and_bias, no_determinant, solved
from invfunc.pairs.pair import Invertible


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

    return Invertible(_forward, _inverse, log_det=_log_det, name="linear()")


def _forward(x: torch.Tensor, params: Any = None) -> torch.Tensor:
    call = "linear()(x, params)"
    weight, bias = matrix_and_bias(call, params)
    need_axes(call, "x", x, "[..., in]", 1)
    need_size(call, "x", x, -1, weight.shape[1], f"as W has shape {shape(weight)}")
    return at_full_precision(F.linear, x, weight, bias)


def _inverse(y: torch.Tensor, params: Any = None) -> torch.Tensor:
    call = "linear().inverse(y, params)"
    weight, bias = matrix_and_bias(call, params)
    need_axes(call, "y", y, "[..., out]", 1)
    need_size(call, "y", y, -1, weight.shape[0], f"as W has shape {shape(weight)}")
    return solved(y, weight, bias)


def _log_det(x: torch.Tensor, params: Any = None) -> torch.Tensor:
    call = "linear().log_det(x, params)"
    weight, _ = matrix_and_bias(call, params)
    need_axes(call, "x", x, "[N, ..., in]", 2)
    need_size(call, "x", x, -1, weight.shape[1], f"as W has shape {shape(weight)}")
    if weight.shape[0] != weight.shape[1]:
        raise no_determinant(call, weight, weight.shape[1])
    return for_each(x, x.shape[1:-1].numel() * log_abs_det(weight))
