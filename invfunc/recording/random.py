"""Operations that draw random numbers: seen before they do, and replayed."""

from __future__ import annotations

from typing import Any

import torch

from invfunc._torch.generators import set_states, state_of, torchs_own
from invfunc.operations.heard import Function


class Drew(BaseException):
    """Raised before a run on a part of the batch draws: the numbers of the whole batch are another sequence."""


class Draws:
    """What a run does about random numbers: stop before the first one, or remember the states before it."""

    def __init__(self, stop: bool) -> None:
        self.stop = stop
        self.before_first: dict[torch.Generator, torch.Tensor] = {}

    def before(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> None:
        if not function.draws(args, kwargs):
            return
        if self.stop:
            raise Drew
        generators = torchs_own()
        if isinstance(kwargs.get("generator"), torch.Generator):
            generators.append(kwargs["generator"])
        for g in generators:
            if g not in self.before_first:
                self.before_first[g] = state_of(g)

    @property
    def drew(self) -> bool:
        return bool(self.before_first)

    def rewind(self) -> dict[torch.Generator, torch.Tensor]:
        """Set the generators to where they were before the run; returns where they were after it."""
        after = {g: state_of(g) for g in self.before_first}
        restore(self.before_first)
        return after


def restore(states: dict[torch.Generator, torch.Tensor]) -> None:
    set_states(states.items())
