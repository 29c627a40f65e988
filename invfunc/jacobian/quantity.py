"""What is asked of a function: a measure of some columns, and what is known of it so far."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from invfunc.jacobian.measures import Measure, State

Of = Literal["gradient", "ggn", "hessian", "chain", "jacobian", "gradient_or_jacobian"]
"""What a statistic is made of."""


@dataclass(frozen=True)
class Drawing:
    """Columns drawn at random in place of all; `sample(outputs, generator)` draws targets for a loss of the user's."""

    count: int
    generator: torch.Generator
    sample: Callable | None = None


@dataclass(frozen=True)
class Quantity:
    """One result: what is measured, and of which columns."""

    measure: Measure
    of: Of
    drawing: Drawing | None = None

    @property
    def columns(self) -> Hashable:
        """The same for quantities that share their columns."""
        return self.of, self.drawing, self.measure.rooted if self.drawing is None else None


@dataclass
class Tally:
    """What a measure has kept so far."""

    quantity: Quantity
    measure: Measure
    states: dict[int, State] = field(default_factory=dict)
    results: dict[int, list[Any]] = field(default_factory=dict)
    """Of the parameters that are done."""
    joint: list[torch.Tensor] = field(default_factory=list)
    columns: int = 1

    def add(self, leaf: int, state: State) -> None:
        """The state of another block of samples."""
        before = self.states.get(leaf)
        self.states[leaf] = state if before is None else self.measure.over_samples(before, state)
