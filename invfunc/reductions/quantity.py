"""What is asked of a function: a reduction of some columns, and what is known of it so far."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from invfunc.reductions import Reduction, State

Of = Literal["gradient", "ggn", "hessian", "chain", "jacobian", "gradient_or_jacobian"]
"""What a statistic is made of."""


@dataclass(frozen=True)
class Drawing:
    """Columns that are drawn at random; `sample(outputs, generator)` draws targets for a loss of the user's."""

    count: int
    generator: torch.Generator
    sample: Callable | None = None


@dataclass(frozen=True)
class Quantity:
    """One result: what is reduced, and of which columns."""

    reduction: Reduction
    of: Of
    drawing: Drawing | None = None

    @property
    def columns(self) -> Hashable:
        """A key that quantities share if they reduce the same columns."""
        return self.of, self.drawing, self.reduction.rooted if self.drawing is None else None


@dataclass
class Accumulator:
    """What a reduction has kept so far."""

    quantity: Quantity
    reduction: Reduction
    states: dict[int, State] = field(default_factory=dict)
    results: dict[int, list[Any]] = field(default_factory=dict)
    """The results of the parameters that are done."""
    joint: list[torch.Tensor] = field(default_factory=list)
    columns: int = 1
    added: set[int] = field(default_factory=set)
    """The parameters of which the state of the last block of samples was added."""

    def begin(self) -> None:
        """Begin another block of samples."""
        self.added = set()

    def end(self, leaves: list[torch.Tensor], samples: int) -> None:
        """Add what is kept of the parameters that the samples of the block do not reach."""
        for i, leaf in enumerate(leaves):
            state = None if i in self.added else self.reduction.without(leaf, samples, self.columns)
            if state is not None:
                self.add(i, state)

    def add(self, leaf: int, state: State) -> None:
        """Add the state of another block of samples."""
        self.added.add(leaf)
        before = self.states.get(leaf)
        self.states[leaf] = state if before is None else self.reduction.over_samples(before, state)
