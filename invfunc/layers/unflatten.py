"""One axis made several."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from invfunc.errors import ArgumentError
from invfunc.layers.common import keeps_volume, need_axes, need_integers, need_tensor, shape
from invfunc.pairs.pair import Invertible, Law


def unflatten(dim: int, sizes: Sequence[int]) -> Invertible:
    """One axis as several: `y = x.unflatten(dim, sizes)`, `x = y.flatten(dim, dim + len(sizes) - 1)`.

    Args:
        dim: the axis of x; a negative one counts from the end of x.
        sizes: those of the axes that take its place; one of them may be -1.

    Returns:
        An `Invertible` `x -> y`. The log-determinant of x `[N, ...]` is zeros `[N]`.

    Raises:
        ArgumentError: `sizes` is empty, has two -1 or other numbers below 0; x or y does not have these axes; log_det
            where the leading axis is split.
        ArgumentTypeError: x is not a tensor, or `sizes` is not a tuple.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layer = layers.unflatten(1, (3, -1))
        >>> layer(torch.ones(2, 12)).shape, layer.inverse(torch.ones(2, 3, 4)).shape
        (torch.Size([2, 3, 4]), torch.Size([2, 12]))

    Composes with: `invert`, which is a flatten that hides nothing; `chain`, and every transform of torch.func.

    Cost: none; y is a view of x where torch can make one.

    Source: `torch.nn.Unflatten`.
    """
    called = f"unflatten({dim}, {sizes!r})"
    need_integers(called, "sizes", sizes, -1)
    if not sizes or sizes.count(-1) > 1:
        raise ArgumentError(f"{called}: sizes has to have at least one entry, and at most one -1.")
    known = math.prod(s for s in sizes if s != -1)
    return _Unflatten(called, dim, tuple(sizes), known).pair(called)


@dataclass(frozen=True, eq=False)
class _Unflatten(Law):
    called: str
    dim: int
    sizes: tuple[int, ...]
    known: int
    """The product of the sizes that are given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dim, sizes = self.dim, self.sizes
        need_tensor(f"{self.called}(x)", "x", x)
        if not -x.ndim <= dim < x.ndim or not self._fits(x.shape[dim]):
            raise ArgumentError(
                f"{self.called}(x): x has shape {shape(x)}, which has no axis {dim} to split as {sizes}."
            )
        return x.unflatten(dim, sizes)

    def inverse(self, y: torch.Tensor) -> torch.Tensor:
        dim, sizes, call = self.dim, self.sizes, f"{self.called}.inverse(y)"
        last = dim + len(sizes) - 1 if dim >= 0 else dim
        first = last - len(sizes) + 1
        need_tensor(call, "y", y)
        own = [y.shape[d] for d in range(first, last + 1) if -y.ndim <= d < y.ndim]
        if len(own) < len(sizes) or any(s not in (-1, o) for s, o in zip(sizes, own, strict=True)):
            raise ArgumentError(f"{call}: y has shape {shape(y)}, whose axes {first} to {last} are not {sizes}.")
        return y.flatten(first, last)

    def log_det(self, x: torch.Tensor) -> torch.Tensor:
        need_axes(f"{self.called}.log_det(x)", "x", x, "[N, ...]", 1)
        if self.dim in (0, -x.ndim) and len(self.sizes) > 1:
            raise ArgumentError(f"{self.called}.log_det(x): the leading axis is split, and the samples with it.")
        return keeps_volume(self.called)(x)

    def _fits(self, size: int) -> bool:
        return size == self.known if -1 not in self.sizes else self.known > 0 and size % self.known == 0
