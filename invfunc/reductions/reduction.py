"""What a reduction is: what a statistic keeps of the shares, and how that folds over samples, columns and
parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch

from invfunc.per_sample import Shares

State = tuple[Any, ...]
"""What a reduction keeps of one parameter and one block: tensors, or objects of its own."""


@dataclass
class Found:
    """What is known once all shares are reduced."""

    n: int
    """How many samples were reduced."""
    columns: int
    outputs: list[torch.Size]
    """The shapes of the model's outputs for one sample."""
    structure: Any
    """The tree structure of the outputs."""
    joint: torch.Tensor | None = None
    reduced: bool = False
    """Whether the results of the parameters have been put through a function of the caller's."""
    refused: dict[str, str] = field(default_factory=dict)
    """The parameters that have no result, and why."""


class Reduction:
    """A fold: `partial` of one block, `over_samples` and `over_columns` of two of them, `finish` of the whole."""

    axes: ClassVar[tuple[str, ...]] = ("outputs", "samples", "params")
    """What it folds over."""
    each: ClassVar[tuple[int, ...]] = ()
    """The axes of each result that count the samples; `sample_axes` returns them unless it is overridden."""
    several: ClassVar[bool] = False
    """Whether the caller gets a tuple of results."""
    rooted: ClassVar[Literal["no", "known", "all"]] = "no"
    """The losses whose columns have to be those of a square root of the Hessian, without weights beside them: none,
    those of known structure, or all."""
    stages: ClassVar[int] = 1
    """How many reductions run one after the other: this one, and those that `then` gives."""
    thin: ClassVar[bool] = False
    """Whether large columns come best one by one, of all samples at once."""
    forms: ClassVar[Literal["no", "blocks", "all"]] = "no"
    """Whether it forms the shares of each sample: of some at a time, or of all, which are the result."""
    squares: ClassVar[bool] = False
    """Whether it keeps matrices that are as wide as the sides of a parameter."""
    paired: ClassVar[bool] = False
    """Whether it wants to know which bias belongs to which weight."""
    shortcuts: ClassVar[Literal["no", "narrow", "all"]] = "no"
    """Whether other columns with the same products would do ("narrow"), and those of several groups at once ("all")."""
    constants: tuple[torch.Tensor, ...] = ()
    """Tensors of the caller's in which the result has a derivative, too."""
    before: ClassVar[Reduction | None] = None
    """What has to be known of all parameters before the first partial result; `joint` makes one tensor of it."""

    def joint(self, states: list[State], zeros: torch.Tensor) -> torch.Tensor:
        """The tensor that every `partial` gets, made of what `before` kept of all parameters that influence the result;
        `zeros` has an entry for each sample."""
        raise NotImplementedError  # only where there is something before

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        """What is kept of one parameter and one block."""
        raise NotImplementedError  # each statistic says it

    def directly(self, rows: torch.Tensor) -> State:
        """The state for a result that is known entry by entry: `[samples, *p]`, or the sum over the samples `[1, *p]`
        if the result has no sample axis."""
        raise NotImplementedError  # only where columns are squared

    def over_samples(self, a: State, b: State) -> State:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    def over_columns(self, a: State, b: State) -> State:
        return tuple(x + y for x, y in zip(a, b, strict=True))

    def finish(self, state: State, found: Found) -> list[Any]:
        """The results of one parameter: one, unless the caller gets several trees."""
        return [state[0]]

    def zero(self, leaf: torch.Tensor, found: Found) -> list[Any]:
        """The results of a parameter that has no influence."""
        return [torch.zeros_like(leaf)]

    def without(self, leaf: torch.Tensor, samples: int, columns: int) -> State | None:
        """What is kept of samples that do not reach a parameter; None where they add nothing."""
        return None

    def sample_axes(self, found: Found) -> tuple[int, ...]:
        """The axes of the results of a parameter that count the samples."""
        return self.each

    def then(self, results: dict[int, list[Any]]) -> Reduction:
        """What to reduce next of the same columns, given the results of all parameters."""
        raise NotImplementedError  # only with several stages

    def assemble(self, trees: list[Any], found: Found) -> Any:
        """What the caller gets, of trees like the parameters."""
        return trees[0]
