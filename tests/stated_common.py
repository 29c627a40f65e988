"""How the programs that use what the library states of torch's functions are written."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from invfunc.operations.operation import OPERATIONS, Operation
from tests.forms import Form
from tests.moves import moved


def of(output: str, programs: dict[str, Callable]) -> list[Form]:
    """What is done to `[n, a, b]`, by its name."""
    return [moved(called, move, output) for called, move in programs.items()]


def rows(z: torch.Tensor) -> torch.Tensor:
    """`[n, b]`"""
    return z[:, 0]


def constants(z: torch.Tensor, *shape: int) -> torch.Tensor:
    count = torch.Size(shape).numel()
    return torch.linspace(-1, 1, count, dtype=z.dtype, device=z.device).view(shape)


def having(fact: str) -> frozenset[str]:
    """The names of the operations whose entries state a fact."""
    plain = getattr(Operation(), fact)
    return frozenset(name for name, entry in OPERATIONS.items() if getattr(entry, fact) != plain)


def of_torch(name: str) -> bool:
    """Whether functions or methods of torch that one calls are named so; others are operations of aten alone."""
    homes = (torch, torch.Tensor, F, torch.linalg, torch.fft)
    if name.startswith("_") or name.endswith("_"):
        return False
    spelled = (
        name,
        f"__{name}__",
        name.removeprefix("linalg_"),
        name.removeprefix("fft_"),
        name.removeprefix("special_"),
    )
    return ":" in name or any(hasattr(home, each) for home in homes for each in spelled)
