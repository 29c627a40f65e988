"""The ways in which f is called, one after the other, and the error of a function that none of them follows."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch.utils.checkpoint import CheckpointError

from invfunc._torch.functorch import transforming
from invfunc._torch.weak import WeakIdMap
from invfunc.core.columns import Twice
from invfunc.core.generic import Unreplayed
from invfunc.core.marks import Final, Unsupported
from invfunc.core.refusals import refused_by
from invfunc.core.resort import alone, by_rows
from invfunc.core.run import Run
from invfunc.errors import InvFuncError, ReplayError
from invfunc.problem import BoundProblem

Way = Callable[[BoundProblem, Run, list[torch.Tensor]], tuple[Any, Any]]
"""A way of calling f, given the leaves of a run: the result, whose mark and uses the run knows then, and aux."""
WAYS: tuple[Way, ...] = (BoundProblem.call, alone, by_rows)
"""As it is, then the last resort."""
FAULTS = AttributeError, IndexError, KeyError, NameError, TypeError, AssertionError
"""Errors of code, not of what it computes with."""
PACKAGE = str(Path(__file__).parents[1])
T = TypeVar("T")
_WAYS = WeakIdMap[dict[Hashable, int]]()
"""The ways in which functions are followed, so that those that fail are not tried again."""
_TIMES = count()


def known_way(f: Callable, what: Hashable) -> int:
    """The number of the way in which a function is followed, for a statistic or what else is asked of it."""
    return (_WAYS.get(f) or {}).get(what, 0)


def straight(run: Callable[[], T]) -> T:
    """The result of a run in which no way fails: one in which a way fails has done things twice."""
    before = repr(_TIMES)
    found = run()
    return found if repr(_TIMES) == before else run()


def by_ways(f: Callable, what: Hashable, call: Callable[[Way], T], undo: Callable[[], None]) -> T:
    """The result of a call, by the first way that follows f; what is asked of f says which way that was before.

    An error of the library's own, or of f, is one of any way; else the error is that of the first.
    """
    first, refusals = known_way(f, what), list[Exception]()
    for k in range(first or 0, len(WAYS)):
        try:
            found = call(WAYS[k])
        except REFUSALS as error:
            refusals.append(error)
        else:
            if k != first:
                next(_TIMES)
                with suppress(TypeError):  # a function of a kind that has no weak references
                    _WAYS.set(f, {**(_WAYS.get(f) or {}), what: k})
            return found
        undo()
        last = refusals[-1]
        if isinstance(last, (Final, InvFuncError)) or (isinstance(last, Raised) and not transforming()):
            break
    own = [e.error if isinstance(e, Raised) else e for e in refusals if isinstance(e, (Raised, InvFuncError))]
    try:
        raise own[0] if own else refused_by(refusals)
    finally:  # else their tracebacks keep what f has computed
        refusals.clear()
        own.clear()


class Raised(Exception):
    """Raised where f itself raises an error, also as it is written."""

    def __init__(self, error: Exception) -> None:
        super().__init__(str(error))
        self.error = error


class Met(Raised):
    """Raised where f raises an error while it is followed."""

    def __init__(self, error: Exception, as_written: Callable[[], Any]) -> None:
        """`as_written` calls f as it is written."""
        super().__init__(error)
        self.as_written = as_written


REFUSALS = Unsupported, Raised, InvFuncError, RuntimeError
"""Errors by which a way may refuse f, the last as torch does; all else is a fault of ours."""


def looked_at(met: Met) -> Exception:
    """An error that a run met: one that f also raises as it is written is the user's own; faults of ours stay."""
    try:
        with torch.enable_grad():
            met.as_written()
    except Exception as error:
        error.__context__ = None  # of the run
        return Raised(error)
    if is_fault(met.error):
        return met.error
    return Unsupported(f"{type(met.error).__name__}: {str(met.error).partition(chr(10))[0]}")


def is_fault(error: Exception) -> bool:
    """Tells whether an error is one of the library's own code, and not of an operation of f that a mode handed on."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    code = None if trace is None or not isinstance(error, FAULTS) else trace.tb_frame.f_code
    return code is not None and code.co_filename.startswith(PACKAGE) and code.co_name != "__torch_function__"


class Again(Exception):
    """Raised where the result has a derivative in what f closes over."""


REPLAYED = WeakSet[Any]()
"""Functions with checkpoints that have to be evaluated again as they were followed."""


@dataclass
class How:
    """The way f is run, which changes with what a run meets."""

    problem: BoundProblem
    new: type[Run]
    """The kind of the run."""
    way: Way
    each: bool
    deep: bool
    twice: bool
    frees: bool
    replays: bool
    ambiguous: Unsupported | None = None
    """Error that was met where a dim of the size N was taken for one of samples."""

    def run(self) -> Run:
        """The run, not yet begun."""
        problem, chosen = self.problem, self.problem.samples
        chosen = None if chosen is None else torch.tensor(chosen, device=problem.leaves[0].device)
        run = self.new(problem.n, self.deep, chosen)
        run.grows, run.way, run.twice, run.each = self.ambiguous is None, self.way, self.twice, self.each
        run.frees, run.replays = self.frees and not self.deep, self.replays
        return run

    def change(self, run: Run, error: Exception) -> None:
        """Run f in another way after an error, which is raised where there is none."""
        if isinstance(error, (Again, Twice)):
            self.deep, self.twice = self.deep or isinstance(error, Again), True
        elif isinstance(error, (CheckpointError, Unreplayed)) and self.way is BoundProblem.call and not self.replays:
            self.replays = True  # a checkpoint is not evaluated again as it was followed
            with suppress(TypeError):  # a function of a kind that has no weak references
                REPLAYED.add(self.problem.f)
        elif isinstance(error, ReplayError) and run.frees:  # nor is a block
            self.frees = False
        elif isinstance(error, Unsupported) and not isinstance(error, Final) and not self.ambiguous and run.grew:
            self.ambiguous = error
        else:
            raise self.ambiguous or error from None
