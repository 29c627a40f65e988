"""Reductions: the state that a statistic keeps of the shares, and the fold of it over samples, columns and
parameters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial, reduce
from typing import Any, ClassVar, Literal

import torch

from invfunc.plan import AxisName

State = tuple[Any, ...]
"""What a reduction keeps of one parameter and one block, unrounded: tensors, or objects of its own."""
States = dict[int, State]
"""What a reduction keeps of each parameter that influences the result."""
Over = Literal["samples", "columns", "params"]
Shortcuts = Literal["no", "narrow", "positions", "all"]


@dataclass(frozen=True)
class Found:
    """Facts that are known once all shares are reduced."""

    n: int
    """How many samples were reduced."""
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
    """What is set aside of each parameter, by its path."""
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
    """What it folds over."""
    each: ClassVar[tuple[int, ...]] = ()
    """The axes of each result that count the samples; `sample_axes` returns them unless it is overridden."""
    row_axis: ClassVar[int | None] = None
    """The axis of what is kept of a parameter that counts the samples, where these are one behind the other."""
    several: ClassVar[bool] = False
    """Whether the caller gets a tuple of results."""
    trees: ClassVar[int] = 0
    """How many of the results, the first ones, have a number for each entry of the parameters."""
    keeps: ClassVar[bool] = False
    """Whether it keeps the shares themselves."""
    rooted: ClassVar[Literal["no", "known", "all"]] = "no"
    """The square roots that it is made for: exact columns are shared, in one pullback, by those of one kind."""
    squares: ClassVar[bool] = False
    """Whether it keeps matrices that are as wide as the sides of a parameter, of shapes in `bound`."""
    by_column: ClassVar[bool] = False
    """Whether it keeps something of each column, so that those of all samples have to be of the same outputs."""
    pooled: ClassVar[bool] = False
    """Whether what is kept of the parameters is added up as it comes, if the result is of all together: the samples
    are never divided."""
    pairs: ClassVar[bool] = False
    """Whether it is of all pairs of samples, so that other batches come with their pairs with these."""
    paired: ClassVar[bool] = False
    """Whether it wants to know which bias belongs to which weight."""
    shortcuts: Shortcuts = "no"
    """Whether other columns with the same products would do ("narrow"), also those of several groups in one cotangent,
    if they are at different positions ("positions"), or if the shares of each group are told apart ("all")."""
    rounded: ClassVar[bool] = True
    """Whether results are rounded to the dtype of the parameters."""
    constants: tuple[torch.Tensor, ...] = ()
    """Tensors of the caller's in which the result has a derivative, too."""
    whole: bool = False
    """Whether the result is of all parameters together; else each has one."""
    gaps: bool = False
    """Whether the result of a parameter may be None."""
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

    def learned(self, states: States, found: Found) -> Any:
        """The facts it needs from the phase before about the parameters that influence the result: in tensors
        and numbers, so that it can be written down."""
        return self.learned_apart(states, found)

    def learned_apart(self, states: States, found: Found) -> dict[int, Any]:
        """The facts it needs about each of some parameters, where each stands alone."""
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
        raise NotImplementedError  # only of the columns of a loss that is given apart

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
