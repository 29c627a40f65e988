"""A function in as few chunks as a memory budget allows."""

from __future__ import annotations

import gc
from collections import OrderedDict
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from invfunc import thresholds, tree
from invfunc._torch.functorch import dispatched, storage_of, transforming
from invfunc.arguments.problem import batch_dims, batch_size
from invfunc.budget.beside import FIRST, LATER, VARIES, Reserve
from invfunc.budget.fingerprint import fingerprint
from invfunc.budget.footprint import BY_HAND, Footprint, certain, footprint, unpredictable, warmed
from invfunc.budget.search import Chunks, Measured, Trial, least, search
from invfunc.budget.size import given_back, in_bytes, resident, told
from invfunc.callables import describe
from invfunc.errors import ArgumentError, BudgetError, InvFuncError
from invfunc.plan import AxisName
from invfunc.plans.calls import call_of
from invfunc.plans.plan import signature
from invfunc.plans.watch import Watch
from invfunc.report import Explanation
from invfunc.statistic import Statistic
from invfunc.transform import ArgumentNames, Transform

Make = Callable[[Chunks, bool], Any]
"""The function in some chunks; the second says whether it may tell of its progress."""

CLOSE, KEPT = 1.1, 64
"""How much larger a budget may be for which chunks are kept, and of how many different calls they are."""

_ORDER: tuple[AxisName, ...] = ("samples", "outputs", "params")


@dataclass(eq=False)
class Fingerprints:
    """The fingerprints of calls.

    One is used again while the arguments have the same sizes and nothing that f reads beside them has changed, as far
    as `compiled` sees it; else f runs without numbers once more.
    """

    ran: set[Hashable] = field(default_factory=set)
    """Those of calls that have run."""
    _known: OrderedDict[Hashable, tuple[Watch, list[Hashable], Hashable]] = field(default_factory=OrderedDict)

    def __reduce__(self) -> tuple:
        return Fingerprints, ()  # what f reads, and what libraries have loaded, is in this process

    def of(self, f: Callable, args: tuple, kwargs: dict[str, Any], look: Callable[[], Hashable | None]) -> Hashable:
        """The fingerprint of a call; None if there is none."""
        call = call_of(args, kwargs)
        if call.why:
            return look()
        if call.key in self._known:
            watch, signatures, found = self._known[call.key]
            if not watch.changed() and _signatures(watch) == signatures:
                return found
        watch = Watch([f, *call.others])
        found, signatures = look(), _signatures(watch)
        self._known.pop(call.key, None)
        if found is not None and not watch.unseen and not watch.changed():
            self._known[call.key] = watch, signatures, found
        while len(self._known) > KEPT:
            self._known.popitem(last=False)
        return found


def _signatures(watch: Watch) -> list[Hashable]:
    """The memory, shape, strides and dtype of each tensor that a function reads beside its arguments."""
    return [None if (x := held()) is None else (storage_of(x), signature(x)) for held in watch.tensors.values()]


@dataclass(frozen=True)
class Choice:
    """Chunks that are within a budget: of the first call in a process, and of those after it, which load nothing."""

    first: Trial
    later: Trial
    budget: int

    def holds(self, trial: Trial, budget: int, reserve: Reserve) -> bool:
        """Whether one of them is what another budget asks for, too."""
        return trial.peak + reserve.size <= budget <= CLOSE * self.budget


@dataclass(frozen=True)
class Fitting:
    """The chunks of a call."""

    trial: Trial
    budget: int
    reserve: Reserve
    call: Hashable
    """The fingerprint of the call."""

    @property
    def promised(self) -> int:
        """The bytes that the call never exceeds."""
        return self.trial.peak + self.reserve.size


@dataclass(frozen=True, repr=False)
class Budgeted(Transform):
    """A function in the chunks that its arguments ask for."""

    f: Callable
    make: Make
    axes: tuple[str, ...]
    size: int | float
    text: str
    in_dims: Any = 0
    has_aux: bool = False
    choices: dict[Any, Choice] = field(default_factory=dict, compare=False)
    """What was chosen for which calls, by what f did in them; no tensors."""
    trials: dict[Any, dict[tuple, Footprint | None]] = field(default_factory=dict, compare=False)
    """What the same calls take with some chunks, which does not depend on the budget."""
    fingerprints: Fingerprints = field(default_factory=Fingerprints, compare=False)
    outermost = budgeted = True  # what is around it would have memory of its own

    def __repr__(self) -> str:
        return f"chunked({describe(self.f)}, {self.text})"

    @property
    def owned(self) -> bool:
        return isinstance(self.f, Statistic)

    @property
    def several(self) -> bool:
        return isinstance(self.f, Statistic) and self.f.several

    def names(self, count: int) -> Any:
        return self.f.names(count) if isinstance(self.f, Transform) else ArgumentNames(self.f, count)

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        found = self.fitting(args, kwargs, names)
        result = self.make(found.trial.chunks, True).compute(args, kwargs, names)
        self.fingerprints.ran.add(found.call)
        return result

    def fitting(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Fitting:
        """The chunks that are within the budget. Of a call that has run, more of it is there for tensors."""
        _check(args, kwargs)
        drawn = [d.generator for d in self.f.drawings] if isinstance(self.f, Statistic) else []
        before = resident()
        look = partial(fingerprint, self._plainly, args, kwargs, drawn)
        budget, same = in_bytes(self.size), self.fingerprints.of(self.f, args, kwargs, look)
        again, kept = same is not None and same in self.fingerprints.ran, self.choices.get(same)
        reserve = LATER if again else FIRST
        if kept is not None and kept.holds(trial := kept.later if again else kept.first, budget, reserve):
            return Fitting(trial, budget, reserve, same)
        known = {} if same is None else self.trials.setdefault(same, {})
        measured, lengths = self._measured(args, kwargs, drawn, known), self._lengths(args, kwargs, names)
        first, later = _searched(measured, lengths, budget)
        chosen, taken = later if again else first, _kept_since(before, reserve.of_python)
        if chosen is not None and chosen.peak + reserve.size + taken > budget:  # in the next calls it is in use before
            chosen = search(measured, lengths, budget - reserve.size - taken)
        if first is None or later is None or chosen is None:
            best = least(measured, lengths)
            _searched(measured, lengths, best.peak + FIRST.size)  # so that Python keeps what it does with that budget
            raise _too_little(budget, best, _kept_since(before, FIRST.of_python - VARIES))
        if same is not None:
            self.choices[same] = Choice(first, later, budget)
        for oldest in list(self.choices)[:-KEPT]:
            self.choices.pop(oldest)
            self.trials.pop(oldest, None)
        self.fingerprints.ran.intersection_update(self.choices)
        return Fitting(chosen, budget, reserve, same)

    def _measured(
        self, args: tuple, kwargs: dict[str, Any], drawn: list[Any], known: dict[tuple, Footprint | None]
    ) -> Measured:
        """What this call takes with some chunks. What is `known` of them is not asked again."""
        warmed()
        gc.collect()  # what nobody needs any more is not to be freed in the middle of it

        def predict(chunks: Chunks, limit: int | None) -> Footprint | None:
            try:
                return certain(footprint(self.make(chunks, False), args, kwargs, drawn, limit))
            except Exception as error:
                if chunks:  # it cannot be divided so
                    return None
                if isinstance(error, InvFuncError):
                    raise
                raise unpredictable(f"without numbers it fails ({str(error).splitlines()[0]})") from error

        return Measured(predict, known)

    def _plainly(self, *args: Any, **kwargs: Any) -> Any:
        """What the function in it is made of, as it was written."""
        if not isinstance(self.f, Statistic):
            return self.f(*args, **kwargs)
        return [_evaluated(t, args, kwargs) for t in self.f.members or (self.f,)]

    def _lengths(self, args: tuple, kwargs: dict[str, Any], names: Any) -> dict[AxisName, int | None]:
        """How long each axis is that can be divided; nobody knows beforehand of columns that are not drawn."""
        known: dict[AxisName, int | None]
        if isinstance(self.f, Statistic):
            problem = self.f.problem(args, kwargs, names)
            drawn = [s.drawing.count if s.drawing else None for s in self.f.members or (self.f,)]
            columns = None if None in drawn else max(d for d in drawn if d is not None)
            known = {"samples": problem.n, "outputs": columns, "params": len(problem.leaves)}
        else:
            known = {"samples": batch_size(args, batch_dims(self.in_dims, list(range(1, len(args)))), names)}
        return {axis: known[axis] for axis in _ORDER if axis in self.axes}


class BudgetedStatistic(Budgeted):
    """A statistic in the chunks that its arguments ask for."""

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """How it would be computed at these arguments, and in how much memory."""
        found = self.fitting(args, kwargs, names)
        chunks = found.trial.chunks
        why = f"{_spelled(chunks)}, at most {told(found.promised)} of {told(found.budget)}"
        return replace(self.make(chunks, False).explanation(args, kwargs, names), name=repr(self), why=why)


def _evaluated(t: Statistic, args: tuple, kwargs: dict[str, Any]) -> Any:
    """What the function of a statistic returns, and the loss of it."""
    if t.loss is None:
        return t.f(*args, **kwargs)
    outputs = t.f(*args[:-1], **kwargs)
    return outputs, t.loss(outputs[0] if t.has_aux else outputs, args[-1])


def _check(args: tuple, kwargs: dict[str, Any]) -> None:
    """Check that what is predicted is what will run: plainly, on a CPU."""
    if transforming() or dispatched():
        raise ArgumentError(
            "within a transform of torch.func or a dispatch mode, where more is kept than can be predicted. " + BY_HAND
        )
    others = {x.device.type for x in tree.tensors((args, kwargs))} - {"cpu"}
    if others:
        raise ArgumentError(
            f"an argument is on {others.pop()!r}, but what the libraries there take beside tensors is known of CPUs "
            f"alone. {BY_HAND}"
        )


def _spelled(chunks: Chunks) -> str:
    """Chunks, as people say them."""
    divided = [f"{n} chunks of {axis}" for axis, n in chunks.items()]
    return "in " + " and ".join(divided) if divided else "in one piece"


def _searched(
    measured: Measured, lengths: dict[AxisName, int | None], budget: int
) -> tuple[Trial | None, Trial | None]:
    """What is within the budget in the first call of a process, and in those after it, if that may be faster."""
    narrow, wide = budget - FIRST.size, budget - LATER.size
    whole = measured({})
    faster = whole is None or whole.peak <= wide or CLOSE * narrow < wide
    later = search(measured, lengths, wide) if narrow > 0 and faster else None
    first = search(measured, lengths, narrow)  # which asks for little that is not known by now
    return first, later or first


def _kept_since(before: int, in_reserve: int) -> int:
    """What Python and libraries keep of what was done since then, above what is in reserve for it."""
    gc.collect()
    given_back()
    return max(0, resident() - before - in_reserve)


def _too_little(budget: int, least: Trial, taken: int) -> BudgetError:
    found, results, size = least.footprint, least.footprint.results, least.peak + FIRST.size + taken
    beside = f" and {told(taken)} that Python keeps of the search, once" if taken else ""
    error = BudgetError(
        f"it does not fit {told(budget)}. The least that it takes in up to {thresholds.TRIED_PASSES} chunks is "
        f"{told(size)}, {_spelled(least.chunks)}: the result has {told(results)}, and the most is in use at "
        f"`{found.at}`, with {told(FIRST.size)} for what libraries load and keep{beside}. Give "
        f"memory={told(size)!r}, or a smaller batch."
    )
    error.least = size
    return error
