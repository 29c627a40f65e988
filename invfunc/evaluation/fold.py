"""From what is kept of some samples to results: what several quantities keep, and their phases."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import reduce
from typing import Any

import torch

from invfunc import tree
from invfunc._extras import Ticks
from invfunc.arguments.problem import BoundProblem
from invfunc.plan import Options
from invfunc.reductions import Found, Reduction, States
from invfunc.reductions.reduction import Accumulator, Quantity

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

    def keeping(self, k: int) -> list[Accumulator]:
        """The accumulators that keep something in a phase, with what has to know of each sample alone."""
        pairs = ((own, own.before if own.reduction.apart else None) for own in self.of_phase(k))
        return [t for pair in pairs for t in pair if t is not None]

    # What it has kept in a phase, as a tree of tensors and numbers

    def state(self, k: int) -> dict[str, Any]:
        """All that its samples have brought in a phase."""
        outputs = [tuple(shape) for shape in self.found.outputs]
        places = tree.unflatten([*range(len(outputs))], self.found.structure)
        kept = [(dict(t.states), t.columns) for t in self.keeping(k)]
        return {"n": self.found.n, "outputs": outputs, "structure": places, "kept": kept}

    def keep(self, k: int, state: dict[str, Any]) -> None:
        """Have it kept, in place of what is kept now."""
        shapes, structure = [*map(torch.Size, state["outputs"])], tree.flatten(state["structure"])[1]
        self.found = replace(self.found, n=state["n"], outputs=shapes, structure=structure)
        for t, (states, columns) in zip(self.keeping(k), state["kept"], strict=True):
            t.states, t.columns = dict(states), columns

    def behind(self, k: int, state: dict[str, Any]) -> None:
        """Put what other samples have brought in front of what is kept."""
        n, own = state["n"], self.found.n
        for t, (states, columns) in zip(self.keeping(k), state["kept"], strict=True):
            t.after(states, columns, self.problem.leaves, n, own)
        self.found = replace(self.found, n=n + own)

    # Results

    def finished(self) -> list[Any]:
        """The results of each quantity."""
        return [*map(self._finished, self.accumulators)]

    def _finished(self, t: Accumulator) -> Any:
        reduction, before, found = t.reduction, t.before, self._found(t)
        if reduction.whole and self.options.reduce is None:
            return reduction.assemble(self._whole(t), found)
        parts = zip(*[self._closed(t, i, found) for i in range(len(self.problem.leaves))], strict=True)
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

    def _closed(self, t: Accumulator, place: int, found: Found) -> list[Any]:
        """The results of one parameter."""
        leaf, reduction, reduced = self.problem.leaves[place], t.reduction, self.options.reduce
        state = t.states.pop(place, None) or reduction.init(leaf, found.n, found.columns)
        aside = reduction.aside(state, found)
        if aside is not None:
            found.aside[self.problem.paths[place]] = aside
        results = reduction.finish(state, found)
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
