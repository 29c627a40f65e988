"""What is asked about the numbers in tensors, where there may be none."""

from __future__ import annotations

import torch

from invfunc._functorch import FakeTensor, innermost


def fake(x: torch.Tensor) -> bool:
    """Whether a tensor has no numbers (FakeTensorMode)."""
    return isinstance(innermost(x), FakeTensor)


def anywhere(x: torch.Tensor) -> bool:
    """Whether something holds anywhere; without numbers nothing does."""
    return not fake(x) and bool(innermost(x).any())
