"""Reductions: the state that a statistic keeps of the shares, its fold, and the columns that it is made of."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, ClassVar, Literal

import torch

from invfunc._torch.values import room
from invfunc.linear_algebra.contract import in_place
from invfunc.loss.drawn import Peel, Source, of_samples
from invfunc.plan import AxisName

State = tuple[Any, ...]
"""State of a reduction for one parameter and one block, unrounded: tensors, or objects of its own."""
States = dict[int, State]
"""State of a reduction for each parameter that influences the result."""
Over = Literal["samples", "columns", "params"]
Shortcuts = Literal["no", "narrow", "positions", "all"]


@dataclass(frozen=True)
class Found:
    """Facts that are known once all shares are reduced."""

    n: int
    """Number of samples that were reduced."""
    columns: int
    outputs: list[torch.Size]
    """The shapes of the model's outputs for one sample."""
    structure: Any
    """The tree structure of the outputs."""
    dtype: torch.dtype
    """One for numbers that are of all parameters."""
    before: Any = None
    """The result of the phase before, if it is of all parameters together."""
    aside: dict[str, Any] = field(default_factory=dict)
    """Numbers that are set aside of each parameter, by its path."""
    refused: dict[str, str] = field(default_factory=dict)
    """The parameters that have no result, and why."""


class Reduction:
    """A fold: `init` without any shares, `step` of one block of them, `merge` of two, `finish` of the whole.

    What is kept between these is not rounded; results are, to the dtype of the parameters. A reduction of two phases
    says in `before` what the first keeps, in `learned` what it has to know of that, and is, `knowing` it, the reduction
    whose steps come in the second, as `InEigenbasis` is. Where parameters have `units` both phases are made of a unit
    at once, `jointly`.
    """

    axes: ClassVar[tuple[AxisName, ...]] = ("outputs", "samples", "params")
    """Axes over which it folds."""
    each: ClassVar[tuple[int, ...]] = ()
    """The axes of each result that count the samples; `sample_axes` returns them unless it is overridden."""
    row_axis: ClassVar[int | None] = None
    """The axis of what is kept of a parameter that counts the samples, where these are one behind the other."""
    several: ClassVar[bool] = False
    """True if the caller gets a tuple of results."""
    trees: ClassVar[int] = 0
    """Number of the results, the first ones, that have a number for each entry of the parameters."""
    keeps: ClassVar[bool] = False
    """True if it keeps the shares themselves."""
    rooted: ClassVar[Literal["no", "known", "all"]] = "no"
    """The square roots that it is made for: exact columns are shared, in one pullback, by those of one kind."""
    squares: ClassVar[bool] = False
    """True if it keeps matrices that are as wide as the sides of a parameter, of shapes in `bound`."""
    by_column: ClassVar[bool] = False
    """True if it keeps something of each column, so that those of all samples have to be of the same outputs."""
    pooled: ClassVar[bool] = False
    """True if what is kept of the parameters is added up as it comes, if the result is of all together: the samples
    are never divided."""
    pairs: ClassVar[bool] = False
    """True if it is of all pairs of samples, so that other batches come with their pairs with these."""
    paired: ClassVar[bool] = False
    """True if it wants to know which bias belongs to which weight."""
    power: int = 0
    """The power of the columns in all that it keeps; 0 if their scale is never another one."""
    shortcuts: Shortcuts = "no"
    """True if other columns with the same products would do ("narrow"), also those of several groups in one cotangent,
    if they are at different positions ("positions"), or if the shares of each group are told apart ("all")."""
    rounded: ClassVar[bool] = True
    """True if results are rounded to the dtype of the parameters."""
    constants: tuple[torch.Tensor, ...] = ()
    """Tensors of the caller's in which the result has a derivative, too."""
    whole: bool = False
    """True if the result is of all parameters together; else each has one."""
    gaps: bool = False
    """True if the result of a parameter may be None."""
    before: Reduction | None = None
    """The first of two phases."""
    units: tuple[str, ...] | None = None
    """The unit of each parameter, if all parameters of a unit have to be known at once."""

    @property
    def apart(self) -> bool:
        """Tells whether the phase before keeps what is of each sample alone: then the second can follow at once,
        before other samples are seen."""
        return self.before is not None and bool(self.before.each)

    @property
    def phases(self) -> list[Reduction]:
        """This one, after all that come before it."""
        return [self] if self.before is None else [*self.before.phases, self]

    @property
    def sweeps(self) -> int:
        """The number of times all samples have to be seen."""
        return 1 if self.before is None or self.apart else self.before.sweeps + 1

    def learned(self, states: States, found: Found) -> dict[int, Any]:
        """The facts it needs from the phase before about each of some parameters that influence the result: in tensors
        and numbers, so that they can be written down."""
        raise NotImplementedError  # only where there is something before

    def knowing(self, learned: Any) -> Reduction:
        """This reduction, with what it has to know."""
        raise NotImplementedError  # only where there is something before

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        """The state of n samples that a parameter has no influence on."""
        return (torch.zeros_like(leaf),)

    def step(self, shares: Any) -> State:
        """The state of one parameter and one block, given its `Shares`."""
        raise NotImplementedError  # each statistic says it

    def directly(self, rows: torch.Tensor) -> State:
        """The state where entries are known one by one: `[samples, *p]`, or the sum over the samples `[1, *p]` if
        the result has no sample axis."""
        raise NotImplementedError  # only where columns are squared

    def jointly(self, shares: Sequence[Any]) -> Iterator[tuple[int, State, State]]:
        """The number of each parameter of a unit, and the states of the phase before and of this one."""
        raise NotImplementedError  # only where there are units

    def at(self, problem: Any) -> Reduction:
        """The reduction for the parameters of a problem, which has their `leaves` and `paths`."""
        return self

    def bound(self, shape: torch.Size) -> list[list[int]]:
        """Shapes that are nearly as large or larger, from that of a parameter."""
        return []

    def merge(self, a: State, b: State, over: Over) -> State:
        """The state of two blocks of samples, of columns, or, for a result of all together, of two parameters."""
        if over == "samples" and self.row_axis is not None:
            return tuple(torch.cat(pair, self.row_axis) for pair in zip(a, b, strict=True))
        return tuple(x + y for x, y in zip(a, b, strict=True))

    def add(self, states: States, leaf: int, over: Over, state: State) -> None:
        """Merge what is kept of another block of a parameter with what is kept of those before, if there are any."""
        states[leaf] = self.merge(states[leaf], state, over) if leaf in states else state

    def scaled(self, state: State, by: float) -> State:
        """The state of columns that are `by` times as large."""
        assert self.power, "only of the columns of a loss that is given apart"
        return tuple(x * by**self.power for x in state)

    def together(self, states: States) -> State:
        """The state of several parameters."""
        return reduce(partial(self.merge, over="params"), states.values())

    def finish(self, state: State, found: Found) -> list[Any]:
        """The results of one parameter, or of all together: one, unless the caller gets several trees."""
        return [state[0]]

    def aside(self, state: State, found: Found) -> Any:
        """The part of a number of all parameters that comes of one, beside the results that each has; it is not
        rounded.
        """
        return None

    def sample_axes(self, found: Found) -> tuple[int, ...]:
        """The axes of the results of a parameter that count the samples."""
        return self.each

    def assemble(self, results: list[Any], found: Found) -> Any:
        """The result for the caller: trees like the parameters, or one of all together."""
        return results[0]


@dataclass(frozen=True, eq=False)
class ColumnKind:
    """The columns that a statistic is made of, and what they need."""

    why: str = ""
    """Way in which they are pulled back, where that is all there is to say."""
    first_order: bool = False
    """True if it is one, the gradient of the loss: then the outputs of the model need not be known."""
    convex: bool = False
    """True if they are those of a loss that has to be convex in the outputs of the model, which have to be known."""
    second_order: bool = False
    """True if those of the nonlinear operations of the model are added to those of the loss."""
    averaged: bool = False
    """True if one matrix, averaged over the samples at each layer, stands for them."""
    of_model: Literal["no", "yes", "unless it returns a loss"] = "no"
    """True if they are the rows of the Jacobian of a model function."""


GRADIENT = ColumnKind("there is one gradient", first_order=True)
GGN = ColumnKind(convex=True)
HESSIAN = ColumnKind("those of the loss, and those of the nonlinear operations", second_order=True)
CHAIN = ColumnKind("one matrix, averaged over the samples at each layer", convex=True, averaged=True)
JACOBIAN = ColumnKind("the rows of the Jacobian", of_model="yes")
GRADIENT_OR_JACOBIAN = ColumnKind("the gradient, or the rows of the Jacobian", of_model="unless it returns a loss")


@dataclass(frozen=True)
class Drawing:
    """Columns that are drawn at random; `sample(outputs, generator)` draws targets for a loss of the user's."""

    count: int
    generator: torch.Generator
    sample: Callable | None = None
    peel: Peel | None = None
    """Number of those that are taken as they are, where all others are mixed."""
    key: int | None = None
    """Key, with which each sample has a generator by itself, made of it and of the sample's place in the data set."""
    first: int = 0
    """Number of samples that came in other batches before."""
    each: tuple[torch.Generator, ...] = ()
    """Generators of the samples, where they are made already."""

    def source(self, n: int) -> Source:
        """The source of draws for n samples."""
        if self.each:
            return self.each
        if self.key is None:
            return self.generator
        return of_samples(self.key, self.first, n, self.generator.device)


@dataclass(frozen=True)
class Quantity:
    """One result: what is reduced, and of which columns."""

    reduction: Reduction
    kind: ColumnKind
    drawing: Drawing | None = None

    @property
    def columns(self) -> Hashable:
        """A key that quantities share if they reduce the same columns."""
        return self.kind, self.drawing, self.reduction.rooted if self.drawing is None else None

    def factor(self, by: float) -> float:
        """The factor of its columns where the loss is `by` times as large: those other than its
        gradient are of a square root of its Hessian."""
        return by if self.kind.first_order else by**0.5


@dataclass
class Accumulator:
    """The state of a reduction so far."""

    quantity: Quantity
    reduction: Reduction
    whole: bool = False
    """True if results of all parameters together are wanted as such."""
    states: States = field(default_factory=dict)
    aside: dict[str, Any] = field(default_factory=dict)
    """Parts of the numbers of all parameters that come of each, by its path."""
    columns: int = 1
    filled: dict[int, int] = field(default_factory=dict)
    """Number of rows of each parameter that are written to their places."""
    added: set[int] = field(default_factory=set)
    """The parameters of which the state of the present block of samples was added."""
    known: Any = None
    """Facts that it has learned of the phase before."""
    before: Accumulator | None = field(init=False)
    """States of the phase before."""

    def __post_init__(self) -> None:
        first = self.reduction.before
        self.before = None if first is None else Accumulator(self.quantity, first)

    @property
    def pooled(self) -> bool:
        """Tells whether what it keeps of all parameters is one state, that of the first."""
        return self.whole and self.reduction.whole and self.reduction.pooled

    @property
    def line(self) -> list[Accumulator]:
        """This one, after those before it that have to see all samples first."""
        return [self] if self.before is None or self.reduction.apart else [*self.before.line, self]

    def end(self, leaves: list[torch.Tensor], n: int, room: int = 0) -> None:
        """Add what is kept of the parameters that the n samples of a block do not reach."""
        for i, leaf in enumerate(leaves):
            if i not in self.added:
                self.add(i, self.reduction.init(leaf, n, self.columns), room)
        self.added = set()
        if self.before is not None and self.reduction.apart:
            self.before.end(leaves, n)

    def behind(self, earlier: Accumulator, phase: int) -> Accumulator:
        """It, as the phases before have left an earlier one; that one itself, if there is nothing more to keep."""
        if self.reduction.sweeps <= phase:
            return earlier
        self.reduction, self.known = earlier.reduction, earlier.known
        if self.before is not None and earlier.before is not None:
            self.before = self.before.behind(earlier.before, phase)
        return self

    def know(self, learned: Any) -> None:
        """Go on, given what is known of the phase before."""
        self.reduction, self.known = self.reduction.knowing(learned), learned

    def saved(self) -> dict[str, Any]:
        """All that was kept and learned, in dicts, tensors and numbers."""
        before = None if self.before is None else self.before.saved()
        return {"states": dict(self.states), "columns": self.columns, "known": self.known, "before": before}

    def restore(self, saved: dict[str, Any]) -> None:
        """Keep and know what another one did."""
        self.states, self.columns = dict(saved["states"]), saved["columns"]
        self.filled, self.added = {}, set()
        if saved["known"] is not None:
            self.know(saved["known"])
        if self.before is not None:
            self.before.restore(saved["before"])

    def after(self, states: States, columns: int, leaves: list[torch.Tensor], n: int, own: int) -> None:
        """Put what was kept of n other samples in front of what is kept of these `own` ones."""
        for i in {**states, **self.states}:
            first = states.get(i) or self.reduction.init(leaves[i], n, columns)
            second = self.states.get(i) or self.reduction.init(leaves[i], own, self.columns)
            self.states[i] = self.reduction.merge(first, second, "samples")

    def scaled(self, by: float) -> None:
        """Make the loss so many times as large."""
        columns = self.quantity.factor(by)
        self.states = {i: self.reduction.scaled(state, columns) for i, state in self.states.items()}

    def add(self, leaf: int, state: State, n: int = 0) -> None:
        """Add the state of another block of samples; where there is one state, of another parameter. Of n samples in
        all, rows are written to their places."""
        leaf, over = (0, "params") if self.pooled else (leaf, "samples")
        self.added.add(leaf)
        axis, first = self.reduction.row_axis, n > 0 and leaf not in self.states
        if axis is not None and (leaf in self.filled or (first and in_place(state[0], state[0]))):
            self._write(leaf, state[0], n, axis)
        else:
            self.reduction.add(self.states, leaf, over, state)

    def _write(self, leaf: int, x: torch.Tensor, n: int, axis: int) -> None:
        """Write rows behind those that came before."""
        start, shape = self.filled.get(leaf, 0), [*x.shape[:axis], n, *x.shape[axis + 1 :]]
        (whole,) = self.states.get(leaf) or (room(shape, x),)
        whole = whole.to(torch.promote_types(whole.dtype, x.dtype))
        whole.narrow(axis, start, x.shape[axis]).copy_(x)
        self.states[leaf], self.filled[leaf] = (whole,), start + x.shape[axis]

    def of(self, leaves: list[torch.Tensor]) -> list[torch.Tensor]:
        """The parameters of which it keeps a state."""
        return leaves[:1] if self.pooled else leaves
