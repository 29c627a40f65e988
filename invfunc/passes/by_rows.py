"""Data that change places: mostly their order tells the shares, else each of their rows is followed to its sample."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

import torch

from invfunc._alike import alike
from invfunc._torch.values import decides
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.passes.evidence import Evidence, checks
from invfunc.passes.run import Run
from invfunc.recording import Trace
from invfunc.recording.checks import one_order, order_of
from invfunc.recording.problem import Problem
from invfunc.recording.provenance import Beforehand
from invfunc.recording.random import Draws, restore

T = TypeVar("T", bound=Run)


class Places:
    """How the runs of a function follow data that change places."""

    def __init__(self, problem: Problem, evidence: Evidence) -> None:
        self.problem, self.evidence = problem, evidence
        self.order: list[int] | None = None
        """Where f puts each sample, if not where it is in the batch."""
        self.by_rows = False
        self.counted = False
        """Whether data summed over the samples met samples or parameters in a run."""
        self.moved = False
        """Whether data were put in another order in a run."""
        self.repeated: dict[tuple[int, int], int] = {}
        """Where parameters with an entry for each sample were met, as in `Beforehand`."""
        self.entries, self.multiplied = False, False
        """Whether what each sample adds to sums is kept, and whether a parameter met such a sum in a run."""

    @property
    def chosen(self) -> list[int] | None:
        """Where the chosen samples are in a run of f; None for all in their order."""
        order, samples = self.order, self.problem.samples
        if order is None:
            return samples
        return [order[i] for i in (range(self.problem.n) if samples is None else samples)]

    def alike(
        self, parts: Iterable[Any], span: Callable[[Any], tuple[int, int]] = tuple, last: bool = False
    ) -> Iterator[Any]:
        """The parts of the samples; those of as many samples, with as many chosen ones among them, do the same."""

        def kind(part: Any) -> tuple[int, int]:
            start, stop = span(part)
            return stop - start, sum(start <= i < stop for i in self.chosen or ())

        return alike("samples", parts, kind, last)

    def beforehand(self, n: int) -> Beforehand:
        """What is known before a run of so many samples."""
        return self.evidence.beforehand(n, by_rows=self.by_rows, entries=self.entries, repeated=self.repeated)

    def hear(self, trace: Trace) -> None:
        """Take from a run that has ended whether data were put in another order."""
        self.evidence.hear(trace)
        self.counted = self.counted or trace.counted
        self.moved = self.moved or trace.moved
        self.multiplied = self.multiplied or trace.multiplied
        self.repeated |= trace.repeated

    def check(self, found: Run, draws: Draws, again: Callable[[torch.Tensor], Run]) -> None:
        """Check that the samples have places in a scalar loss, and remember these; `again` runs it on other samples."""
        trace, result = found.trace, found.result
        self.order = order_of(trace, result)
        for check, places in [] if result.ndim else checks(trace):
            order, after = torch.tensor(places, device=result.device), draws.rewind()
            other = again(order).trace
            restore(after)
            check(trace, other, order)

    def settled(self, run: Callable[[], T], draws: Draws, loss: bool = False) -> T:
        """The result of a run; if the order of the data is not enough, it runs again with each row followed, unless
        rows cannot be followed."""

        def attempt() -> T:
            try:
                return self.evidence.settled(run, draws) if loss else run()
            except SampleAxisError:
                if self.entries or not self.multiplied:
                    raise
                draws.rewind()
                decides(self.problem.leaves[0], "what each sample adds to sums")
                self.entries = True
                return self.evidence.settled(run, draws) if loss else run()

        try:
            found = attempt()
        except (SampleAxisError, ArgumentError):
            again = self._by_rows(attempt, draws) if self.moved and not self.by_rows else None
            if again is None:
                raise
            return again
        again = None if self.by_rows or _ordered(found) else self._by_rows(attempt, draws)
        return found if again is None else again

    def _by_rows(self, attempt: Callable[[], T], draws: Draws) -> T | None:
        order, after = self.order, draws.rewind()
        decides(self.problem.leaves[0], "to which sample each row of the data belongs")
        self.by_rows = True
        try:
            return attempt()
        except (SampleAxisError, ArgumentError):
            self.by_rows, self.order = False, order
            restore(after)
            return None


def _ordered(run: Run) -> bool:
    """Whether the order of the data is all that the result depends on."""
    trace, result = run.trace, run.result
    scalar = isinstance(result, torch.Tensor) and not result.ndim
    return not (scalar and trace.apart and trace.moved) or one_order(trace.orders)
