"""One time through all batches of a data set."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import ArgumentError
from invfunc.evaluation.batches import no_samples, unscaled
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.fold import Fold, Learn
from invfunc.evaluation.rounds import Rounds
from invfunc.evaluation.weights import Weights
from invfunc.reductions import State, States
from invfunc.reductions.quantity import Accumulator


class Sweep:
    """What the batches seen so far have brought, joined in the fold of the last one.

    What has to know something of all samples first, as the eigenvalues of `ekfac` their basis, is a phase of its own,
    for which the batches come again: a sweep after another.
    """

    def __init__(self, before: Sweep | None = None, learn: Learn | None = None) -> None:
        self.engine: Engine | None = None
        """That of the last batch; nothing else of the others is in memory but what is kept of them."""
        self.n = 0
        self.phase, self.weights = 0, Weights()
        self.told: list[Accumulator] = []
        self.refused: dict[str, str] = {}
        self.expected: int | None = None
        self.rounds: Rounds | None = None
        """Where parts of what is kept are kept, as those of the parameters are."""
        self._by: int | None = None
        """What the loss of the last batch is multiplied with, once it is known."""
        self.parts = set[tuple[int, int]]()
        """The quantities and parameters, by number, of which a part is kept in the end."""
        if before is not None:
            fold = before.joined()
            self.phase, self.weights, self.expected = before.phase + 1, before.weights, before.n
            self.rounds, self.parts = before.rounds, before.parts
            fold.tell(self.phase, learn)
            self.told, self.refused = fold.accumulators, fold.found.refused

    def enter(self, engine: Engine) -> Fold:
        """Put an evaluation in the place of that of the last batch; its fold."""
        self.engine, fold = engine, engine.fold
        fold.phase = self.phase
        self._by = None
        if self.rounds is not None:
            fold.keeper = Divided(self.rounds, self.parts, fold, partial(self._weight, engine))
        if self.phase:
            pairs = zip(fold.accumulators, self.told, strict=True)
            fold.accumulators = [own.behind(earlier, self.phase) for own, earlier in pairs]
            fold.found = replace(fold.found, refused=self.refused)
        return fold

    def has(self, n: int, outputs: list[torch.Size], structure: Any) -> None:
        """Say that it is of so many samples, with outputs in a tree of this structure."""
        assert self.engine is not None
        self.n, fold = n, self.engine.fold
        fold.found = replace(fold.found, n=n, outputs=outputs, structure=tree.flatten(structure)[1])

    @property
    def outputs(self) -> tuple[list[torch.Size], Any]:
        """The shapes of the outputs, and a tree of their structure; none before the first batch."""
        if self.engine is None:
            return [], None
        found = self.engine.fold.found
        return found.outputs, tree.unflatten([*range(len(found.outputs))], found.structure)

    @property
    def by_column(self) -> tuple[Any, ...]:
        """The outputs, and how many columns there are, where something is kept of each column."""
        kept = [] if self.engine is None else self.engine.fold.of_phase(self.phase)
        columns = [t.columns for t in kept if t.reduction.by_column]
        return (*self.outputs, columns) if columns else ()

    def state(self) -> dict[str, Any]:
        """All that it has kept and was told, in dicts, tensors and numbers."""
        kept = self.told if self.engine is None else self.engine.fold.accumulators
        found = {name: getattr(self, name) for name in ("phase", "n", "expected", "outputs")}
        return {**found, "refused": dict(self.refused), "kept": [t.saved() for t in kept]}

    @classmethod
    def resumed(cls, state: dict[str, Any], engine: Engine) -> Sweep:
        """One in that state; the engine is that of no samples."""
        sweep = cls()
        sweep.phase, sweep.expected, sweep.refused = state["phase"], state["expected"], state["refused"]
        sweep.told = engine.fold.accumulators
        for t, kept in zip(sweep.told, state["kept"], strict=True):
            t.restore(kept)
        if state["n"]:
            sweep.enter(engine)
            sweep.has(state["n"], *state["outputs"])
        return sweep

    @property
    def known(self) -> list[list[Any]]:
        """What is known of the phases before."""
        return [[t.known for t in of_all.line] for of_all in self.told]

    def add(self, engine: Engine, evaluated: Callable[[Engine], Any] = Engine.kept) -> Any:
        """See another batch, by an evaluation that has it kept in the fold; aux."""
        before = [] if self.engine is None else self.engine.fold.of_phase(self.phase)
        known = self.by_column
        fold = self.enter(engine)
        aux, own = evaluated(engine), fold.found.n
        if engine.scalar:
            self._scale(fold, self._weight(engine))
        if self.n and known != self.by_column:
            raise other_outputs(known, "the batches before", self.by_column, "this one")
        for t, first in zip(fold.of_phase(self.phase), before, strict=True) if self.n else ():
            t.after(first, fold.problem.leaves, self.n, own)
        self.n += own
        fold.found = replace(fold.found, n=self.n)
        return aux

    def _weight(self, engine: Engine) -> int:
        """What the loss of a batch has to be multiplied with so that it is a sum over its samples."""
        if not engine.scalar:
            return 1
        if engine.loss_part is None:
            raise unscaled(engine.fold.found.n)
        self._by = self.weights.of(engine.loss_part) if self._by is None else self._by
        return self._by

    def take(self, parts: dict[int, States]) -> None:
        """Keep parts of what all processes have kept, by quantity."""
        assert self.engine is not None
        for number, states in parts.items():
            self.engine.fold.accumulators[number].states.update(states)
            self.parts.update((number, leaf) for leaf in states)

    def joined(self) -> Fold:
        """The fold of all batches, with the loss of all."""
        if self.engine is None:
            raise no_samples()
        check_number(self.n, self.expected)
        if self.weights.mean:
            self._scale(self.engine.fold, 1 / self.n)
        return self.engine.fold

    def results(self) -> list[Any]:
        """What all batches give."""
        self.joined()
        assert self.engine is not None
        return self.engine.finished()

    def _scale(self, fold: Fold, by: float) -> None:
        for t in fold.of_phase(self.phase):
            t.scaled(by)


@dataclass
class Divided:
    """Keeps parts of what the fold of a batch has kept."""

    rounds: Rounds
    parts: set[tuple[int, int]]
    fold: Fold
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


def check_number(n: int, expected: int | None) -> None:
    """Check that a loader gives as many samples as the time before."""
    if expected not in (None, n):
        raise ArgumentError(
            f"the loader gave {n} samples the second time, and {expected} the first time; what needs two sweeps, or to "
            "count the samples before, is of the same ones in both."
        )


def other_outputs(known: tuple[Any, ...], there: str, own: tuple[Any, ...], here: str) -> ArgumentError:
    """What is said where results with an axis of the outputs would be joined that are of other outputs."""
    (a, m), (b, n) = (
        (tree.unflatten([*map(tuple, shapes)], tree.flatten(places)[1]), sum(columns))
        for shapes, places, columns in (known, own)
    )
    return ArgumentError(
        f"the outputs of one sample have shapes {a} in {there}, {m} numbers in all, and {b} in {here}, {n} numbers. "
        "Results with an axis of the outputs are joined, so that these have to be the same ones in the same order."
    )
