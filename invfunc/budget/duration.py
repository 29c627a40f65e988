"""About how long an operation takes on a CPU: what it starts, reads, writes and multiplies."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from invfunc._torch.functorch import storage
from invfunc.budget.scratch import CONVOLUTIONS, PRODUCTS, Convolution, is_view

CALL, BYTE, FRESH, MULTIPLIED = 15e3, 0.02, 0.6, 0.012
"""Nanoseconds of an operation, of a byte that is read or written, of one of a new tensor (its page is new), and of a
multiplication: as fitted to calls that were measured, whose times they tell to a fifth."""


def duration(func: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], args: Any) -> float:
    """The nanoseconds that an operation takes on one thread, as far as its sizes tell."""
    if is_view(func) or not made:
        return CALL / 4
    known = {id(storage(x)) for x in given}
    fresh = sum(x.numel() * x.element_size() for x in made if id(storage(x)) not in known)
    touched = sum(x.numel() * x.element_size() for x in (*given, *made))
    return CALL + BYTE * touched + FRESH * fresh + MULTIPLIED * multiplications(func, given, made, args)


def multiplications(func: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], args: Any) -> int:
    """The products of numbers in products of matrices, convolutions and attention; of others, nothing beside what they
    read and write."""
    name = func.overloadpacket.__name__
    if name in PRODUCTS:  # [b, m, k] and [b, k, n] to [b, m, n], or what has fewer axes
        sizes = math.prod(x.numel() for x in [*given[-2:], made[0]])
        return math.isqrt(sizes // (max(1, made[0].shape[0]) if made[0].ndim == 3 else 1))
    if name in CONVOLUTIONS:
        return Convolution.of(name, made, args).multiplications
    if name.startswith("_scaled_dot_product") and "attention" in name:
        tensors = [x for x in given if x.ndim == 4]
        return 2 * tensors[0].numel() * tensors[1].shape[-2] * (5 if name.endswith("backward") else 2) // 2
    return 0
