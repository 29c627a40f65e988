"""A sweep through all batches of a data set, and the exchange of what the processes have kept of theirs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import ArgumentError
from invfunc.evaluation.batches import no_samples
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.fold import Divided, JointFold, Learn
from invfunc.evaluation.processes import Processes, on_cpu
from invfunc.evaluation.rounds import Rounds, as_wide
from invfunc.evaluation.weights import BatchWeights, LossPart
from invfunc.reductions import Found, Reduction, States
from invfunc.reductions.exchange import Exchange
from invfunc.reductions.quantity import Accumulator


class Sweep:
    """States of the batches seen so far, joined in the fold of the last one.

    What has to know something of all samples first, as the eigenvalues of `ekfac` their basis, is a phase of its own,
    for which the batches come again: a sweep after another.
    """

    def __init__(self, before: Sweep | None = None, learn: Learn | None = None) -> None:
        self.engine: Engine | None = None
        """Engine of the last batch; nothing else of the others is in memory but what is kept of them."""
        self.n = 0
        self.phase, self.weights = 0, BatchWeights()
        self.told: list[Accumulator] = []
        self.refused: dict[str, str] = {}
        self.expected: int | None = None
        self.rounds: Rounds | None = None
        """Where parts of what is kept are kept, as those of the parameters are."""
        self._by: int | None = None
        """Factor of the loss of the last batch, once it is known."""
        self.parts = set[tuple[int, int]]()
        """The quantities and parameters, by number, of which a part is kept in the end."""
        if before is not None:
            fold = before.joined()
            self.phase, self.weights, self.expected = before.phase + 1, before.weights, before.n
            self.rounds, self.parts = before.rounds, before.parts
            fold.tell(self.phase, learn)
            self.told, self.refused = fold.accumulators, fold.found.refused

    def enter(self, engine: Engine) -> JointFold:
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
        """Facts that are known of the phases before."""
        return [[t.known for t in of_all.line] for of_all in self.told]

    def add(self, engine: Engine, evaluated: Callable[[Engine], Any] = Engine.kept) -> Any:
        """See another batch, by an evaluation that has it kept in the fold; aux."""
        before = [] if self.engine is None else self.engine.fold.of_phase(self.phase)
        known = self.by_column
        fold = self.enter(engine)
        aux, own = evaluated(engine), fold.found.n
        self._scale(fold, self._weight(engine))
        if self.n and known != self.by_column:
            raise other_outputs(known, "the batches before", self.by_column, "this one")
        for t, first in zip(fold.of_phase(self.phase), before, strict=True) if self.n else ():
            t.after(first, fold.problem.leaves, self.n, own)
        self.n += own
        fold.found = replace(fold.found, n=self.n)
        return aux

    def _weight(self, engine: Engine) -> int:
        """Factor with which the loss of a batch is a sum over its samples."""
        if not engine.scalar:  # also while it runs, where parts are given away
            return self.weights.of_batch(None, engine.problem.n, False)
        if self._by is None:
            self._by = self.weights.of_batch(engine.loss_part, engine.problem.n, True)
        return self._by

    def take(self, parts: dict[int, States]) -> None:
        """Keep parts of what all processes have kept, by quantity."""
        assert self.engine is not None
        for number, states in parts.items():
            self.engine.fold.accumulators[number].states.update(states)
            self.parts.update((number, leaf) for leaf in states)

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
        self.joined()
        assert self.engine is not None
        return self.engine.finished()

    def _scale(self, fold: JointFold, by: float) -> None:
        for t in () if by == 1 else fold.of_phase(self.phase):
            t.scaled(by)


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
        (tree.unflatten([*map(tuple, shapes)], tree.flatten(places)[1]), sum(columns))
        for shapes, places, columns in (known, own)
    )
    return ArgumentError(
        f"the outputs of one sample have shapes {a} in {there}, {m} numbers in all, and {b} in {here}, {n} numbers. "
        "Results with an axis of the outputs are joined, so that their outputs have to be the same, in the same order."
    )


# What the evaluation of a batch brings, apart from the evaluation: a tree of tensors and numbers


def keeping(fold: JointFold, phase: int) -> list[Accumulator]:
    """Accumulators that keep something of the samples in a phase, with what has to know of each of them alone."""
    found = fold.of_phase(phase)
    return [t for own in found for t in (own, own.before if own.reduction.apart else None) if t is not None]


def brought(engine: Engine, phase: int) -> Any:
    """All that a batch brings to a fold in a phase."""
    fold, aux = engine.fold, engine.kept()
    shapes = [*map(tuple, fold.found.outputs)]
    places = tree.unflatten([*range(len(shapes))], fold.found.structure)
    kept = [(dict(t.states), t.columns) for t in keeping(fold, phase)]
    outputs = None if engine.loss_part is None else engine.loss_part.outputs
    return kept, shapes, places, engine.scalar, outputs, aux


def bring(engine: Engine, phase: int, found: Any) -> Any:
    """Have an evaluation that was not made keep what another one of the same batch has brought; aux."""
    kept, shapes, places, engine.scalar, outputs, aux = found
    fold = engine.fold
    fold.found = replace(fold.found, outputs=[*map(torch.Size, shapes)], structure=tree.flatten(places)[1])
    for t, (states, columns) in zip(keeping(fold, phase), kept, strict=True):
        t.states, t.columns = states, columns
    if outputs is not None:
        engine.loss_part = LossPart.of(engine.problem, outputs)
    return aux


# The statistic of all processes, of what the samples of each have brought


@dataclass(frozen=True)
class Brought:
    """Description of a process's sweep: all but the numbers."""

    n: int
    mean: bool | None
    """Tells whether its loss is a mean; None if that was not looked at."""
    outputs: list[torch.Size]
    structure: Any
    by_column: tuple[Any, ...]
    columns: list[int]
    states: list[States]
    """States of the accumulators, on the meta device."""

    @classmethod
    def of(cls, sweep: Sweep) -> Brought:
        if sweep.engine is None:
            return cls(0, None, [], None, (), [], [])
        kept = list(_kept(sweep))
        states = [tree.map_tensors(_without_numbers, t.states) for t in kept]
        columns = [t.columns for t in kept]
        return cls(sweep.n, sweep.weights.seen, *sweep.outputs, sweep.by_column, columns, states)


def share(
    sweep: Sweep, run: Callable[[], Any], processes: Processes, gather: bool, blank: Callable[[], Engine]
) -> None:
    """Have a sweep keep what those of all processes do, once `run` has seen the batches of this one.

    `gather` says that results with a sample axis are those of all samples, too; `blank` makes an evaluation of no
    samples, for a process that has none.
    """
    _, each = processes.told("samples", lambda: (run(), Brought.of(sweep)))
    like, own = _alike(each), sweep.n
    one_scale(sweep.weights, processes, [one.mean for one in each])
    if sweep.engine is None:
        sweep.enter(blank())
    assert sweep.engine is not None
    sweep.has(sum(one.n for one in each), like.outputs, like.structure)
    exchanges = _exchanges(sweep, own, each, gather)
    kept = list(_kept(sweep))
    for (k, i), state in zip(exchanges, processes.exchanged(list(exchanges.values())), strict=True):
        kept[k].states[i] = state


def _exchanges(sweep: Sweep, own: int, each: list[Brought], gather: bool) -> dict[tuple[int, int], Exchange]:
    """Exchanges of the states of so many own samples, by place and parameter."""
    assert sweep.engine is not None
    exchanges: dict[tuple[int, int], Exchange] = {}
    kept, leaves = list(_kept(sweep)), sweep.engine.fold.problem.leaves
    for k, (t, t.columns) in enumerate(zip(kept, _alike(each).columns, strict=True)):
        if t.reduction.each and not gather:  # those of this process, of all parameters
            places = enumerate(t.of(leaves))
            t.states = {i: t.states.get(i) or t.reduction.init(leaf, own, t.columns) for i, leaf in places}
            continue
        for i in sorted({i for one in each if one.n for i in one.states[k]}):
            exchanges[k, i] = _exchange(t, i, leaves[i], own, [(one.n, one.states[k]) for one in each if one.n])
    return exchanges


def _alike(each: list[Brought]) -> Brought:
    """Description by the first process with samples; where columns are kept, those of all are of the same outputs."""
    first = next((rank for rank, one in enumerate(each) if one.n), None)
    if first is None:
        raise no_samples()
    known = each[first].by_column
    for rank, one in enumerate(each):
        if one.n and one.by_column != known:
            raise other_outputs(known, f"process {first}", one.by_column, f"process {rank}")
    return each[first]


def _exchange(t: Accumulator, place: int, leaf: torch.Tensor, own: int, each: list[tuple[int, States]]) -> Exchange:
    """Exchange of the state of a parameter, which the samples of some processes may not reach."""
    init = t.reduction.init
    blanks = [states.get(place) or tree.map_tensors(_without_numbers, init(leaf, n, t.columns)) for n, states in each]
    return t.reduction.across(place, as_wide(t.states.get(place) or init(leaf, own, t.columns), blanks), blanks)


def dealt(processes: Processes, reduction: Reduction, states: States, found: Found) -> Any:
    """Facts learned of a phase; where each parameter stands by itself, they are dealt out to the processes."""
    if processes.size == 1 or type(reduction).learned is not Reduction.learned:
        return reduction.learned(states, found)
    places = sorted(states, key=partial(_size, states), reverse=True)[processes.rank :: processes.size]

    def learned() -> tuple[None, Any]:
        own = reduction.learned_apart({i: states[i] for i in places}, found)
        return None, (on_cpu(own), found.refused)

    _, each = processes.told("parameters", learned)
    together: dict[int, Any] = {}
    for part, refused in each:
        together |= {i: _moved(one, states[i]) for i, one in part.items()}
        found.refused.update(refused)
    return together


def _kept(sweep: Sweep) -> Iterator[Accumulator]:
    """Accumulators that keep something of all samples."""
    assert sweep.engine is not None
    yield from keeping(sweep.engine.fold, sweep.phase)


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
    travels = None
    if processes.rank == first and own is not None:
        travels = on_cpu((own.outputs, own.target)), own.n
    trees, n = processes.from_first(first, travels)

    def looked() -> tuple[None, None]:
        if own is not None:
            outputs, target = _moved(trees, own.outputs)
            weights = BatchWeights()
            weights.of(replace(own, outputs=outputs, target=own.target if own.dim is None else target, n=n))
            weights.of(own)
        return None, None

    processes.told("scale", looked)
    known.mean = bool(each[first])


def _without_numbers(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x, device="meta")


def _size(states: States, place: int) -> int:
    return sum(x.numel() for x in tree.tensors((states[place],)))


def _moved(x: Any, like: Any) -> Any:
    """A tree whose tensors are where those of another one are."""
    device = next((y.device for y in tree.tensors((like,))), torch.device("cpu"))
    return tree.map_tensors(lambda y: y.to(device), x)
