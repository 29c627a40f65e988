"""One axis made several."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch

from invfunc.errors import ArgumentError
from invfunc.invertible.pair import Invertible
from invfunc.layers.common import keeps_volume, need_axes, need_integers, need_tensor, shape


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
        ArgumentTypeError: x is no tensor, or `sizes` no tuple.

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
    last = dim + len(sizes) - 1 if dim >= 0 else dim
    first = last - len(sizes) + 1

    known = math.prod(s for s in sizes if s != -1)

    def fits(size: int) -> bool:
        return size == known if -1 not in sizes else known > 0 and size % known == 0

    def forward(x: torch.Tensor) -> torch.Tensor:
        need_tensor(f"{called}(x)", "x", x)
        if not -x.ndim <= dim < x.ndim or not fits(x.shape[dim]):
            raise ArgumentError(f"{called}(x): x has shape {shape(x)}, which has no axis {dim} to split as {sizes}.")
        return x.unflatten(dim, sizes)

    def inverse(y: torch.Tensor) -> torch.Tensor:
        call = f"{called}.inverse(y)"
        need_tensor(call, "y", y)
        own = [y.shape[d] for d in range(first, last + 1) if -y.ndim <= d < y.ndim]
        if len(own) < len(sizes) or any(s not in (-1, o) for s, o in zip(sizes, own, strict=True)):
            raise ArgumentError(f"{call}: y has shape {shape(y)}, whose axes {first} to {last} are not {sizes}.")
        return y.flatten(first, last)

    zeros = keeps_volume(called)

    def log_det(x: torch.Tensor) -> torch.Tensor:
        need_axes(f"{called}.log_det(x)", "x", x, "[N, ...]", 1)
        if dim in (0, -x.ndim) and len(sizes) > 1:
            raise ArgumentError(f"{called}.log_det(x): the leading axis is split, and the samples with it.")
        return zeros(x)

    return Invertible(forward, inverse, log_det=log_det, name=called)
