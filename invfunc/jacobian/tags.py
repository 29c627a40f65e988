"""What is known of a tensor while a function runs: computed from parameters, or of samples and how."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from invfunc.jacobian.axis import Axis
from invfunc.jacobian.follow import Total
from invfunc.jacobian.rules import Recipe


@dataclass(frozen=True)
class Derived:
    """A tensor computed from parameters alone; `selected` if each of its entries is one entry of one parameter."""

    leaves: frozenset[int]
    selected: bool
    of_data: bool = False
    """Whether data summed over the samples went into it."""


@dataclass(frozen=True)
class Sampled:
    """A tensor that depends on the samples: where they lie, or why that is lost, and how it depends on parameters."""

    place: Axis | Total | None
    lost: str | None = None
    around: str | None = None
    """Where a path from the parameters that crosses no outputs came last, or met one that does; None without one."""
    crossed: frozenset[int] = frozenset()
    """The marked outputs that it depends on."""
    affine: bool = False
    """Whether it is an affine function of the one marked output that it depends on."""
    logarithm: bool = False
    """Whether it is an affine function of the log_softmax of that output."""

    @property
    def active(self) -> bool:
        return self.around is not None or bool(self.crossed)


@dataclass
class Tap:
    """A parameter, perhaps derived, at one of the operations where it meets samples."""

    param: torch.Tensor
    derived: Derived
    recipe: Recipe
    site: int
    versions: tuple[tuple[torch.Tensor, int], ...]
