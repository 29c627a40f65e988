"""A matrix over all parameters at once, where a tree of factors has one for each."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch

from invfunc.linear_algebra.symmetric import Damping
from invfunc.tree import Tree


class Whole(ABC):
    """A matrix over all parameters, which `solve` and `logdet` take in place of factors."""

    @abstractmethod
    def solve(self, v: Tree, damping: Damping = 0.0) -> Tree:
        """The inverse of the matrix plus damping, times a tree of vectors."""

    @abstractmethod
    def logdet(self, damping: Damping = 0.0) -> torch.Tensor:
        """The logarithm of the determinant of the matrix plus damping."""
