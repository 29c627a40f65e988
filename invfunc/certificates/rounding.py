"""By how much two ways to a number may differ: a model of rounding errors, and a measurement where it is too small.

The model: so many units in the last place of the largest number of a leaf, or of what is added up in it. It knows
nothing of what cancels within f (the second derivative of `log(cosh(z))` at a large z). So numbers that are further
apart are looked at again, at arguments that are moved by a little: a fault is there as well, and about as large, while
rounding errors come out as other ones. And the other way is taken in float64, which shows its own
error. Of float64 there is nothing more precise to look with (the slope of a softmax that is sure cancels the same way
each time): half of its digits are asked for.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

UNITS = {torch.float64: 2**26, torch.float32: 2**5, torch.float16: 2**2, torch.bfloat16: 2**2}
"""Units in the last place: of half precision, which has few of them, less."""

APART = {torch.float64: 8, torch.float32: 8, torch.float16: 8, torch.bfloat16: 12}
"""How many times further from the reference a result may be than its distance changes by rounding: of bfloat16, where
what is left of a sum that cancels takes few values, more."""

AGAIN = 6
"""Evaluations at moved arguments."""

STEP = 1e-4
"""By how much these are moved, of their size."""

CODES = 8
"""The largest integer that may be a code: larger ones are many of the numbers of half precision."""

LOST = 2.0**-48
"""What is lost beside the largest number even in float64, which nothing can be measured by."""

Tensors = list[torch.Tensor]
Numbers = tuple[torch.Tensor, float]
"""Numbers of the other path, and the size of what is added up in them, where that may cancel."""


def unit(dtype: torch.dtype) -> float:
    """The relative error of a number, by the model."""
    return torch.finfo(dtype).eps * UNITS[dtype]


def tolerance(numbers: Numbers, whole: float, dtype: torch.dtype) -> float:
    """By how much others may be apart from these, by the model; `whole` is the largest number of all leaves."""
    x, size = numbers
    return max(unit(dtype) * max(largest(x), size), LOST * whole)


def noise(found: torch.Tensor, expected: torch.Tensor, moved: Sequence[Tensors], wide: Tensors) -> torch.Tensor:
    """By how much the distance of both changes at moved arguments, and what is expected in float64, for each number.

    At least by as much as for half of the numbers; infinite where it is a number only in some of these.
    """
    changes = [(there - other) - (found - expected) for there, other in moved] + [x - expected for x in wide]
    if not changes:
        return torch.zeros_like(expected)
    size = torch.stack([x.abs().nan_to_num(0, 0, 0) for x in changes]).amax(0)
    size = size.clamp(min=size.median())
    for first, others in ((found, [there for there, _ in moved]), (expected, [*(x for _, x in moved), *wide])):
        for other in others:
            size[first.isfinite() != other.isfinite()] = float("inf")
    return size


def beyond(
    found: torch.Tensor, expected: torch.Tensor, tolerance: float | torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Which numbers are further apart. Two that are not finite are the same, and so is what a dtype cannot hold."""
    info = torch.finfo(dtype)
    lost = ~found.isfinite() & (~expected.isfinite() | (expected.abs() > unit(dtype) * info.max))
    return ~lost & ((found - expected).abs().nan_to_num(float("inf")) > tolerance + info.tiny)


def moved(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Numbers that are moved by a little, and by a unit in the last place at least, so that others are rounded.

    Small integers stay: they are codes (one-hot, binary features), of which a rule may be wrong there alone.
    """
    noise = torch.rand(x.shape, generator=generator).to(x.device) * 2 - 1
    found = (x.double() * (1 + max(STEP, torch.finfo(x.dtype).eps) * noise.double())).to(x.dtype)
    return torch.where((x == x.round()) & (x.abs() <= CODES), x, found)


def largest(x: torch.Tensor) -> float:
    """The size of the largest number that is finite."""
    return float(x.abs().nan_to_num(0, 0, 0).max()) if x.numel() else 0.0
