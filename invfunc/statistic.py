"""Statistics: reductions of some columns, made of a function by a transform."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from invfunc._extras import ticking
from invfunc._torch.generators import set_states, states_of, torchs_own
from invfunc._torch.values import anywhere
from invfunc.callables import check_functions, describe
from invfunc.core.evaluate import kept
from invfunc.core.explained import explained
from invfunc.core.ways import Way, by_ways
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.kinds import Drew
from invfunc.plan import AxisName, Explanation, Options, joined
from invfunc.problem import BoundProblem, InDims, beside, nothing, problem, with_aux
from invfunc.reductions import Reduction
from invfunc.reductions.reduction import GRADIENT, ColumnKind, Drawing, Quantity
from invfunc.transform import Transform

T = TypeVar("T")


@dataclass(frozen=True, repr=False)
class Statistic(Transform):
    """A function `(params, *batch) -> pytree like params`, made of a function by a transform."""

    name: str
    f: Callable
    reduction: Reduction
    kind: ColumnKind = GRADIENT
    loss: Callable | None = None
    argnums: int | tuple[int, ...] = 0
    in_dims: InDims = 0
    out_dims: int = 0
    has_aux: bool = False
    samples: Any = None
    others: tuple | None = None
    """Another batch, whose samples come behind those of a call."""
    drawing: Drawing | None = None
    options: Options = field(default_factory=Options)
    members: tuple[Statistic, ...] = ()
    """The statistics whose results come together."""
    spelled: str = ""
    """The options of the transform that make it another statistic of that name, as they stand in a call."""
    shown: str | None = None
    """Text of `repr`, where a relative of `chunked` made it of another statistic."""

    called: tuple[Hashable, ...] = field(init=False, compare=False)
    """Names of all that is asked of f."""
    drawings: list[Drawing] = field(init=False, compare=False)
    """Drawings of its columns, or of those of its members."""
    _asked: list[Quantity] = field(init=False, compare=False)
    """Its quantity, or those of its members."""
    _in_parts: bool = field(init=False, compare=False)
    """True if samples are divided, or what is divided has to come in phases."""
    _may_be_empty: bool = field(init=False, compare=False)
    """True if a batch without samples has a result."""

    def __post_init__(self) -> None:
        check_functions(self.name, self.f, self.loss)
        members, splits = self.members or (self,), self.options.plan.splits
        kinds = {m.kind for m in members}
        alone = self.loss is None and self.samples is None and self.others is None
        vars(self).update(
            called=(self.name + self.spelled, *[m.name + m.spelled for m in self.members]),
            drawings=[m.drawing for m in members if m.drawing is not None],
            _asked=[m.quantity for m in members],
            _in_parts=bool(splits.get("samples")) or (bool(splits) and self.sweeps > 1),
            _may_be_empty=alone
            and all([kind.first_order or kind.of_model == "unless it returns a loss" for kind in kinds]),
        )

    def __repr__(self) -> str:
        loss = "" if self.loss is None else f", {describe(self.loss)}"
        return self.shown or f"{self.name}({describe(self.f)}{loss}{self.spelled})"

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        given = self.problem(args, kwargs, names)
        if not given.n:
            results, aux = self._of_nothing(self._engine(given), names)
        elif self._in_parts:
            results, aux = self._engine(given).result()
        else:
            undo = self._undo()
            run = partial(kept, given, self._quantities(given), self.options, undo=undo)
            found = by_ways(self.f, self.called, self._ticking(run, given.n) if self.options.progress else run, undo)
            results, aux = found.results, found.aux
            if given.others:
                with suppress(Drew):  # what is drawn for a batch alone is another sequence
                    self._engine(given).check_others()
        return tuple(results) if self.members else results[0], aux

    def _ticking(self, run: Callable[..., T], n: int) -> Callable[[Way], T]:
        """A run that shows its progress."""

        def shown(way: Way) -> T:
            with ticking(self.options.progress, n) as ticks:
                ticks.reach(n)
                return run(way, ticks=ticks)

        return shown

    def _of_nothing(self, engine: Engine, names: Any) -> tuple[list[Any], Any]:
        """The state of no samples, where f gives no losses or a sum of none, and aux."""
        given = engine.problem
        with torch.no_grad():
            found = given.f(*given.args, **given.kwargs)
        losses, aux = with_aux(found) if given.has_aux else (found, None)
        sums = isinstance(losses, torch.Tensor) and losses.ndim < 2 and not losses.numel()
        if not sums and not (isinstance(losses, torch.Tensor) and losses.ndim == 0 and not anywhere(losses != 0)):
            raise nothing(names[next(i for i, dim in given.dims.items() if dim is not None)])
        return engine.finished(), aux

    def engine(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Engine:
        """The evaluation at these arguments."""
        return self._engine(self.problem(args, kwargs, names))

    def evaluating(self, args: tuple, kwargs: dict[str, Any], work: Callable[[Engine], T]) -> T:
        """The result of what is done with the evaluation at these arguments; an error says which call it is of."""
        return self.told(lambda *call: (work(self.engine(*call)), None), self.names, args, kwargs)[0]

    def _engine(self, given: BoundProblem) -> Engine:
        return Engine(given, self.options, self._quantities(given), (*self.called, "in parts"))

    def without_samples(self, params: Any) -> Engine:
        """The evaluation of no samples, which has parameters only."""
        given = BoundProblem.of_no_samples(self, params, isinstance(self.argnums, tuple))
        return Engine(given, self.options, self._quantities(given))

    def _quantities(self, given: BoundProblem) -> list[Quantity]:
        """The quantities that it reduces, for the parameters of a problem."""
        found = list[Quantity]()
        for q in self._asked:
            reduction = q.reduction.at(given)
            found.append(q if reduction is q.reduction else replace(q, reduction=reduction))
        return found

    def problem(self, args: tuple, kwargs: dict[str, Any], names: Any) -> BoundProblem:
        """The arguments of a call, sorted."""
        dims, empty = (self.in_dims, self.out_dims), self._may_be_empty
        given = problem(self.f, self.loss, args, kwargs, self.argnums, *dims, self.has_aux, names, self.samples, empty)
        return given if self.others is None else beside(given, self.others, names)

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """The explanation of a call with these arguments."""
        given = self.problem(args, kwargs, names)
        if not given.n:
            raise nothing(names[next(i for i, dim in given.dims.items() if dim is not None)])
        quantities, undo = self._quantities(given), self._undo()

        def call(way: Way) -> list[Explanation]:
            return explained(given, quantities, self.options, way, undo)

        try:
            each = by_ways(self.f, self.called, call, undo)
        finally:
            undo()
        if not self.members:
            return replace(each[0], name=repr(self))
        each = [replace(e, name=repr(m)) for m, e in zip(self.members, each, strict=True)]
        return joined(repr(self), each, [m.quantity.columns for m in self.members])

    def _undo(self) -> Callable[[], None]:
        """A context that undoes the draws that come behind it."""
        generators = [*torchs_own(), *[d.generator for d in self.drawings]]
        return partial(set_states, states_of(generators))

    @property
    def quantity(self) -> Quantity:
        """The reduction and its columns."""
        return Quantity(self.reduction, self.kind, self.drawing)

    @property
    def sweeps(self) -> int:
        """The number of times that it has to see all samples."""
        return max(m.reduction.sweeps for m in self.members or (self,))

    def keyed(self, keys: dict[Drawing, int], first: int) -> Statistic:
        """The statistic of a batch behind so many samples, each of which draws from a generator of its own."""
        return self.drawn_by(lambda d: replace(d, key=keys[d], first=first))

    def drawn_by(self, drawn: Callable[[Drawing], Drawing]) -> Statistic:
        """The statistic with other drawings in place of its own."""
        drawing = None if self.drawing is None else drawn(self.drawing)
        return replace(self, drawing=drawing, members=tuple(m.drawn_by(drawn) for m in self.members))

    @property
    def several(self) -> bool:
        return bool(self.members) or self.reduction.several

    @property
    def owned(self) -> bool:
        return self.options.reduce is None  # else it gives what the caller's function has made

    @property
    def axes(self) -> tuple[AxisName, ...]:
        """The axes that it can be chunked over; the first is the default of `chunked`."""
        if self.members:
            return tuple(a for a in ("outputs", "samples", "params") if all(a in m.axes for m in self.members))
        return tuple(a for a in self.reduction.axes if a != "outputs" or not self.kind.first_order)
