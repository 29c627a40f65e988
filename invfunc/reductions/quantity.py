"""What is asked of a function: a reduction of some columns, and what is known of it so far."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from invfunc.reductions import Reduction, State, States

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
    states: States = field(default_factory=dict)
    results: dict[int, list[Any]] = field(default_factory=dict)
    """The results of the parameters that are done."""
    columns: int = 1
    added: set[int] = field(default_factory=set)
    """The parameters of which the state of the present block of samples was added."""
    before: Accumulator | None = field(init=False)
    """What the phase before has kept."""

    def __post_init__(self) -> None:
        first = self.reduction.before
        self.before = None if first is None else Accumulator(self.quantity, first)

    @property
    def line(self) -> list[Accumulator]:
        """This one, after those before it that have to see all samples first."""
        return [self] if self.before is None or self.reduction.apart else [*self.before.line, self]

    def end(self, leaves: list[torch.Tensor], n: int) -> None:
        """Add what is kept of the parameters that the n samples of a block do not reach."""
        for i, leaf in enumerate(leaves):
            if i not in self.added:
                self.add(i, self.reduction.init(leaf, n, self.columns))
        self.added = set()
        if self.before is not None and self.reduction.apart:
            self.before.end(leaves, n)

    def add(self, leaf: int, state: State) -> None:
        """Add the state of another block of samples."""
        self.added.add(leaf)
        before = self.states.get(leaf)
        self.states[leaf] = state if before is None else self.reduction.merge(before, state, "samples")
