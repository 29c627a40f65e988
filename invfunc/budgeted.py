"""A function in as few chunks as a memory budget allows."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from invfunc import thresholds, tree
from invfunc._functorch import dispatched, transforming
from invfunc.budget.footprint import BY_HAND, SLACK, Footprint, certain, footprint, unpredictable, warmed
from invfunc.budget.search import Chunks, Trial, search
from invfunc.budget.size import in_bytes, resident, told
from invfunc.callables import describe
from invfunc.errors import ArgumentError, BudgetError, InvFuncError
from invfunc.plan import AxisName
from invfunc.recording.problem import batch_dims, batch_size
from invfunc.sparsity.report import Explanation
from invfunc.statistic import Statistic
from invfunc.transform import ArgumentNames, Transform

Make = Callable[[Chunks, bool], Any]
"""The function in some chunks; the second says whether it may tell of its progress."""

_ORDER: tuple[AxisName, ...] = ("samples", "outputs", "params")


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
    outermost = True  # what is around it would have memory of its own

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
        lengths = self._lengths(args, kwargs, names)
        drawn = [d.generator for d in self.f.drawings] if isinstance(self.f, Statistic) else []
        warmed()
        gc.collect()  # what nobody needs any more is not to be freed in the middle of it

        def measure(chunks: Chunks) -> Footprint | None:
            try:
                return certain(footprint(self.make(chunks, False), args, kwargs, drawn))
            except Exception as error:
                if chunks:  # it cannot be divided so
                    return None
                if isinstance(error, InvFuncError):
                    raise
                raise unpredictable(f"without numbers it fails ({str(error).splitlines()[0]})") from error

        budget, before, taken = in_bytes(self.size), resident(), 0
        found, least = search(measure, lengths, budget)
        if (grown := resident() - before) > SLACK // 2:  # what torch and Python keep of a first prediction
            taken = grown
            found, least = search(measure, lengths, budget - taken)
        if found is None:
            raise _too_little(budget, least, taken)
        return found, budget

    def _lengths(self, args: tuple, kwargs: dict[str, Any], names: Any) -> dict[AxisName, int | None]:
        """How long each axis is that can be divided; nobody knows beforehand how many columns there are."""
        if isinstance(self.f, Statistic):
            problem = self.f.problem(args, kwargs, names)
            known: dict[AxisName, int | None] = {"samples": problem.n, "outputs": None, "params": len(problem.leaves)}
        else:
            known = {"samples": batch_size(args, batch_dims(self.in_dims, list(range(1, len(args)))), names)}
        return {axis: known[axis] for axis in _ORDER if axis in self.axes}


class BudgetedStatistic(Budgeted):
    """A statistic in the chunks that its arguments ask for."""

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """How it would be computed at these arguments, and in how much memory."""
        found, budget = self.fitting(args, kwargs, names)
        why = f"{_spelled(found.chunks)}, at most {told(found.peak)} of {told(budget)}"
        return replace(self.make(found.chunks, False).explanation(args, kwargs, names), name=repr(self), why=why)


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


def _too_little(budget: int, least: Trial, taken: int) -> BudgetError:
    found, results, needed = least.footprint, least.footprint.results, least.peak + taken
    error = BudgetError(
        f"it does not fit {told(budget)}. The least that it takes in up to {thresholds.TRIED_PASSES} passes is "
        f"{told(needed)}, {_spelled(least.chunks)}: the result has {told(results)}, and the most is in use at "
        f"`{found.at}`. Give memory={told(needed)!r}, or a smaller batch."
    )
    error.least = needed
    return error
