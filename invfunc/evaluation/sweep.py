"""A sweep through all batches of a data set, and the fold of what all processes have kept of theirs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import ArgumentError
from invfunc.evaluation.batches import no_samples
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.fold import JointFold, Learn
from invfunc.evaluation.processes import Processes
from invfunc.evaluation.weights import BatchWeights, LossPart
from invfunc.reductions import Found, Reduction, States
from invfunc.reductions.reduction import Accumulator


class Sweep:
    """States of the batches seen so far, joined in the fold of the last one.

    What has to know something of all samples first, as the eigenvalues of `ekfac` their basis, is a phase of its own,
    for which the batches come again: a sweep after another.
    """

    def __init__(self, before: Sweep | None = None, learn: Learn | None = None) -> None:
        self.engine: Engine | None = None
        """Engine of the last batch; nothing else of the others is in memory but what is kept of them."""
        self.phase, self.weights = 0, BatchWeights()
        self.told: list[Accumulator] = []
        self.refused: dict[str, str] = {}
        self.expected: int | None = None
        if before is not None:
            fold = before.joined()
            self.phase, self.weights, self.expected = before.phase + 1, before.weights, before.n
            fold.tell(self.phase, learn)
            self.told, self.refused = fold.accumulators, fold.found.refused

    @property
    def n(self) -> int:
        """Number of samples that were seen."""
        return 0 if self.engine is None else self.engine.fold.found.n

    def enter(self, engine: Engine) -> JointFold:
        """Put an evaluation in the place of that of the last batch; its fold."""
        self.engine, fold = engine, engine.fold
        fold.phase = self.phase
        if self.phase:
            pairs = zip(fold.accumulators, self.told, strict=True)
            fold.accumulators = [own.behind(earlier, self.phase) for own, earlier in pairs]
            fold.found = replace(fold.found, refused=self.refused)
        return fold

    @property
    def by_column(self) -> tuple[Any, ...]:
        """The outputs, and how many columns there are, where something is kept of each column."""
        fold = None if self.engine is None else self.engine.fold
        columns = [t.columns for t in fold.of_phase(self.phase) if t.reduction.by_column] if fold else []
        if fold is None or not columns:
            return ()
        state = fold.state(self.phase)
        return state["outputs"], state["structure"], columns

    def state(self) -> dict[str, Any]:
        """All that it has kept and was told, in dicts, tensors and numbers."""
        fold = None if self.engine is None else self.engine.fold
        kept = [t.saved() for t in (self.told if fold is None else fold.accumulators)]
        found = {"phase": self.phase, "expected": self.expected, "refused": dict(self.refused), "accumulators": kept}
        return {**found, "fold": None if fold is None else {**fold.state(self.phase), "kept": []}}

    @classmethod
    def resumed(cls, state: dict[str, Any], engine: Engine) -> Sweep:
        """One in that state; the engine is that of no samples."""
        sweep, fold = cls(), engine.fold
        sweep.phase, sweep.expected, sweep.refused = state["phase"], state["expected"], state["refused"]
        sweep.told = fold.accumulators
        for t, kept in zip(sweep.told, state["accumulators"], strict=True):
            t.restore(kept)
        if state["fold"] is not None:
            sweep.enter(engine)
            own = fold.state(sweep.phase)
            fold.keep(sweep.phase, {**state["fold"], "kept": own["kept"]})
        return sweep

    @property
    def known(self) -> list[list[Any]]:
        """Facts that are known of the phases before."""
        return [[t.known for t in of_all.line] for of_all in self.told]

    def add(self, engine: Engine, evaluated: Callable[[Engine], Any] = Engine.kept) -> Any:
        """See another batch, by an evaluation that has it kept in the fold; aux."""
        before = None if self.engine is None else self.engine.fold.state(self.phase)
        known = self.by_column
        fold = self.enter(engine)
        aux = evaluated(engine)
        self._scale(fold, self.weights.of_batch(engine.loss_part, engine.problem.n, engine.scalar))
        if before is not None:
            if known != self.by_column:
                raise other_outputs(known, "the batches before", self.by_column, "this one")
            fold.behind(self.phase, before)
        return aux

    def joined(self) -> JointFold:
        """The fold of all batches, with the loss of all."""
        if self.engine is None:
            raise no_samples()
        check_number(self.n, self.expected)
        if self.weights.mean:
            self._scale(self.engine.fold, 1 / self.n)
        return self.engine.fold

    def results(self) -> list[Any]:
        """Results of all batches."""
        return self.joined().finished()

    def _scale(self, fold: JointFold, by: float) -> None:
        for t in () if by == 1 else fold.of_phase(self.phase):
            t.scaled(by)

    def share(self, processes: Processes, run: Callable[[], Any], gather: bool, blank: Callable[[], Engine]) -> None:
        """Keep what all processes do, once `run` has seen the batches of this one.

        `gather` says that results with a sample axis are those of all samples, too; `blank` makes an evaluation of no
        samples, for a process that has none.
        """
        _, each = processes.told("samples", lambda: (run(), (self.n, self.weights.seen, self.by_column)))
        first = next((rank for rank, (n, *_) in enumerate(each) if n), None)
        if first is None:
            raise no_samples()
        for rank, (n, _, columns) in enumerate(each):
            if n and columns != each[first][2]:
                raise other_outputs(each[first][2], f"process {first}", columns, f"process {rank}")
        one_scale(self.weights, processes, [mean for _, mean, _ in each])
        fold, own, k = self.enter(blank()) if self.engine is None else self.engine.fold, self.n, self.phase
        here = [t.reduction.each and not gather for t in fold.keeping(k)]
        mine = [dict(t.states) for t in fold.keeping(k)]
        state, leaves = fold.state(k), fold.problem.leaves
        state["kept"] = [({} if at else states, n) for (states, n), at in zip(state["kept"], here, strict=True)]
        fold.keep(k, processes.merged(state, partial(_in_order, fold, k), leaves[0].device))
        for t, at, states in zip(fold.keeping(k), here, mine, strict=True):
            if at:  # those of this process, of all parameters
                places = enumerate(t.of(leaves))
                t.states = {i: states.get(i) or t.reduction.init(leaf, own, t.columns) for i, leaf in places}


def _in_order(fold: JointFold, k: int, first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
    """The state that two processes have brought, joined in a fold."""
    if not (first["n"] and second["n"]):
        return first if first["n"] else second
    fold.keep(k, second)
    fold.behind(k, first)
    return fold.state(k)


def check_number(n: int, expected: int | None) -> None:
    """Check that a loader gives as many samples as the time before."""
    if expected not in (None, n):
        raise ArgumentError(
            f"the loader gave {n} samples the second time, and {expected} the first time; this call reads the loader "
            "twice, and needs the same samples both times."
        )


def other_outputs(known: tuple[Any, ...], there: str, own: tuple[Any, ...], here: str) -> ArgumentError:
    """The error where results with an axis of the outputs would be joined that are of other outputs."""
    (a, m), (b, n) = (
        (tree.unflatten([*shapes], tree.flatten(places)[1]), sum(columns)) for shapes, places, columns in (known, own)
    )
    return ArgumentError(
        f"the outputs of one sample have shapes {a} in {there}, {m} numbers in all, and {b} in {here}, {n} numbers. "
        "Results with an axis of the outputs are joined, so that their outputs have to be the same, in the same order."
    )


# What the evaluation of a batch brings, apart from the evaluation: a tree of tensors and numbers


def brought(engine: Any, phase: int) -> Any:
    """All that a batch brings to a fold in a phase."""
    aux, part = engine.kept(), engine.loss_part
    return engine.fold.state(phase), engine.scalar, None if part is None else part.outputs, aux


def bring(engine: Any, phase: int, found: Any) -> Any:
    """Have an evaluation that was not made keep what another one of the same batch has brought; aux."""
    state, engine.scalar, outputs, aux = found
    engine.fold.keep(phase, state)
    if outputs is not None:
        engine.loss_part = LossPart.of(engine.problem, outputs)
    return aux


def dealt(processes: Processes, reduction: Reduction, states: States, found: Found) -> Any:
    """Facts learned of a phase, whose parameters are dealt out to the processes."""
    if processes.size == 1:
        return reduction.learned(states, found)
    places = sorted(states, key=lambda i: sum(x.numel() for x in tree.tensors((states[i],))), reverse=True)
    device = next((x.device for x in tree.tensors((states,))), torch.device("cpu"))

    def learned() -> tuple[Any, None]:
        return reduction.learned({i: states[i] for i in places[processes.rank :: processes.size]}, found), None

    own, _ = processes.told("parameters", learned)
    together, refused = processes.merged(
        (own, dict(found.refused)), lambda a, b: ({**a[0], **b[0]}, {**a[1], **b[1]}), device
    )
    found.refused.update(refused)
    return together


def one_scale(known: BatchWeights, processes: Processes, each: Sequence[bool | None]) -> None:
    """Check that the losses of all processes are sums, or all means, beside a batch of the first one that has any.

    `each` says of every process whether its loss is a mean; None if it has not seen that.
    """
    first, own = next((rank for rank, mean in enumerate(each) if mean is not None), None), known.first
    if first is None or processes.size == 1:
        return
    for rank, mean in enumerate(each):
        if mean not in (None, each[first]):
            kinds = ("a mean", "a sum") if each[first] else ("a sum", "a mean")
            raise ArgumentError(f"the loss is {kinds[0]} in process {first}, and {kinds[1]} in process {rank}.")
    travels = None if own is None else (own.outputs, own.target, own.n)
    device = next((x.device for x in tree.tensors((travels,))), torch.device("cpu"))
    found = processes.merged(travels, lambda a, b: b if a is None else a, device)

    def looked() -> tuple[None, None]:
        if own is not None and found is not None:
            outputs, target, n = found
            weights = BatchWeights()
            weights.of(replace(own, outputs=outputs, target=own.target if own.dim is None else target, n=n))
            weights.of(own)
        return None, None

    processes.told("scale", looked)
    known.mean = bool(each[first])
