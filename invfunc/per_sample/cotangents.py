"""What a pullback brings to the parameter uses of a run, and which of its samples are wanted."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field

import torch

from invfunc.core.lots import Lot
from invfunc.operations.factors import Part
from invfunc.plan import even

Cotangents = list[torch.Tensor | None]
"""The cotangents `[V, n, *one]` at the output of each site of a run, None where nothing arrives."""


@dataclass
class Columns:
    """What was pulled back: `left`, `right` for a product of two, and `weight[v, n]`, which multiplies squares, or
    `weight[v, n, s]` those of each cell s."""

    left: Cotangents
    right: Cotangents | None = None
    weight: torch.Tensor | None = None
    lots: list[Lot] = field(default_factory=list)
    """Those that are drawn."""
    of_hessian: bool = False
    """Whether they stand for all columns of a position: the sum of the products of these is `left^2` on its diagonal,
    and `-right right^T` beside it, or nothing."""
    known: dict[Hashable, torch.Tensor] = field(default_factory=dict)
    """What was computed from them for one parameter and is needed for another, too."""


@dataclass
class Samples:
    """All n samples of a run, or those of them that were chosen."""

    n: int
    chosen: torch.Tensor | None = None
    count: int = field(init=False)

    def __post_init__(self) -> None:
        self.count = self.n if self.chosen is None else len(self.chosen)

    @property
    def all(self) -> Part:
        return slice(0, self.n) if self.chosen is None else self.chosen

    def parts(self, size: int, budget: int, start: int = 0, stop: int | None = None) -> list[Part]:
        """Blocks of samples of which each makes about `budget` numbers, `size` a sample; of all, or of a range."""
        ranges = even((self.count if stop is None else stop) - start, max(1, budget // max(1, size)))
        ranges = [(start + a, start + b) for a, b in ranges]
        return [slice(a, b) if self.chosen is None else self.chosen[a:b] for a, b in ranges]


def length(part: Part) -> int:
    return part.stop - part.start if isinstance(part, slice) else len(part)
