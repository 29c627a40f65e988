"""What is asked about the numbers in tensors, where there may be none."""

from __future__ import annotations

import torch

from invfunc._functorch import FakeTensor, innermost


def differentiable(tensor: torch.Tensor) -> bool:
    """Whether a tensor can have a gradient."""
    return tensor.is_floating_point() or tensor.is_complex()


def fake(x: torch.Tensor) -> bool:
    """Whether a tensor has no numbers (FakeTensorMode)."""
    return isinstance(innermost(x), FakeTensor)


def anywhere(x: torch.Tensor) -> bool:
    """Whether something holds anywhere; without numbers nothing does."""
    return not fake(x) and bool(innermost(x).any())


def near(a: torch.Tensor, b: torch.Tensor, size: torch.Tensor | int) -> bool:
    """Whether tensors are the same up to rounding, where numbers of this size are added up."""
    tolerance = torch.finfo(a.dtype).eps ** 0.75  # 2e-12 in float64, 6e-6 in float32
    same = (a - b).abs() <= 8 * tolerance * size
    return not anywhere(~(same | (a == b) | (a.isnan() & b.isnan())))
