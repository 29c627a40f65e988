"""A linear layer that is a rotation."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from invfunc.layers.common import at_full_precision, keeps_volume, need_axes, need_size, shape
from invfunc.layers.weights import matrix_and_bias, rotation
from invfunc.pairs.couplings import wide
from invfunc.pairs.pair import Invertible


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

    return Invertible(
        _forward, _inverse, log_det=keeps_volume("orthogonal_linear()", "[N, ..., C]", 2), name="orthogonal_linear()"
    )


def _read(call: str, name: str, x: Any, params: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    a, bias = matrix_and_bias(call, params, square="A")
    need_axes(call, name, x, "[..., C]", 1)
    need_size(call, name, x, -1, a.shape[0], f"as A has shape {shape(a)}")
    return rotation(a), None if bias is None else wide(bias)


def _forward(x: torch.Tensor, params: Any = None) -> torch.Tensor:
    q, bias = _read("orthogonal_linear()(x, params)", "x", x, params)
    return at_full_precision(F.linear, x, q, bias)


def _inverse(y: torch.Tensor, params: Any = None) -> torch.Tensor:
    q, bias = _read("orthogonal_linear().inverse(y, params)", "y", y, params)
    return at_full_precision(F.linear, wide(y) if bias is None else wide(y) - bias, q.mT).to(y.dtype)
