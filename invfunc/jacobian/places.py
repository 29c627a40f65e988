"""Data that change places: mostly their order tells the shares, else each of their rows is followed to its sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeVar

import torch

from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.jacobian.checks import one_order
from invfunc.jacobian.problem import Problem
from invfunc.jacobian.trace import Trace
from invfunc.jacobian.trace.random import Draws, restore


class Run(Protocol):
    """What a function returned, and what was seen of it."""

    trace: Trace
    result: Any


T = TypeVar("T", bound=Run)


class Places:
    """How the runs of a function follow data that change places."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.by_rows = False
        self.moved = False
        """Whether data were put in another order in a run."""

    def tell(self, trace: Trace) -> None:
        """A run that begins."""
        trace.by_rows = self.by_rows

    def hear(self, trace: Trace) -> None:
        """A run that has ended."""
        self.moved = self.moved or trace.moved

    def settled(self, attempt: Callable[[], T], draws: Draws) -> T:
        """A run; where the order of the data is not enough, once more by rows, unless these cannot be followed."""
        found, error = None, None
        try:
            found = attempt()
            if self.by_rows or _ordered(found):
                return found
        except (SampleAxisError, ArgumentError) as why:
            if self.by_rows or not self.moved:
                raise
            error = why
        places, after = self.problem.places, draws.rewind()
        self.by_rows = True
        try:
            return attempt()
        except (SampleAxisError, ArgumentError):
            self.by_rows, self.problem.places = False, places
            restore(after)
            if found is None:
                raise error from None
            return found


def _ordered(run: Run) -> bool:
    """Whether the order of the data is all that the result depends on."""
    trace, result = run.trace, run.result
    scalar = isinstance(result, torch.Tensor) and not result.ndim
    return not (scalar and trace.apart and trace.moved) or one_order(trace.orders)
