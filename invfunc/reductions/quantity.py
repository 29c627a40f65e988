"""Quantities: reductions of some columns, and the facts about them so far."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch

from invfunc._torch.values import room
from invfunc.linear_algebra.contract import in_place
from invfunc.loss.drawn import Source, of_samples
from invfunc.loss.peeled import Peel
from invfunc.reductions import Reduction, State, States


@dataclass(frozen=True, eq=False)
class ColumnKind:
    """The columns that a statistic is made of, and what they need."""

    why: str = ""
    """How they are pulled back, where that is all there is to say."""
    first_order: bool = False
    """Whether it is one, the gradient of the loss: then the outputs of the model need not be known."""
    convex: bool = False
    """Whether they are those of a loss that has to be convex in the outputs of the model, which have to be known."""
    second_order: bool = False
    """Whether those of the nonlinear operations of the model are added to those of the loss."""
    averaged: bool = False
    """Whether one matrix, averaged over the samples at each layer, stands for them."""
    of_model: Literal["no", "yes", "unless it returns a loss"] = "no"
    """Whether they are the rows of the Jacobian of a model function."""


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
    """How many are taken as they are, where all others are mixed."""
    key: int | None = None
    """Where it is given, each sample has a generator by itself, which the key and its place in the data set make."""
    first: int = 0
    """How many samples came in other batches before."""
    each: tuple[torch.Generator, ...] = ()
    """Those generators, where they are made already."""

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
    """Whether results of all parameters together are wanted as such."""
    states: States = field(default_factory=dict)
    aside: dict[str, Any] = field(default_factory=dict)
    """What numbers of all parameters take of each of these, by its path."""
    columns: int = 1
    filled: dict[int, int] = field(default_factory=dict)
    """How many rows of each parameter are written to their places."""
    added: set[int] = field(default_factory=set)
    """The parameters of which the state of the present block of samples was added."""
    known: Any = None
    """What it has learned of the phase before."""
    before: Accumulator | None = field(init=False)
    """What the phase before has kept."""

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
