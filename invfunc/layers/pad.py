"""A margin of constants."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
import torch.nn.functional as F

from invfunc.errors import ArgumentError
from invfunc.layers.common import need_axes, need_integers, shape
from invfunc.pairs.pair import Invertible


def pad(padding: Sequence[int], value: float = 0.0) -> Invertible:
    """A margin of constants: `y = F.pad(x, list(padding), value=value)`; the inverse crops it.

    Args:
        padding: how many to add in front of and behind the last axis, then of the one before it, and so on, as in
            `F.pad`.
        value: the constant.

    Returns:
        An `Invertible` `x -> y`. It has no log-determinant: y has more numbers than x.

    Raises:
        ArgumentError: `padding` has an odd number of entries or one that is not an integer of at least 0; x has fewer
            axes than are padded; y is smaller than its margins.
        ArgumentTypeError: x is not a tensor, or `padding` is not a tuple.

    Example:
        >>> import torch
        >>> from invfunc import layers
        >>> layers.pad((1, 0))(torch.ones(2)), layers.pad((1, 0)).inverse(torch.arange(3.0))
        (tensor([0., 1., 1.]), tensor([1., 2.]))

    Composes with: `chain`, and every transform of torch.func. `invert` gives a crop, which is the inverse of pad only
    on what has these margins.

    Cost: a copy forward; the inverse is a view.

    Source: invtorch's ConstantPad1d, ConstantPad2d, ConstantPad3d and ZeroPad2d.
    """
    called = f"pad({padding!r}{'' if value == 0 else f', value={value!r}'})"
    need_integers(called, "padding", padding, 0)
    if len(padding) % 2:
        raise ArgumentError(f"{called}: padding has {len(padding)} entries, but has to have two for each axis.")
    return Invertible(partial(_padded, called, padding, value), partial(_cropped, called, padding), name=called)


def _padded(called: str, padding: Sequence[int], value: float, x: torch.Tensor) -> torch.Tensor:
    axes = len(padding) // 2
    need_axes(f"{called}(x)", "x", x, f"of at least {axes} axes", axes)
    return F.pad(x, list(padding), value=value)


def _cropped(called: str, padding: Sequence[int], y: torch.Tensor) -> torch.Tensor:
    call, axes = f"{called}.inverse(y)", len(padding) // 2
    need_axes(call, "y", y, f"of at least {axes} axes", axes)
    x = y
    for axis, before, behind in zip(range(-1, -axes - 1, -1), padding[::2], padding[1::2], strict=True):
        size = y.shape[axis] - before - behind
        if size < 0:
            raise ArgumentError(f"{call}: y has shape {shape(y)}, which is smaller along axis {axis} than its margins.")
        x = x.narrow(axis, before, size)
    return x
