"""From runs to results: pull the columns back, reduce the shares, and fold what the reductions keep."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial, reduce
from typing import Any, Protocol

import torch

from invfunc import tree
from invfunc._alike import added
from invfunc._extras import Ticks
from invfunc.evaluation.decisions import Decision, Decisions, Look
from invfunc.evaluation.room import check_room, matrices
from invfunc.loss.square_root import Columns, Gradient, Units
from invfunc.passes.by_rows import Places
from invfunc.passes.kfra import averaged, not_a_chain
from invfunc.passes.loss import Made
from invfunc.passes.part import check_versions
from invfunc.passes.pullback import Pullback
from invfunc.passes.run import Run
from invfunc.passes.second_order import entries, read_once, second_order_columns
from invfunc.per_sample.biases import roles
from invfunc.per_sample.cotangents import Samples
from invfunc.plan import Options
from invfunc.recording.problem import Problem
from invfunc.recording.scope import Scope
from invfunc.reductions import Found, Reduction, State, States
from invfunc.reductions.quantity import Accumulator, Quantity

Learn = Callable[[Reduction, States, Found], Any]
"""What a reduction has to know of what the phase before has kept."""
SLOPE = "slope"
"""The key of the gradient of the loss among the columns, which a Hessian needs beside its own."""


class Keeper(Protocol):
    """Keeps parts of what quantities have kept of parameters, both by number, where these are divided."""

    def takes(self, number: int, leaf: int) -> bool: ...
    def keep(self, number: int, leaf: int, state: State, n: int) -> None: ...
    def whole(self, number: int, leaf: int, state: State) -> State: ...  # of all, if what is kept is a part of it


class Fold:
    """What several quantities keep of the runs of one function."""

    def __init__(
        self,
        problem: Problem,
        scope: Scope,
        options: Options,
        quantities: Sequence[Quantity],
        budget: int,
        places: Places,
        report: Any,
    ) -> None:
        """`places` says where the samples are in a run; `report` gathers what would be done, if only that is wanted."""
        self.problem, self.scope, self.options, self.budget = problem, scope, options, budget
        self.places, self.report, self.ticks = places, report, Ticks()
        self.accumulators = [Accumulator(q, q.reduction, options.reduce is None) for q in quantities]
        n = (problem.n if problem.samples is None else len(problem.samples)) - problem.others
        self.decide()
        dtype = reduce(torch.promote_types, (leaf.dtype for leaf in problem.leaves))
        self.found = Found(n, 1, [torch.Size()], tree.flatten(0)[1], dtype)
        self.last = True
        """Whether no other batch follows."""
        self.phase: int | None = None
        """The only one, where the batches come again for each."""
        self.keeper: Keeper | None = None
        """Keeps parts of what is kept of parameters that are divided among processes."""

    def decide(self) -> None:
        """Choose anew how columns are pulled back, as those that follow are of another chunk of samples."""
        self._decisions = Decisions(self.problem, self.scope, self.options)

    def over(
        self, runs: Callable[[], Iterable[Run]], made: Made | Callable[[Run], Made], look: Look | None = None
    ) -> None:
        """Pull the columns back through every run; again, where what comes next has to know what all have brought."""
        last = max(t.reduction.sweeps for t in self.accumulators) - 1
        for k in range(last + 1) if self.phase is None else [self.phase]:
            if k and self.phase is None and self.report is None:
                self.tell(k)
            for run in runs():
                self._consume(run, made(run) if callable(made) else made, look, self.of_phase(k), last=k == last)
                del run  # before the next one is made

    def of_phase(self, k: int) -> list[Accumulator]:
        """What keeps something in a phase."""
        return [t.line[k] for t in self.accumulators if k < len(t.line)]

    def tell(self, k: int, learn: Learn | None = None) -> None:
        """Have a phase know what the one before has kept of all samples."""
        for t in self.of_phase(k):
            assert t.before is not None
            t.know((learn or type(t.reduction).learned)(t.reduction, t.before.states, self._found(t.before)))
            if not t.before.reduction.whole:  # else that is a result, too
                t.before.states = {}

    def units(self, run: Run) -> Made:
        """A unit column for each output of a model function, whose shapes and tree are part of what is found."""
        values = {i: axis.expose(self.scope.leave(z), run.trace.n) for i, (z, axis) in run.outputs.items()}
        out = self.problem.out_dims
        shapes = [[size for d, size in enumerate(z.shape) if d != out % z.ndim] for z, _ in run.outputs.values()]
        self.found = replace(self.found, outputs=[*map(torch.Size, shapes)], structure=run.result)
        return {t.quantity.columns: [Units(values)] for t in self.accumulators}

    def _consume(self, run: Run, made: Made, look: Look | None, accumulators: list[Accumulator], last: bool) -> None:
        check_versions(run.trace.uses)
        run.check()
        samples = self._samples(run)
        self._look(run, [t for t in accumulators if t.reduction.squares])
        self.ticks.reach(run.trace.n)
        alike: dict[Hashable, list[Accumulator]] = {}
        for t in sorted(accumulators, key=_turn):
            t.columns = sum(c.count for c in made[t.quantity.columns])
            alike.setdefault(t.quantity.columns, []).append(t)
        if not samples.count:
            return
        device = self.problem.leaves[0].device.type
        with torch.autocast(device, enabled=False) if torch.is_autocast_enabled(device) else nullcontext():
            for k, (key, group) in enumerate(alike.items()):
                kind = group[0].quantity.kind
                if kind.second_order:
                    self._hessian(run, made[key], made[SLOPE][0], group, samples, look)
                    continue
                if kind.averaged:
                    self._chain(run, made[key], group, samples)
                    continue
                pullback = self._pullback(run, made[key], samples, last=last and k + 1 == len(alike))
                decision = self._decisions.of(pullback, look, group) if kind.convex else Decision("")
                if self.report is not None:
                    self.report.on(pullback, group, decision)
                    continue
                parts = decision.taken(pullback)
                while parts:
                    self._fold(parts.pop(0), group)
        if run.trace.n < self.problem.n and self.report is None:
            for t in accumulators:
                added("samples", partial(t.end, self.problem.leaves, room=self._room(run)), samples.count)

    def _look(self, run: Run, kept: list[Accumulator]) -> None:
        """Tell which operations read the parameters and what matrices are kept of them, or check that these fit."""
        for t in kept:
            if self.report is not None:
                self.report.matrices(run, t, matrices(run, t.reduction, self.scope, self.budget))
            elif not t.states:
                check_room(run, t.reduction, self.scope, self.budget, self.problem.name)
        if self.report is not None:
            self.report.ran(run)

    def _fold(self, pullback: Pullback, group: list[Accumulator]) -> None:
        """Reduce what is pulled back; first, what some have to know of all parameters for each sample."""
        reductions, done = [t.reduction for t in group], partial(self._add, pullback.run, group)
        soon = partial(self._taken, group)
        if not any(m.apart for m in reductions):
            pullback.folded(reductions, done, soon=soon)
            return
        firsts = {k: t.before for k, t in enumerate(group) if t.before is not None and t.reduction.apart}
        kept, places = pullback.kept(reductions), list(firsts)
        states: dict[int, States] = {k: {} for k in firsts}

        def keep(first: int, leaf: int, state: State) -> None:
            added("samples", partial(firsts[places[first]].add, leaf), state)
            states[places[first]][leaf] = state

        replace(pullback, last=False).folded([t.reduction for t in firsts.values()], keep, kept)
        for k, t in firsts.items():
            if states[k]:
                reductions[k] = reductions[k].knowing(reductions[k].learned(states[k], self._found(t)))
        pullback.folded(reductions, done, kept, soon)

    def _pullback(
        self, run: Run, made: list[Columns], samples: Samples, leaves: frozenset[int] | None = None, last: bool = False
    ) -> Pullback:
        plan, name, alone = self.options.plan, self.problem.name, self.options.reduce is not None
        return Pullback(self.scope, run, made, plan, samples, self.budget, leaves, alone, last, name, ticks=self.ticks)

    def _add(self, run: Run, group: list[Accumulator], k: int, leaf: int, state: State) -> None:
        """What a reduction keeps of one parameter in one run; where that is all, the parameter is done."""
        if self.keeper is not None and self._taken(group, k, leaf):
            self.keeper.keep(self._number(group[k]), leaf, state, self._samples(run).count)
            group[k].added.add(leaf)
            return
        added("samples", partial(group[k].add, leaf, n=self._room(run)), state)
        done = self.options.reduce is not None and self.last and run.trace.n == self.problem.n
        if done and group[k] in self.accumulators:
            self._close(group[k], leaf, self._found(group[k]))

    def take(self, t: Accumulator, leaf: int, state: State, count: int, room: int) -> None:
        """Keep what is kept of one parameter and some samples, of so many in all."""
        if self.keeper is not None and self.keeper.takes(number := self._number(t), leaf):
            self.keeper.keep(number, leaf, state, count)
            t.added.add(leaf)
        else:
            added("samples", partial(t.add, leaf, n=room), state)

    def _room(self, run: Run) -> int:
        """How many samples there will be in all, if they come in several runs."""
        return self.found.n if run.trace.n < self.problem.n else 0

    def _taken(self, group: list[Accumulator], k: int, leaf: int) -> bool:
        """Whether a part is kept of what one of a group keeps of a parameter."""
        return self.keeper is not None and self.keeper.takes(self._number(group[k]), leaf)

    def _number(self, accumulator: Accumulator) -> int:
        """That of the quantity; -1 if it is of a phase before."""
        return next((k for k, t in enumerate(self.accumulators) if t is accumulator), -1)

    def _hessian(
        self,
        run: Run,
        made: list[Columns],
        slope: Columns,
        group: list[Accumulator],
        samples: Samples,
        look: Look | None,
    ) -> None:
        """The columns of the loss and those of all nonlinear calls; what they miss, entry by entry."""
        assert isinstance(slope, Gradient)
        reductions, once, outputs = [t.reduction for t in group], read_once(run), dict(run.outputs)
        second_order = second_order_columns(self.scope, run, run.trace.steps if once else [], slope)
        pullback = self._pullback(run, [*made, *second_order], samples, once)
        decision = self._decisions.of_hessian(pullback, look, group, outputs, made, second_order)
        if self.report is not None:
            self.report.second_order(pullback, group, decision)
            return
        parts = decision.taken(pullback)
        while parts:
            parts.pop(0).folded(reductions, partial(self._add, run, group), soon=partial(self._taken, group))
        others = [i for i in range(len(run.params)) if i not in once]
        kept: dict[tuple[int, int], State] = {}

        def keep(k: int, leaf: int, state: State) -> None:
            kept[k, leaf] = state

        for some in [[i] for i in others] if self.options.reduce is not None else [others]:
            self._pullback(run, made, samples, frozenset(some)).folded(reductions, keep)
            for i in some:
                for k, m in enumerate(reductions):
                    rows = entries(self.scope, run, slope, i, samples, bool(m.each), self.budget)
                    before, more = kept.pop((k, i), None), m.directly(rows)
                    self._add(run, group, k, i, more if before is None else m.merge(before, more, "columns"))

    def _chain(self, run: Run, made: list[Columns], group: list[Accumulator], samples: Samples) -> None:
        """A matrix averaged over the samples at each layer, in place of columns."""
        if self.report is not None:
            self.report.chain(self._pullback(run, made, samples), group)
            return
        columns, pullback = averaged(self.scope, run, made, samples), self._pullback(run, made, samples)
        known = roles(run.params, run.trace.uses)
        for i in range(len(run.params)):
            uses = [t for t in run.trace.uses if i in t.derived.leaves]
            if len(uses) > 1:
                raise not_a_chain(f"{self.problem.name(i)} is read more than once")
            for k, t in enumerate(group if uses else []):
                shares = pullback.shares(i, uses, columns, seen_before=False, role=known.get(i))
                self._add(run, group, k, i, t.reduction.step(shares))

    def _samples(self, run: Run) -> Samples:
        """Those that the caller chose among those of the run, in their order there."""
        n, chosen = run.trace.n, self.places.chosen
        if chosen is None:
            return Samples(n)
        chosen = sorted(i - run.start for i in chosen if run.start <= i < run.start + n)
        return Samples(n, torch.tensor(chosen, device=self.problem.leaves[0].device, dtype=torch.long))

    # Results

    def finished(self) -> list[Any]:
        """What the caller gets of each quantity."""
        return [self._finished(t) for t in self.accumulators]

    def _finished(self, accumulator: Accumulator) -> Any:
        reduction, before, found = accumulator.reduction, accumulator.before, self._found(accumulator)
        if reduction.whole and self.options.reduce is None:
            return self.scope.result(reduction.assemble(self._whole(accumulator), found))
        trees = [self._tree(list(part)) for part in zip(*self._results(accumulator, found), strict=True)]
        if before is not None and before.reduction.whole:
            found = replace(found, before=self._whole(before)[0])
        return self.scope.result(reduction.assemble(trees, found))

    def _tree(self, leaves: list[Any]) -> Any:
        trees = tree.unflatten(leaves, self.problem.structure)
        return tuple(trees) if self.problem.several else trees[0]

    def _whole(self, accumulator: Accumulator) -> list[Any]:
        """The results of all parameters together."""
        found, reduction, kept = self._found(accumulator), accumulator.reduction, accumulator.states
        places = enumerate(accumulator.of(self.problem.leaves))
        states = [kept.pop(i, None) or reduction.init(leaf, found.n, found.columns) for i, leaf in places]
        return self._delivered(reduction, reduction.finish(reduction.together(states), found), found, found.dtype)

    def _results(self, accumulator: Accumulator, found: Found) -> list[list[Any]]:
        """The results of all parameters, in their order."""
        for leaf in range(len(self.problem.leaves)):
            if leaf not in accumulator.results:
                self._close(accumulator, leaf, found)
        return [accumulator.results.pop(leaf) for leaf in range(len(self.problem.leaves))]

    def _close(self, accumulator: Accumulator, place: int, found: Found) -> None:
        """Make the result of one parameter of what is kept of it."""
        leaf, reduction = self.problem.leaves[place], accumulator.reduction
        state = accumulator.states.pop(place, None) or reduction.init(leaf, found.n, found.columns)
        whole, alone = state, self.options.reduce is not None
        if self.keeper is not None and (alone or type(reduction).aside is not Reduction.aside):
            whole = self.keeper.whole(self._number(accumulator), place, state)
        aside = reduction.aside(whole, found)
        if aside is not None:
            found.aside[self.problem.paths[place]] = aside
        result = self._delivered(reduction, reduction.finish(whole if alone else state, found), found, leaf.dtype)
        if self.options.reduce is not None:
            result = [
                part if part is None else self.options.reduce(self.problem.paths[place], self.scope.result(part))
                for part in result
            ]
        accumulator.results[place] = result

    def _found(self, accumulator: Accumulator) -> Found:
        return replace(self.found, columns=accumulator.columns, aside=accumulator.aside)

    def _delivered(self, reduction: Reduction, results: list[Any], found: Found, dtype: torch.dtype) -> list[Any]:
        """Results in the precision of the parameters, with the samples in the order in which they were chosen."""
        chosen, order = self.places.chosen, None
        if chosen is not None and chosen != sorted(chosen):
            order = sorted(range(len(chosen)), key=chosen.__getitem__)
            order = torch.tensor(sorted(order, key=order.__getitem__), device=self.problem.leaves[0].device)

        def delivered(x: torch.Tensor) -> torch.Tensor:
            if order is not None:
                for axis in reduction.sample_axes(found):
                    x = x.index_select(axis, order[: x.shape[axis]])  # those of another batch come last, in order
            return x.to(dtype) if reduction.rounded else x

        return [tree.map_tensors(delivered, result) for result in results]


def _turn(accumulator: Accumulator) -> int:
    """What is averaged comes first, as it needs the graph, and the gradient last, as it may be streamed."""
    kind = accumulator.quantity.kind
    return kind.first_order - kind.averaged
