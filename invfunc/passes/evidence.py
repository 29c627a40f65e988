"""Finds out what untraced tensors are: f runs on other batches, in which constants stay the same and samples do not.

On a batch of repeated samples, a tensor that has a row for each sample has the rows of those samples. Several batches
together leave no other order of the rows, and no sum over them, unnoticed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from math import isclose
from operator import or_
from typing import Any, TypeVar

import torch

from invfunc import thresholds, tree
from invfunc._torch.functorch import innermost, version
from invfunc._torch.values import decides, same_values
from invfunc.errors import SampleAxisError, samples_unseen
from invfunc.operations.axis import Axis
from invfunc.operations.calls import read_by, spelled
from invfunc.operations.heard import Function
from invfunc.recording import Trace
from invfunc.recording.held import held_by
from invfunc.recording.problem import Problem
from invfunc.recording.provenance import LOST, NOTHING, PROVEN, Beforehand, ConstantsMet, Lost, UntracedTensors
from invfunc.recording.random import Draws
from invfunc.recording.scope import Scope

_PARAMETERS, _SAMPLES, _STRANGE = 1, 2, 4
T = TypeVar("T")


@dataclass
class Untraced:
    """A tensor as it was when it was read first."""

    tensor: torch.Tensor
    version: int
    value: torch.Tensor | None


class Recorder(UntracedTensors):
    """A run of which only the untraced tensors are remembered, and the constants that meet parameters alone."""

    def __init__(self, scope: Scope, draws: Draws) -> None:
        super().__init__()
        self.scope, self.draws = scope, draws
        self.found: list[Untraced] = []
        self.constants: list[tuple[str, list[Any]]] = []

    def parameter(self, x: torch.Tensor) -> torch.Tensor:
        return self._given(self.scope.enter(x), _PARAMETERS)

    def samples(self, x: torch.Tensor, axis: Axis) -> torch.Tensor:
        return self._given(self.scope.alias(x), _SAMPLES)

    @property
    def adopting(self) -> None:
        return None

    def _given(self, x: torch.Tensor, of: int) -> torch.Tensor:
        self.know(x, of)
        return x

    def met(self, x: torch.Tensor, ordinal: int, name: str) -> None:
        self.know(x, _STRANGE)
        self.found.append(Untraced(x, version(x), x.detach().clone() if x.numel() <= thresholds.COMPARED else None))

    def run(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        self.draws.before(function, args, kwargs)
        name = function.name
        of = reduce(or_, (self._kind(x) for x in read_by(name, args, kwargs)), 0)
        if of & _PARAMETERS and not of & _SAMPLES:
            leaves = tree.leaves((args, kwargs))
            self.constants.append((name, [_value(x) for x in leaves if self._constant(x)]))
        out = function.func(*args, **kwargs)
        for x in tree.tensors(out):
            self.know(x, of & ~_STRANGE)
        return out

    def _kind(self, x: torch.Tensor) -> int:
        return self._known.get(x) or 0

    def _constant(self, x: Any) -> bool:
        return not isinstance(x, torch.Tensor) or self._known.get(x) == 0


class Evidence:
    """What is known of the untraced tensors of a function: found out once, and only where it matters."""

    def __init__(self, problem: Problem, scope: Scope) -> None:
        self.problem, self.scope = problem, scope
        self.learned: Beforehand | None = None
        self.doubtful = False
        self.held: list[torch.Tensor] | None = None  # before the first run

    def settled(self, run: Callable[[], T], draws: Draws) -> T:
        """The result of a run; if it fails as it reads tensors of which nothing is known, they are looked into, and it
        runs again."""
        try:
            return run()
        except SampleAxisError:
            if not self.doubtful or self.learned is not None:
                raise
            draws.rewind()
            decides(self.problem.leaves[0], "where the samples are in tensors that were made where it is not seen")
            self.learned = learn(self.problem, self.scope)
            return run()

    def beforehand(self, n: int, **more: Any) -> Beforehand:
        """What is known before a run of n samples; `more` is known already."""
        self.held = held_by(self.problem.f) if self.held is None else self.held
        learned, constants = self.learned or NOTHING, [*self.problem.fixed(), *self.held]
        places = learned.places
        if n == 1 and places is not None:
            places = [Axis(None) if isinstance(place, Axis) else place for place in places]
        return Beforehand(constants, places, learned.trusting, **more)

    def hear(self, trace: Trace) -> None:
        """Take from a run that has ended whether it read tensors of which nothing is known."""
        self.doubtful = self.doubtful or (trace.untraced_at or trace.escaped) is not None


def checks(trace: Trace) -> list[tuple[Callable[[Trace, Trace, torch.Tensor], None], list[int]]]:
    """The comparisons to make in runs on other batches, each with the samples of its batch; no wrong order of rows
    passes all of them."""
    each, last = list(range(trace.n)), trace.n - 1
    found = [(same_elsewhere, [*each[1:], 0])] if trace.constants_met else []
    return [*found, (same_rows, [*each[1:], last]), (same_rows, each[::-1])] if trace.aligned else found


def same_elsewhere(trace: Trace, other: Trace, order: torch.Tensor) -> None:
    """Check that what samples met is the same when they are in another order, or in that order as well."""
    for total in (False, True):  # terms of a sum may be in any order
        given, found = ([b for b in t.constants_met if b.total is total] for t in (trace, other))
        if total:
            given, found = (sorted(each, key=lambda b: (b.name, b.numbers)) for each in (given, found))
        if len(given) != len(found):
            raise samples_unseen(f"{spelled(trace.escaped)}, after which f does something else in another order")
        wrong = next((a.name for a, b in zip(given, found, strict=True) if not _same(a, b, order)), None)
        if wrong is not None:
            raise samples_unseen(
                f"`{wrong}`, which reads what was taken out of some of them by {spelled(trace.escaped)}"
            )


def _same(a: ConstantsMet, b: ConstantsMet, order: torch.Tensor) -> bool:
    """Whether samples met the same, or that in another order."""
    sizes = len(a.numbers) == len(b.numbers) and len(a.tensors) == len(b.tensors)
    near = all(isclose(x, y, rel_tol=1e-5) or x != x != y for x, y in zip(a.numbers, b.numbers, strict=False))
    return a.name == b.name and sizes and near and all(map(partial(_moved, order=order), a.tensors, b.tensors))


def _moved(a: torch.Tensor, b: torch.Tensor, order: torch.Tensor) -> bool:
    rows = (d for d, size in enumerate(a.shape) if size == len(order))
    return _equal(a, b) or any(_equal(a.index_select(d, order), b) for d in rows)


def same_rows(trace: Trace, other: Trace, places: torch.Tensor) -> None:
    """Check that what meets samples row by row has the rows of these, as far as it is of samples."""
    for (name, a, dim), (_, b, _) in zip(trace.aligned, other.aligned, strict=False):
        if a.shape != b.shape or not (_equal(a, b) or _equal(a.index_select(dim, places), b)):
            raise samples_unseen(f"{name}, which reads a tensor that has not the rows of its samples")


def learn(problem: Problem, scope: Scope) -> Beforehand:
    """Run f on some batches of its samples, to know of its untraced tensors and numbers."""
    n, device = problem.n, problem.leaves[0].device
    draws, runs = Draws(stop=False), list[Recorder]()
    each = torch.arange(n, device=device)
    batches = [each, (each + 1).clamp(max=n - 1), torch.zeros_like(each), torch.full_like(each, n // 2)]
    for places in batches:
        recorder = Recorder(scope, draws)
        try:
            problem.call(recorder, [recorder.parameter(leaf) for leaf in problem.leaves], places)
        except Exception:  # f may not run on repeated samples: then nothing is learned of what it reads
            return Beforehand(places=[])
        finally:
            draws.rewind()
        runs.append(recorder)
    seen = list(zip(*(r.found for r in runs), strict=False))
    if any(len(r.found) != len(seen) for r in runs):
        return Beforehand(places=[])
    constant = all(_same_constants(runs[0], r) for r in runs[1:])
    places = [_place(untraced_tensors, batches) for untraced_tensors in seen]
    return Beforehand(places=places, trusting=constant)


def _same_constants(a: Recorder, b: Recorder) -> bool:
    """Whether the same calls met parameters, with the same constants."""
    if [name for name, _ in a.constants] != [name for name, _ in b.constants]:
        return False
    pairs = zip(a.constants, b.constants, strict=True)
    return all(len(x) == len(y) and all(map(_equal, x, y)) for (_, x), (_, y) in pairs)


def _place(seen: tuple[Untraced, ...], batches: list[torch.Tensor]) -> Axis | Lost | None:
    """Where the samples are in an untraced tensor, given what it was for each batch."""
    if any(s.tensor.is_nested or s.tensor.layout != torch.strided for s in seen):
        return LOST
    x = seen[0].tensor
    if _untouched(seen):
        PROVEN.add(x)
        return None
    values = [s.value for s in seen if s.value is not None]
    if len(values) < len(seen) or any(v.shape != x.shape for v in values):
        return LOST
    if all(_equal(values[0], v) for v in values[1:]):
        return None
    found = [d for d, size in enumerate(x.shape) if size == len(batches[0]) and _has_rows(values, d, batches)]
    return Axis(found[0]) if len(found) == 1 else LOST


def _untouched(seen: tuple[Untraced, ...]) -> bool:
    """Whether it is one tensor, into which nobody wrote."""

    def same(a: Untraced, b: Untraced) -> bool:
        known = a.value is not None and b.value is not None
        return a.tensor is b.tensor and a.version == b.version and (not known or _equal(a.value, b.value))

    return all(same(seen[0], s) for s in seen[1:])


def _has_rows(values: list[torch.Tensor], dim: int, batches: list[torch.Tensor]) -> bool:
    """Whether along a dim are rows of the samples of each batch; the first batch has each of them once."""
    later = zip(values[1:], batches[1:], strict=True)
    return all(_equal(values[0].index_select(dim, batch), v) for v, batch in later)


def _value(x: Any) -> Any:
    return x.detach().clone() if isinstance(x, torch.Tensor) else x


def _equal(a: Any, b: Any) -> bool:
    """Whether two constants are the same; what cannot be compared is not."""
    try:
        if not isinstance(a, torch.Tensor):
            return type(a) is type(b) and (a is b or bool(a == b) or bool(a != a and b != b))
        if not isinstance(b, torch.Tensor) or (a.shape, a.dtype) != (b.shape, b.dtype):
            return False
        return same_values(a, b) if a.is_floating_point() else bool(innermost(a == b).all())
    except (TypeError, ValueError, RuntimeError):
        return False
