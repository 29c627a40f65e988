"""How large the tensors of functions are, as runs on a few samples have shown: the next call need not look again."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass

import torch

from invfunc import thresholds
from invfunc._torch.weak import WeakIdMap
from invfunc.recording.problem import Problem


@dataclass(frozen=True)
class Sizes:
    """Numbers for one sample."""

    columns: int
    """Entries of the outputs."""
    largest: int
    """Entries of the largest output of an operation that reads parameters."""

    def block(self, budget: int) -> int:
        """How many samples to run at once, so that some columns at the largest output fit the budget."""
        width = max(1, min(self.columns, thresholds.BLOCK_WIDTH))
        return max(thresholds.BLOCK_SAMPLES, budget // (width * self.largest))


_Shapes = list[tuple[torch.Size, torch.dtype]]
_SEEN: WeakIdMap[tuple[_Shapes, Sizes]] = WeakIdMap()
"""Of the last call of each function that is alive: the shapes of its arguments, and what was seen."""


def seen(problem: Problem) -> Sizes | None:
    """What the last call of a function has shown, if that was of arguments like these."""
    shapes, sizes = _SEEN.get(problem.f) or ([], None)
    return sizes if shapes == _shapes(problem) else None


def see(problem: Problem, sizes: Sizes) -> None:
    with suppress(TypeError):  # a function of a kind that has no weak references
        _SEEN.set(problem.f, (_shapes(problem), sizes))


def _shapes(problem: Problem) -> _Shapes:
    return [(x.shape, x.dtype) for x in problem.tensors()]
