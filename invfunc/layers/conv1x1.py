"""A 1x1 convolution."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from invfunc.layers.common import at_full_precision, for_each, keeps_volume, need_axes, need_size, shape
from invfunc.layers.weights import log_abs_det, matrix_and_bias, rotation, solved
from invfunc.pairs.couplings import wide
from invfunc.pairs.pair import Invertible, Law

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
class _Conv(Law):
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
