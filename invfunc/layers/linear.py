"""Layers that multiply by a matrix: linear, by a rotation, and as convolutions of pixels and of patches."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from invfunc.errors import ArgumentError
from invfunc.layers.common import (
    at_full_precision,
    for_each,
    keeps_volume,
    log_abs_det,
    matrix_and_bias,
    need_axes,
    need_size,
    no_determinant,
    no_way_back,
    rotation,
    shape,
    solved,
    weight_and_bias,
)
from invfunc.pairs.couplings import wide
from invfunc.pairs.pair import Invertible, PairLaw


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

    return Invertible(_linear_forward, _linear_inverse, log_det=_linear_log_det, name="linear()")


def _linear_forward(x: torch.Tensor, params: Any = None) -> torch.Tensor:
    call = "linear()(x, params)"
    weight, bias = matrix_and_bias(call, params)
    need_axes(call, "x", x, "[..., in]", 1)
    need_size(call, "x", x, -1, weight.shape[1], f"as W has shape {shape(weight)}")
    return at_full_precision(F.linear, x, weight, bias)


def _linear_inverse(y: torch.Tensor, params: Any = None) -> torch.Tensor:
    call = "linear().inverse(y, params)"
    weight, bias = matrix_and_bias(call, params)
    need_axes(call, "y", y, "[..., out]", 1)
    need_size(call, "y", y, -1, weight.shape[0], f"as W has shape {shape(weight)}")
    return solved(y, weight, bias)


def _linear_log_det(x: torch.Tensor, params: Any = None) -> torch.Tensor:
    call = "linear().log_det(x, params)"
    weight, _ = matrix_and_bias(call, params)
    need_axes(call, "x", x, "[N, ..., in]", 2)
    need_size(call, "x", x, -1, weight.shape[1], f"as W has shape {shape(weight)}")
    if weight.shape[0] != weight.shape[1]:
        raise no_determinant(call, weight, weight.shape[1])
    return for_each(x, x.shape[1:-1].numel() * log_abs_det(weight))


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
        _orthogonal_linear_forward,
        _orthogonal_linear_inverse,
        log_det=keeps_volume("orthogonal_linear()", "[N, ..., C]", 2),
        name="orthogonal_linear()",
    )


def _orthogonal_linear_read(call: str, name: str, x: Any, params: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
    a, bias = matrix_and_bias(call, params, square="A")
    need_axes(call, name, x, "[..., C]", 1)
    need_size(call, name, x, -1, a.shape[0], f"as A has shape {shape(a)}")
    return rotation(a), None if bias is None else wide(bias)


def _orthogonal_linear_forward(x: torch.Tensor, params: Any = None) -> torch.Tensor:
    q, bias = _orthogonal_linear_read("orthogonal_linear()(x, params)", "x", x, params)
    return at_full_precision(F.linear, x, q, bias)


def _orthogonal_linear_inverse(y: torch.Tensor, params: Any = None) -> torch.Tensor:
    q, bias = _orthogonal_linear_read("orthogonal_linear().inverse(y, params)", "y", y, params)
    return at_full_precision(F.linear, wide(y) if bias is None else wide(y) - bias, q.mT).to(y.dtype)


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
    called, name = ("conv1x1(orthogonal=True)", "A") if orthogonal else ("conv1x1()", "W")
    return _Conv(called, name, orthogonal).pair(called)


@dataclass(frozen=True, eq=False)
class _Conv(PairLaw):
    called: str
    name: str
    """The name of the parameter."""
    orthogonal: bool

    def forward(self, x: torch.Tensor, params: Any = None) -> torch.Tensor:
        weight, bias = self._read(f"{self.called}(x, params)", "x", x, params)
        return _convolved(x, rotation(weight) if self.orthogonal else weight, bias)

    def inverse(self, y: torch.Tensor, params: Any = None) -> torch.Tensor:
        weight, bias = self._read(f"{self.called}.inverse(y, params)", "y", y, params)
        if not self.orthogonal:
            return solved(y.movedim(1, -1), weight, bias).movedim(-1, 1).contiguous()
        z = wide(y) if bias is None else wide(y) - wide(bias).reshape(-1, *[1] * (y.ndim - 2))
        return _convolved(z, rotation(weight).mT).to(y.dtype)

    def log_det(self, x: torch.Tensor, *params: Any) -> torch.Tensor:
        if self.orthogonal:
            return keeps_volume(self.called, FORM, 3)(x)
        weight, _ = self._read(f"{self.called}.log_det(x, params)", "x", x, *(params or (None,)))
        return for_each(x, x.shape[2:].numel() * log_abs_det(weight))

    def _read(self, call: str, which: str, x: Any, params: Any) -> tuple[torch.Tensor, torch.Tensor | None]:
        weight, bias = matrix_and_bias(call, params, square=self.name)
        need_axes(call, which, x, FORM, 3, 5)
        need_size(call, which, x, 1, weight.shape[0], f"as {self.name} has shape {shape(weight)}")
        return weight, bias


def _convolved(x: torch.Tensor, matrix: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    weight = matrix.reshape(*matrix.shape, *[1] * (x.ndim - 2))
    return at_full_precision(CONVOLUTIONS[x.ndim], x, weight, bias)


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
