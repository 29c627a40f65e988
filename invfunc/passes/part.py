"""What one pullback is of: a range of columns, and the parameters that they reach."""

from __future__ import annotations

from dataclasses import dataclass

from invfunc._torch.functorch import version
from invfunc.errors import ArgumentError
from invfunc.per_sample.cotangents import Columns
from invfunc.recording.tags import ParameterUse


@dataclass
class Pass:
    """One pullback: the columns of a range, to the parameter uses of some parameters."""

    uses: dict[int, list[ParameterUse]]
    start: int
    stop: int
    completes: bool = True
    """Whether no more columns come to its parameters."""
    source: int = 0
    """Where groups of columns share passes: those of which kind, and of which classes of its colouring, have their
    columns of the range in this one."""
    classes: range = range(1)

    @property
    def sites(self) -> list[int]:
        return sorted({use.site for uses in self.uses.values() for use in uses})


Kept = list[tuple[Pass, Columns]]
"""What was pulled back, pass by pass."""
Reached = tuple[list[ParameterUse], Columns]
"""What reads a parameter, and the columns there."""


def backwards(uses: dict[int, list[ParameterUse]]) -> list[tuple[int, list[ParameterUse]]]:
    """The parameters, in the order of a backward pass if operands are computed again, each from the next."""
    if not any(use.recomputed for found in uses.values() for use in found):
        return list(uses.items())
    return sorted(uses.items(), key=lambda item: -max(use.site for use in item[1]))


def by_sites(uses: dict[int, list[ParameterUse]]) -> list[dict[int, list[ParameterUse]]]:
    """The parameters in groups that need the same cotangents, as the weight and bias of a layer do."""
    groups: dict[frozenset[int], dict[int, list[ParameterUse]]] = {}
    for i, found in uses.items():
        groups.setdefault(frozenset(t.site for t in found), {})[i] = found
    return list(groups.values())


def check_versions(uses: list[ParameterUse]) -> None:
    """Check that nobody has written to what an operation with parameters read."""
    for use in uses:
        for x, before in use.versions:
            if version(x) != before:
                raise ArgumentError(
                    "a tensor that an operation with parameters read was modified in place afterwards, so its gradient "
                    "cannot be computed; modify a copy."
                )
