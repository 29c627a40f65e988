"""States of two copies, each moved by what a function says of the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import ArgumentTypeError
from invfunc.pairs.pair import Law
from invfunc.pairs.part import fitting_state, given_functions
from invfunc.pairs.state import per_sample, two_parts, wide


@dataclass(frozen=True, eq=False)
class TwoCopies(Law):
    """A pair of states (y, z), where z is a second copy of y: any pytrees of tensors, of one form."""

    call: str
    log_scale: float
    """The logarithm of the determinant, for each entry of a copy."""

    def read(self, fn: Any, state: Any, name: str) -> tuple[Any, Any]:
        """Both copies."""
        y, z = two_parts(given_functions((fn,), self.call, state), self.call, name)
        for path, leaf in tree.named_leaves(y):
            if not isinstance(leaf, torch.Tensor):
                kind = type(leaf).__name__
                raise ArgumentTypeError(f"{self.call}: y{path} is of type {kind}, but a state is a pytree of tensors.")
        return y, fitting_state(z, y, self.call, "the state", "its first part")

    def of(self, fn: Callable, state: Any, *args: Any, **kwargs: Any) -> Any:
        """What the function says of a state, in the form of it."""
        return fitting_state(fn(state, *args, **kwargs), state, self.call, "the function", "the state")

    def log_det(self, fn: Any, state: Any = None, *given: Any, **kwargs: Any) -> torch.Tensor:
        y, _ = self.read(fn, state, "x")
        return torch.stack([per_sample(torch.full_like(wide(t), self.log_scale)) for t in tree.tensors(y)]).sum(0)
