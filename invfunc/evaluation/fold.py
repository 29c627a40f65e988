"""From what is kept of some samples to results: what several quantities keep, and their phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from invfunc import tree
from invfunc._extras import Ticks
from invfunc.arguments.problem import BoundProblem
from invfunc.evaluation.rounds import Rounds
from invfunc.plan import Options
from invfunc.reductions import Found, Reduction, State, States
from invfunc.reductions.quantity import Accumulator, Quantity

Learn = Callable[[Reduction, States, Found], Any]
"""Something that a reduction has to know of what the phase before has kept."""


class JointFold:
    """States that several quantities keep of some samples of one function."""

    def __init__(self, problem: BoundProblem, options: Options, quantities: Sequence[Quantity]) -> None:
        self.problem, self.options, self.ticks = problem, options, Ticks()
        self.accumulators = [Accumulator(q, q.reduction, options.reduce is None) for q in quantities]
        n = (problem.n if problem.samples is None else len(problem.samples)) - problem.others
        dtype = reduce(torch.promote_types, (leaf.dtype for leaf in problem.leaves))
        self.found = Found(n, 1, [torch.Size()], tree.flatten(0)[1], dtype)
        self.phase: int | None = None
        """The only one, where the batches come again for each."""
        self.keeper: Divided | None = None
        """Keeps parts of what is kept of parameters that are divided among processes."""

    @property
    def sweeps(self) -> int:
        """Number of times that all samples have to be seen."""
        return max(t.reduction.sweeps for t in self.accumulators)

    def of_phase(self, k: int) -> list[Accumulator]:
        """The accumulators that keep something in a phase."""
        return [t.line[k] for t in self.accumulators if k < len(t.line)]

    def tell(self, k: int, learn: Learn | None = None) -> None:
        """Have a phase know what the one before has kept of all samples."""
        for t in self.of_phase(k):
            assert t.before is not None
            t.know((learn or type(t.reduction).learned)(t.reduction, t.before.states, self._found(t.before)))
            if not t.before.reduction.whole:  # else that is a result, too
                t.before.states = {}

    def number(self, accumulator: Accumulator) -> int:
        """Number of the quantity; -1 if it is of a phase before."""
        return next((k for k, t in enumerate(self.accumulators) if t is accumulator), -1)

    def give(self) -> None:
        """Give what is still kept of parameters that are divided to the keeper, if there is one."""
        if (keeper := self.keeper) is None:
            return
        for number, t in enumerate(self.accumulators):
            for leaf in [i for i in t.states if keeper.takes(number, i)]:
                keeper.keep(number, leaf, t.states.pop(leaf), self.found.n)

    # Results

    def finished(self) -> list[Any]:
        """The results of each quantity."""
        return [self._finished(number, t) for number, t in enumerate(self.accumulators)]

    def _finished(self, number: int, t: Accumulator) -> Any:
        reduction, before, found = t.reduction, t.before, self._found(t)
        if reduction.whole and self.options.reduce is None:
            return reduction.assemble(self._whole(t), found)
        parts = zip(*[self._closed(number, t, i, found) for i in range(len(self.problem.leaves))], strict=True)
        trees = [tree.unflatten([*part], self.problem.structure) for part in parts]
        trees = [tuple(x) if self.problem.several else x[0] for x in trees]
        if before is not None and before.reduction.whole:
            found = replace(found, before=self._whole(before)[0])
        return reduction.assemble(trees, found)

    def _whole(self, t: Accumulator) -> list[Any]:
        """The results of all parameters together."""
        found, reduction, kept = self._found(t), t.reduction, t.states
        places = enumerate(t.of(self.problem.leaves))
        states = {i: kept.pop(i, None) or reduction.init(leaf, found.n, found.columns) for i, leaf in places}
        return self._delivered(reduction, reduction.finish(reduction.together(states), found), found, found.dtype)

    def _closed(self, number: int, t: Accumulator, place: int, found: Found) -> list[Any]:
        """The results of one parameter."""
        leaf, reduction, reduced = self.problem.leaves[place], t.reduction, self.options.reduce
        state = t.states.pop(place, None) or reduction.init(leaf, found.n, found.columns)
        whole = state
        if self.keeper is not None and (reduced is not None or type(reduction).aside is not Reduction.aside):
            whole = self.keeper.whole(number, place, state)
        aside = reduction.aside(whole, found)
        if aside is not None:
            found.aside[self.problem.paths[place]] = aside
        results = reduction.finish(state if reduced is None else whole, found)
        results = self._delivered(reduction, results, found, leaf.dtype)
        if reduced is not None:  # which may write to them
            own = [tree.map_tensors(torch.clone, x) for x in results]
            results = [x if x is None else reduced(self.problem.paths[place], x) for x in own]
        return results

    def _found(self, t: Accumulator) -> Found:
        return replace(self.found, columns=t.columns, aside=t.aside)

    def _delivered(self, reduction: Reduction, results: list[Any], found: Found, dtype: torch.dtype) -> list[Any]:
        """Results in the precision of the parameters, with the samples in the order in which they were chosen."""
        chosen, order = self.problem.samples, None
        if chosen is not None and chosen != sorted(chosen):
            order = sorted(range(len(chosen)), key=chosen.__getitem__)
            order = torch.tensor(sorted(order, key=order.__getitem__), device=self.problem.leaves[0].device)

        def delivered(x: torch.Tensor) -> torch.Tensor:
            if order is not None:
                for axis in reduction.sample_axes(found):
                    x = x.index_select(axis, order[: x.shape[axis]])  # those of another batch come last, in order
            return x.to(dtype) if reduction.rounded else x

        return [tree.map_tensors(delivered, result) for result in results]


@dataclass
class Divided:
    """Keeps parts of what the fold of a batch has kept."""

    rounds: Rounds
    parts: set[tuple[int, int]]
    fold: JointFold
    weight: Callable[[], int]

    def takes(self, number: int, leaf: int) -> bool:
        return self.rounds.takes(number, self.fold.problem.leaves[leaf])

    def keep(self, number: int, leaf: int, state: State, n: int) -> None:
        t = self.fold.accumulators[number]
        by = t.quantity.factor(self.weight())
        state = state if by == 1 else t.reduction.scaled(state, by)
        self.rounds.keep(number, leaf, self.fold.problem.leaves[leaf], state, n)

    def whole(self, number: int, leaf: int, state: State) -> State:
        return self.rounds.whole(self.fold.problem.leaves[leaf], state) if (number, leaf) in self.parts else state
