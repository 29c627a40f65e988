"""By how much two ways to a number may differ: a model of rounding errors, and a measurement where it is too small.

The model: so many units in the last place of the largest number of a leaf, times the root of how many are added up. It
knows nothing of what cancels within f (the second derivative of `log(cosh(z))` at a large z). So numbers that are
further apart are looked at again: computed anew with parameters that are moved by a unit in the last place, and with
all in float64. By as much as these differ from one another, times a factor, the result may, too. Of float64 there is
nothing more precise to look with (the slope of a softmax that is sure cancels the same way each time): half of its
digits are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

UNITS = 256
"""Units in the last place, for one term; half precision has few of them, and double the root of one instead."""

APART = 8
"""How many times further from the reference a result may be than evaluations of it are from each other."""

AGAIN = 6
"""Evaluations at moved parameters."""

FLOOR = 1e-2
"""A leaf that is small beside the others (zero by structure, with what cancels in it) counts as this part of them."""

Tensors = list[torch.Tensor]


def scales(expected: Sequence[torch.Tensor], sizes: Sequence[float]) -> list[float]:
    """The size of the numbers of each list of some that are of one kind."""
    each = [max(_largest(x), size) for x, size in zip(expected, sizes, strict=True)]
    return [max(size, FLOOR * max(each)) for size in each]


def units(dtype: torch.dtype, terms: int) -> float:
    """The relative error of a sum of so many terms, by the model."""
    eps = torch.finfo(dtype).eps
    one = eps**0.5 if dtype == torch.float64 else min(UNITS * eps, 2 * eps**0.5)
    return one * terms**0.5


def spread(expected: Sequence[torch.Tensor], others: Sequence[Sequence[torch.Tensor]], sizes: Sequence[float]) -> float:
    """By how much other evaluations differ, beside the size of the numbers; infinite where one is none."""
    found = 0.0
    for i, (x, size) in enumerate(zip(expected, sizes, strict=True)):
        for other in others:
            apart = (other[i] - x).abs()
            if not bool(apart.isfinite().all()):
                return float("inf")
            found = max(found, float(apart.max()) / size if size else 0.0) if apart.numel() else found
    return found


def beyond(found: torch.Tensor, expected: torch.Tensor, tolerance: float, dtype: torch.dtype) -> torch.Tensor:
    """Which numbers are further apart. What a dtype cannot hold is infinite or lost in it, and not compared."""
    info = torch.finfo(dtype)
    largest, least = info.max / UNITS, UNITS * info.tiny
    same = ~expected.isfinite() | ((expected.abs() > largest) & ~found.isfinite())
    return ~same & ~((found - expected).abs() <= tolerance + least)


def moved(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers that are moved by up to a unit in the last place."""
    noise = torch.rand(x.shape, generator=generator).to(x.device) * 2 - 1
    return (x.double() * (1 + torch.finfo(x.dtype).eps * noise.double())).to(x.dtype)


def _largest(x: torch.Tensor) -> float:
    return float(x.abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0
