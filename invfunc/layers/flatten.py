"""Several axes made one."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from invfunc.errors import ArgumentError
from invfunc.layers.common import keeps_volume, need_axes, need_tensor, shape
from invfunc.pairs.pair import Invertible, Law


def flatten(start_dim: int = 1, end_dim: int = -1) -> Invertible:
    """The axes from one to another as a single one: `y = x.flatten(start_dim, end_dim)`, `x = y.reshape(x.shape)`.

    Args:
        start_dim, end_dim: the first and the last of these axes, as in `torch.flatten`.

    Returns:
        An `Invertible` `x -> y`. `forward` returns `(y, shape)`, with the shape of x as a tuple of ints, and the
        inverse is `inverse(y, shape) -> x`. The log-determinant of x `[N, ...]` is zeros `[N]`.

    Raises:
        ArgumentError: x does not have these axes; y does not fit the shape; log_det where the leading axis is
            flattened.
        ArgumentTypeError: x is not a tensor.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> y, shape = layers.flatten().forward(torch.ones(2, 3, 4))
        >>> y.shape, shape, layers.flatten().inverse(y, shape).shape
        (torch.Size([2, 12]), (2, 3, 4), torch.Size([2, 3, 4]))

    Composes with: `chain`, and every transform of torch.func. `invert` cannot know the shape; `unflatten` and its
    inverse do.

    Cost: none; y is a view of x where torch can make one.

    Source: invtorch's Flatten.
    """
    options = [str(start_dim)] * (start_dim != 1 or end_dim != -1) + [str(end_dim)] * (end_dim != -1)
    called = f"flatten({', '.join(options)})"

    return _Flatten(called, start_dim, end_dim).pair(called, hidden=True)


@dataclass(frozen=True, eq=False)
class _Flatten(Law):
    called: str
    start: int
    end: int

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]]:
        return x.flatten(*self._axes(f"{self.called}(x)", x)), shape(x)

    def inverse(self, y: torch.Tensor, sizes: tuple[int, ...]) -> torch.Tensor:
        call = f"{self.called}.inverse(y, shape)"
        need_tensor(call, "y", y)
        if y.numel() != torch.Size(sizes).numel():
            raise ArgumentError(f"{call}: y has shape {shape(y)}, which does not have the numbers of shape {sizes}.")
        return y.reshape(sizes)

    def log_det(self, x: torch.Tensor) -> torch.Tensor:
        call = f"{self.called}.log_det(x)"
        need_axes(call, "x", x, "[N, ...]", 1)
        first, last = self._axes(call, x)
        if first == 0 < last:
            raise ArgumentError(f"{call}: the leading axis is flattened too, and the samples with it. Start at 1.")
        return keeps_volume(self.called)(x)

    def _axes(self, call: str, x: torch.Tensor) -> tuple[int, int]:
        """The first and the last, from the front."""
        need_tensor(call, "x", x)
        n = max(x.ndim, 1)
        first, last = (d + n if d < 0 else d for d in (self.start, self.end))
        if not 0 <= first <= last < n:
            raise ArgumentError(
                f"{call}: x has shape {shape(x)}, which has no axes from {self.start} to {self.end}. "
                "Give start_dim and end_dim in this order and among those of x."
            )
        return first, last
