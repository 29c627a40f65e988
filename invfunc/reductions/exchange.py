"""Exchanges between processes, so that each has the state of all."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any

import torch

from invfunc import tree


@dataclass(frozen=True)
class Sums:
    """Asks for the sums of tensors over all processes, each of which gives tensors of these shapes."""

    tensors: list[torch.Tensor]


@dataclass(frozen=True)
class ExchangedRows:
    """Asks for the tensors of all processes, one behind the other along an axis."""

    tensors: list[torch.Tensor]
    axis: int


Exchange = Generator[Sums | ExchangedRows, list[torch.Tensor], tuple[Any, ...]]
"""Asks for tensors, again and again, and returns what all processes keep."""


def filled(whole: Any, own: Any) -> Any:
    """A state without numbers, with those of this process's own one where it has them, and zeros elsewhere."""
    mine = {path: x for path, x in tree.named_leaves(own) if isinstance(x, torch.Tensor)}
    like = next(iter(mine.values()))

    def found(path: str, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return mine[path].to(x.dtype) if path in mine else like.new_zeros(x.shape, dtype=x.dtype)

    return tree.unflatten([found(path, x) for path, x in tree.named_leaves(whole)], tree.flatten(whole)[1])


def triangle(x: torch.Tensor) -> torch.Tensor:
    """The numbers of a symmetric matrix, or of several, each once; others stand for diagonal matrices."""
    return x[..., *_lower(x)] if _square(x) else x


def of_triangle(numbers: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The symmetric matrix with these numbers, of a shape as another one."""
    if not _square(like):
        return numbers
    found = numbers.new_zeros(like.shape)
    found[..., *_lower(found)] = numbers
    return found + found.tril(-1).mT


def _square(x: torch.Tensor) -> bool:
    return x.ndim > 1 and x.shape[-1] == x.shape[-2]


def _lower(x: torch.Tensor) -> torch.Tensor:
    return torch.tril_indices(*x.shape[-2:], device=x.device)
