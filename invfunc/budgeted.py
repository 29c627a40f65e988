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
from invfunc.budget.fingerprint import fingerprint
from invfunc.budget.footprint import BY_HAND, OF_PYTHON, RESERVE, Footprint, certain, footprint, unpredictable, warmed
from invfunc.budget.search import Chunks, Measured, Trial, least, search
from invfunc.budget.size import given_back, in_bytes, resident, told
from invfunc.callables import describe
from invfunc.errors import ArgumentError, BudgetError, InvFuncError
from invfunc.plan import AxisName
from invfunc.plans.key import call_of, signature
from invfunc.plans.watch import Watch
from invfunc.recording.problem import batch_dims, batch_size
from invfunc.sparsity.report import Explanation
from invfunc.statistic import Statistic
from invfunc.transform import ArgumentNames, Transform

Make = Callable[[Chunks, bool], Any]
"""The function in some chunks; the second says whether it may tell of its progress."""

CLOSE, KEPT = 1.1, 64
"""How much larger a budget may be for which chunks are kept, and of how many different calls they are."""

VARIES = 2**20
"""By how much that which Python keeps of a search is another in another process: it takes memory in such pieces."""

_ORDER: tuple[AxisName, ...] = ("samples", "outputs", "params")


@dataclass(eq=False)
class Fingerprints:
    """The fingerprints of calls.

    One is used again while the arguments have the same sizes and nothing that f reads beside them has changed, as far
    as `compiled` sees it; else f runs without numbers once more.
    """

    _known: OrderedDict[Hashable, tuple[Watch, list[Hashable], Hashable]] = field(default_factory=OrderedDict)

    def __reduce__(self) -> tuple:
        return Fingerprints, ()  # what f reads is in this process

    def of(self, f: Callable, args: tuple, kwargs: dict[str, Any], look: Callable[[], Hashable | None]) -> Hashable:
        """The fingerprint of a call; None if there is none."""
        call = call_of(args, kwargs)
        if call.why:
            return look()
        if call.key in self._known:
            watch, signatures, found = self._known[call.key]
            if not watch.changed() and _signatures(watch) == signatures:
                return found
        watch = Watch([f, *call.watched])
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
    choices: dict[Any, tuple[Trial, int]] = field(default_factory=dict, compare=False)
    """What was chosen for which calls, by what f did in them, and the budget then; no tensors."""
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
        return self.make(self.fitting(args, kwargs, names)[0].chunks, True).compute(args, kwargs, names)

    def fitting(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Trial, int]:
        """The chunks that are within the budget, and the budget in bytes."""
        _check(args, kwargs)
        drawn = [d.generator for d in self.f.drawings] if isinstance(self.f, Statistic) else []
        before = resident()
        look = partial(fingerprint, self._plainly, args, kwargs, drawn)
        budget, same = in_bytes(self.size), self.fingerprints.of(self.f, args, kwargs, look)
        chosen, of = self.choices.get(same, (None, 0))
        if chosen is not None and _promised(chosen) <= budget <= CLOSE * of:
            return chosen, budget
        known = {} if same is None else self.trials.setdefault(same, {})
        measured, lengths = self._measured(args, kwargs, drawn, known), self._lengths(args, kwargs, names)
        later = search(measured, lengths, budget - RESERVE)
        chosen, taken = later, _kept_since(before)
        if later is not None and _promised(later) + taken > budget:  # in the next calls it is in use before
            chosen = search(measured, lengths, budget - RESERVE - taken)
        if later is None or chosen is None:
            best = least(measured, lengths)
            search(measured, lengths, best.peak)  # as a call with that budget, so that Python keeps what it does there
            raise _too_little(budget, best, _kept_since(before, VARIES))
        if same is not None:
            self.choices[same] = later, budget
        for kept in (self.choices, self.trials):
            for oldest in list(kept)[:-KEPT]:
                kept.pop(oldest, None)
        return chosen, budget

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
        found, budget = self.fitting(args, kwargs, names)
        why = f"{_spelled(found.chunks)}, at most {told(_promised(found))} of {told(budget)}"
        return replace(self.make(found.chunks, False).explanation(args, kwargs, names), name=repr(self), why=why)


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


def _promised(found: Trial) -> int:
    """The bytes that a call with these chunks never exceeds."""
    return found.peak + RESERVE


def _kept_since(before: int, more: int = 0) -> int:
    """What Python and libraries keep of what was done since then, and so much more, above what is in reserve for it."""
    gc.collect()
    given_back()
    return max(0, resident() - before + more - OF_PYTHON)


def _too_little(budget: int, least: Trial, taken: int) -> BudgetError:
    found, results, size = least.footprint, least.footprint.results, _promised(least) + taken
    beside = f" and {told(taken)} that Python keeps of the search, once" if taken else ""
    error = BudgetError(
        f"it does not fit {told(budget)}. The least that it takes in up to {thresholds.TRIED_PASSES} chunks is "
        f"{told(size)}, {_spelled(least.chunks)}: the result has {told(results)}, and the most is in use at "
        f"`{found.at}`, with {told(RESERVE)} for what libraries load and keep{beside}. Give memory={told(size)!r}, or "
        "a smaller batch."
    )
    error.least = size
    return error
