"""States of the Kronecker factors of a parameter, before they are divided by the number of samples."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc.kronecker.places import Place


@tree.register("b", "a")
@dataclass
class Factors:
    """The factors of one parameter in one role: sums of outer products, in the order of its dims."""

    b: torch.Tensor
    a: torch.Tensor | None
    """None where it has one factor only, or other columns brought it."""
    positions: float
    """How many there are, in all samples."""
    places: list[Place]
    bias: str
    """What the bias is called that is one more input, if there is one."""
    shape: torch.Size
    blocks: tuple[int, ...] | None = None

    def joined(self, other: Factors, samples: bool) -> Factors:
        a = self.a if other.a is None else other.a
        if samples and self.a is not None and other.a is not None:
            a = self.a + other.a
        positions = self.positions + other.positions if samples else self.positions
        return replace(self, b=self.b + other.b, a=a, positions=positions)


@tree.register("roles")
@dataclass
class ParameterFactors:
    """The state of one parameter: its factors in each of the roles in which operations read it."""

    name: str
    roles: dict[Hashable, Factors]

    def joined(self, other: ParameterFactors, samples: bool) -> ParameterFactors:
        if type(other) is not type(self):
            return Refused(self.name, {}, "part of its gradient comes from operations with factors, part from others")
        return self.merged(other, samples)

    def merged(self, other: Any, samples: bool) -> ParameterFactors:
        found = dict(self.roles)
        for role, factors in other.roles.items():
            found[role] = found[role].joined(factors, samples) if role in found else factors
        return replace(self, roles=found)

    def scaled(self, by: float) -> ParameterFactors:
        """With B, or the diagonal, so many times as large."""
        return replace(self, roles={role: replace(f, b=f.b * by) for role, f in self.roles.items()})


@tree.register("values")
@dataclass
class DiagonalFactors(ParameterFactors):
    """The diagonal of the block, kept in place of factors."""

    values: torch.Tensor

    def merged(self, other: Any, samples: bool) -> ParameterFactors:
        return replace(self, values=self.values + other.values)

    def scaled(self, by: float) -> ParameterFactors:
        return replace(self, values=self.values * by)


@tree.register()
@dataclass
class Refused(ParameterFactors):
    """A parameter that has no factors, and why."""

    why: str

    def joined(self, other: ParameterFactors, samples: bool) -> ParameterFactors:
        return self
