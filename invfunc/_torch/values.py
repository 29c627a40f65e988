"""What is asked about the numbers in tensors, where there may be none."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from invfunc._torch.functorch import FakeTensor, innermost


def differentiable(tensor: torch.Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def fake(x: torch.Tensor) -> bool:
    """Whether a tensor has no numbers (FakeTensorMode)."""
    return isinstance(innermost(x), FakeTensor)


_UNDECIDED: ContextVar[list[str] | None] = ContextVar("_UNDECIDED", default=None)


@contextmanager
def undecided() -> Iterator[list[str]]:
    """Gathers which choices between two ways are made without the numbers that they depend on."""
    found: list[str] = []
    token = _UNDECIDED.set(found)
    try:
        yield found
    finally:
        _UNDECIDED.reset(token)


def decides(x: torch.Tensor, what: str) -> None:
    """Say that what is done next depends on the numbers of a tensor."""
    if (found := _UNDECIDED.get()) is not None and fake(x):
        found.append(what)


def anywhere(x: torch.Tensor) -> bool:
    """Whether something holds anywhere; without numbers nothing does."""
    return not fake(x) and bool(innermost(x).any())


def near(a: torch.Tensor, b: torch.Tensor, size: torch.Tensor | int) -> bool:
    """Whether tensors are the same up to rounding, where numbers of this size are added up."""
    tolerance = torch.finfo(a.dtype).eps ** 0.75  # 2e-12 in float64, 6e-6 in float32
    same = (a - b).abs() <= 8 * tolerance * size
    return not anywhere(~(same | (a == b) | (a.isnan() & b.isnan())))
