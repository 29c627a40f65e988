"""Work with the batches of a loader, of one process or of one among several."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, TypeVar

import torch

from invfunc import tree
from invfunc._torch.functorch import storage_of
from invfunc._torch.sharded import sharded
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.batches import (
    GIVES_BATCHES,
    Batches,
    Checkpoint,
    Feed,
    Record,
    batches_of,
    check_loadable,
    check_loader,
    check_not_transforming,
    counted,
    no_samples,
    samples_of,
)
from invfunc.evaluation.engine import Engine, JointFold
from invfunc.evaluation.kinds import BatchWeights, Drew
from invfunc.evaluation.processes import ALONE, Processes, described, fingerprint, named, same, whole
from invfunc.loss.drawn import key_of
from invfunc.problem import InDims, batch_dims
from invfunc.products.product import space_of
from invfunc.reductions import Found, Reduction, States
from invfunc.reductions.columns import KeptShares, RowsWithKept
from invfunc.reductions.reduction import Accumulator, Quantity
from invfunc.statistic import Statistic
from invfunc.transform import own_memory

T = TypeVar("T")
PARAMETERS = ("the parameters",)
Evaluated = Callable[[Any, "VisitWork", tuple, dict[str, Any], Engine], Any]
"""Evaluates a statistic of a batch in a phase of the work, so that it is kept; aux."""


@dataclass(frozen=True)
class ProcessPart:
    """The batches of this process: all there are, or those of one among a group."""

    feed: Feed | None
    """Options of the loader; None if the arguments are one batch."""
    in_dims: InDims
    file: Checkpoint | None = None
    """The checkpoint, but for the number of this process."""
    group: Any = None
    reduction: str | None = None
    """The scale of a loss that is one number, "sum", if the caller says it."""
    alone: bool = False
    """Tells whether no other process has a part in the result."""

    def shown(self, t: Any) -> str:
        inner = f"{t!r}" if self.feed is None else f"streamed({t!r})"
        return inner if self.alone else f"distributed({inner})"

    def names(self, first: Sequence[str], own: Any, count: int) -> Any:
        """Names of so many arguments, of which a loader comes behind the first ones."""
        return own if self.feed is None else [*first, "loader"][:count]

    def aux(self, each: list[Any]) -> Any:
        """The aux of a call, of those of its batches."""
        return each if self.feed is not None else each[0] if each else None

    def processes(self) -> Processes:
        """The processes that have a part in the result."""
        return ALONE if self.alone else Processes.of(self.group)

    def loader(self, args: tuple, own: tuple[str, ...], sweeps: str) -> Any:
        """The loader behind its own arguments, which gives its batches more than once if there is a reason."""
        if len(args) != len(own) + 1:
            given = f"{len(args)} positional arguments"
            raise ArgumentTypeError(f"it takes {', '.join(own)} and a loader, and got {given}: {GIVES_BATCHES}")
        check_loader(args[-1], sweeps=sweeps)
        return args[-1]

    def begun(
        self,
        t: Any,
        args: tuple,
        own: tuple[str, ...],
        names: Any,
        alike: dict[str, str],
        identity: Callable[[], dict[str, str]] = dict,
        again: str = "",
        check: Callable[[int, Any], None] | None = None,
    ) -> Course:
        """The course of this process, before the first batch of a statistic is seen.

        The arguments have their `own` names in front of the batch, of which the first are the parameters. What is
        `alike` has to be the same in all processes, and `identity` in a checkpoint, too. Batches are seen twice for the
        reason `again`; `check` looks for what is wrong if there will be so many samples, with these parameters.
        """
        processes, scale = self.processes(), {} if self.reduction is None else {"reduction": self.reduction}
        keys = [key_of(d.generator) for d in dict.fromkeys(t.drawings)]
        counts = bool(keys) and not self.alone
        file = self.file if self.file is None or self.alone else self.file.of_process(processes.rank)

        def looked() -> tuple[tuple[Any, Record], tuple[dict[str, str], Any, int]]:
            check_not_transforming()
            space_of(args, names)
            drawn = "each sample draws by how many came before, so that they are counted first" if counts else ""
            loader = [args[len(own) :]] if self.feed is None else self.loader(args, own, again or drawn)
            if check is not None:
                check(counted(loader, self.in_dims), args[0])
            record = Record({}, keys)
            if file is not None:
                place = {} if self.alone else {"the process": f"{processes.rank} of {processes.size}"}
                record = file.record({**place, **scale, **identity()}, keys, (self.feed or Feed()).goal(args[0]))
            said = {**alike, **scale, **named("params", args[0])} if processes.size > 1 else {}
            return (loader, record), (said, record.head, samples_of(loader, self.in_dims) if counts else 0)

        (loader, record), each = processes.told("arguments", looked)
        same([alike for alike, _, _ in each])
        record = record.agreed([head for _, head, _ in each])
        params = args[0] if self.alone else whole(processes, "params", args[0])
        numbers = [n for _, _, n in each]
        empty, before = list[tuple](), sum(numbers[: processes.rank])
        batches = batches_of(loader, params, self.in_dims, self.feed, empty)
        return Course(processes, params, batches, record, file, empty, before, sum(numbers) if counts else None)


@dataclass
class Course:
    """The way through the batches of this process that are not done; with a file, what they have brought is there when
    it is left too early."""

    processes: Processes
    params: Any
    batches: Batches
    record: Record
    """The record from which all go on, with keys of drawn columns that are the same in all."""
    file: Any
    empty: list[tuple]
    """The arguments of a batch without samples, if there was one."""
    before: int
    """Number of samples of the processes before, where columns are drawn."""
    counted: int | None
    """Number of samples of all, where columns are drawn."""
    new: bool = False
    """Tells whether the record is newer than the file, which was `written` then."""
    written: float = field(default_factory=time.monotonic)

    def told(self, at: str, step: Callable[[], T]) -> T:
        """The result of a step; where there are files, which are needed until all have done it, all do or none."""
        return step() if self.file is None else self.processes.told(at, lambda: (step(), None))[0]

    def through(self, work: VisitWork) -> None:
        """Have the batches seen, for the phase that the work is in."""
        if self.file is None:
            self.batches(work.visit, enumerate)
            return
        if work.phase > self.record.phase:
            self._note(work, phase=work.phase, done=0, n=0)
        self.batches(lambda args, n: work.visit(args, self.record.n), partial(self._remaining, work))

    def __enter__(self) -> Course:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self.file is not None and kind is None:
            self.file.remove()
        elif self.new:
            self._write()

    def _remaining(self, work: VisitWork, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """The batches that are not done, with their numbers."""
        number, prints = -1, self.record.prints
        for number, batch in enumerate(batches):
            mark = fingerprint(batch)
            if number < len(prints) and prints[number] != mark:
                raise self.file.refused(
                    f"is of a loader whose batch {number} was another one (one that shuffles has to give its batches "
                    "in the same order again)"
                )
            if number >= self.record.done:
                yield number, batch
                prints += [mark] * (number == len(prints))
                self._note(work, done=number + 1, n=work.n)
        if number + 1 < len(prints):
            raise self.file.refused(f"is of a loader with at least {len(prints)} batches, and not {number + 1}")

    def _note(self, work: VisitWork, **what: Any) -> None:
        self.record, self.new = replace(self.record, state=work.state(), **what), True
        if time.monotonic() - self.written >= self.file.every:
            self._write()

    def _write(self) -> None:
        self.file.write(self.record)
        self.new, self.written = False, time.monotonic()


def _evaluated(t: Any, work: VisitWork, args: tuple, kwargs: dict[str, Any], engine: Engine) -> Any:
    return engine.kept()


class VisitWork:
    """Joins what the batches bring to a statistic, or to a product with a vector, in the fold of the last one.

    What has to know something of all samples first, as the eigenvalues of `ekfac` their basis, is a phase of its own,
    for which the batches come again.
    """

    def __init__(
        self,
        t: Any,
        kwargs: dict[str, Any],
        course: Course,
        plans: Evaluated | None = None,
        reduction: str | None = None,
        expected: int | None = None,
    ) -> None:
        """`plans` evaluate batches if there are some, `reduction` is the scale of a loss that is one number, and so
        many samples are `expected`, if that is known."""
        self.t, self.kwargs, self.course, self.evaluated = t, kwargs, course, plans or _evaluated
        self.phase, self.weights, self.aux = 0, BatchWeights(reduction), list[Any]()
        self.engine: Engine | None = None
        """Engine of the last batch; nothing else of the others is in memory but what is kept of them."""
        self.told: list[Accumulator] = []
        """The accumulators of the phase before, and what was `refused` there."""
        self.refused: dict[str, str] = {}
        self.expected = course.counted if expected is None else expected
        self.keys = dict(zip(dict.fromkeys(t.drawings), course.record.keys, strict=True))
        self.looked = False
        """Tells whether f was seen to give samples the same beside fewer ones."""
        self.with_others: Statistic | None = None
        """The statistic with the per-sample gradients of its other batch, once they are known."""

    @property
    def n(self) -> int:
        """Number of samples that were seen in this phase."""
        return 0 if self.engine is None else self.engine.fold.found.n

    @property
    def by_column(self) -> tuple[Any, ...]:
        """The outputs, and how many columns there are, where something is kept of each column."""
        fold = None if self.engine is None else self.engine.fold
        columns = [t.columns for t in fold.of_phase(self.phase) if t.reduction.by_column] if fold else []
        if fold is None or not columns:
            return ()
        state = fold.state(self.phase)
        return state["outputs"], state["structure"], columns

    @property
    def known(self) -> list[list[Any]]:
        """Facts that are known of the phases before."""
        return [[t.known for t in of_all.line] for of_all in self.told]

    def done(self, gather: bool = False) -> tuple[Any, Any]:
        """The results of all batches, and aux of each."""
        course = self.course
        course.told("checkpoint", self.resume)
        self.share(gather)
        while self.phase + 1 < self.t.sweeps:
            fold = self.joined()
            self.phase, self.expected = self.phase + 1, self.n
            fold.tell(self.phase, partial(dealt, course.processes))
            self.told, self.refused, self.engine, self.aux = fold.accumulators, fold.found.refused, None, []
            self.share(gather)
        return course.told("result", self.results), self.aux

    def visit(self, args: tuple, n: int) -> int:
        """See the next batch, behind n samples; how many it has."""
        before, t = self.n, self._with_kept(self.t.keyed(self.keys, self.course.before + n), args)
        self.aux.append(t.evaluating(args, self.kwargs, partial(self.add, t, args)))
        return self.n - before

    def add(self, t: Any, args: tuple, engine: Engine) -> Any:
        """Have the evaluation of a batch kept in the fold; aux."""
        before = None if self.engine is None else self.engine.fold.state(self.phase)
        known = self.by_column
        fold = self.enter(engine)
        aux = self.evaluated(t, self, args, self.kwargs, engine)
        self._scale(fold, self.weights.of_batch(engine.loss_part, engine.problem.n, engine.scalar))
        if before is not None:
            if known != self.by_column:
                raise other_outputs(known, "the batches before", self.by_column, "this one")
            fold.behind(self.phase, before)
        self.looked = self.looked or engine.check_joined()
        return aux

    def enter(self, engine: Engine) -> JointFold:
        """Put an evaluation in the place of that of the last batch; its fold."""
        self.engine, fold = engine, engine.fold
        fold.phase = self.phase
        if self.phase:
            pairs = zip(fold.accumulators, self.told, strict=True)
            fold.accumulators = [own.behind(earlier, self.phase) for own, earlier in pairs]
            fold.found = replace(fold.found, refused=self.refused)
        return fold

    def _with_kept(self, t: Any, args: tuple) -> Any:
        """The statistic of a batch, in which the per-sample gradients of another batch are kept from the first one on.

        Where that cannot be (of an f that draws, by plans) both batches are joined each time.
        """
        if t.others is None or self.evaluated is not _evaluated:
            return t
        if self.with_others is None:
            self.with_others = t
            with suppress(Drew):
                self.with_others = meeting(t, args, self.kwargs)
        return self.with_others

    def without_samples(self) -> Engine:
        """The evaluation of no samples."""
        return self.t.keyed(self.keys, 0).without_samples(self.course.params)

    def _scale(self, fold: JointFold, by: float) -> None:
        for t in () if by == 1 else fold.of_phase(self.phase):
            t.scaled(by)

    def share(self, gather: bool) -> None:
        """Go through the batches for a phase, and keep what all processes do.

        `gather` says that results with a sample axis are those of all samples, too.
        """
        processes, run = self.course.processes, self.course.through
        if processes.size == 1:
            run(self)
            return
        _, each = processes.told("samples", lambda: (run(self), (self.n, self.weights.seen, self.by_column)))
        first = next((rank for rank, (n, *_) in enumerate(each) if n), None)
        if first is None:
            raise no_samples()
        for rank, (n, _, columns) in enumerate(each):
            if n and columns != each[first][2]:
                raise other_outputs(each[first][2], f"process {first}", columns, f"process {rank}")
        one_scale(self.weights, processes, [mean for _, mean, _ in each])
        fold, k = self.enter(self.without_samples()) if self.engine is None else self.engine.fold, self.phase
        here, own = [t.reduction.each and not gather for t in fold.keeping(k)], self.n
        mine = [dict(t.states) for t in fold.keeping(k)]
        state, leaves = fold.state(k), fold.problem.leaves
        state["kept"] = [({} if at else states, n) for (states, n), at in zip(state["kept"], here, strict=True)]
        fold.keep(k, processes.merged(state, partial(_in_order, fold, k), leaves[0].device))
        for t, at, states in zip(fold.keeping(k), here, mine, strict=True):
            if at:  # those of this process, of all parameters
                places = enumerate(t.of(leaves))
                t.states = {i: states.get(i) or t.reduction.init(leaf, own, t.columns) for i, leaf in places}

    def joined(self) -> JointFold:
        """The fold of all batches, with the loss of all."""
        if self.engine is None:
            raise no_samples()
        check_number(self.n, self.expected)
        if self.weights.mean:
            self._scale(self.engine.fold, 1 / self.n)
        return self.engine.fold

    def results(self) -> Any:
        if self.engine is None and self.course.empty and isinstance(self.t, Statistic):  # zeros, or why not
            (args,), t = self.course.empty, self.t
            found, aux = t.compute(args, self.kwargs, t.names(len(args)))
            self.aux.append(aux)
            return found
        results = self.joined().finished()
        return tuple(results) if self.t.members else results[0]

    # In a checkpoint

    def state(self) -> dict[str, Any]:
        """All that it has kept and was told, in dicts, tensors and numbers; under `known` that of the phases before."""
        fold = None if self.engine is None else self.engine.fold
        joined = None if fold is None else {**fold.state(self.phase), "kept": []}
        weights = self.weights.saved()
        if self.t.has_aux:
            check_loadable("aux", self.aux[-1:])
        if len(self.aux) == 1:
            check_loadable("the tree of the outputs", joined)
            check_loadable("the first batch's outputs and target", weights)
        found = {"phase": self.phase, "expected": self.expected, "refused": dict(self.refused), "known": self.known}
        kept = [t.saved() for t in (self.told if fold is None else fold.accumulators)]
        return {**found, "accumulators": kept, "fold": joined, "weights": weights, "aux": self.aux[:]}

    def resume(self) -> None:
        """Go on from where a call before ended, if there was one."""
        if (state := self.course.record.state) is None:
            return
        self.phase, self.expected, self.refused = state["phase"], state["expected"], state["refused"]
        self.aux, engine = state["aux"], self.without_samples()
        self.weights.restore(state["weights"], self.t.loss)
        self.told = engine.fold.accumulators
        for t, kept in zip(self.told, state["accumulators"], strict=True):
            t.restore(kept)
        if state["fold"] is not None:
            fold = self.enter(engine)
            fold.keep(self.phase, {**state["fold"], "kept": fold.state(self.phase)["kept"]})


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


def identity_of(said: dict[str, str], kwargs: dict[str, Any], given: dict[str, Any]) -> dict[str, str]:
    """Descriptions that a call has to share with one before that it goes on from, beside its batches."""

    def local(x: Any) -> Any:
        return x.to_local() if sharded(x) else x

    own = {"keyword arguments": described(kwargs)}
    for name, x in given.items():
        own |= named(name, tree.map_tensors(local, x))
    return {**said, **own}


class RowByRow(VisitWork):
    """Writes the result of each batch, and keeps nothing of it."""

    def __init__(self, rows: Rows, *given: Any) -> None:
        super().__init__(*given)
        self.rows, self.written, self.of_all = rows, 0, 0
        """Numbers of samples of this process, and of all."""

    def visit(self, args: tuple, n: int) -> int:
        self.engine = None
        own = super().visit(args, n)
        assert self.engine is not None
        found = self.engine.finished()
        if self.rows.calls:
            if self.weights.mean:
                raise ArgumentError(
                    "the loss is a mean, whose N is known after the last batch, but out is a function that is called "
                    "after each. Return the [N] losses or their sum, and divide; or pass tensors as out."
                )
            found = own_memory(found, (args, self.kwargs))
        self.rows.put(found, self.written, own)
        self.written += own
        return own

    def share(self, gather: bool) -> None:
        processes, run = self.course.processes, self.course.through
        _, each = processes.told("samples", lambda: (run(self), (self.written, self.weights.seen)))
        self.of_all = sum(n for n, _ in each)
        one_scale(self.weights, processes, [mean for _, mean in each])

    def results(self) -> Any:
        if not self.of_all:
            raise no_samples()
        check_number(self.of_all, self.course.counted)
        if self.weights.mean:
            self.rows.scaled(self.written, 1 / self.of_all)
        return self.rows.result(self.written)


def meeting(t: Statistic, args: tuple, kwargs: dict[str, Any]) -> Statistic:
    """A statistic of pairs with its other batch, in which the per-sample gradients of that are kept."""
    t.evaluating(args, kwargs, Engine.check_others)
    others, reduction, alone = iter(t.others or ()), t.reduction, replace(t, others=None)
    dims = batch_dims(t.in_dims, [*range(1, len(args))])
    given = (args[0], *(args[i] if dim is None else next(others) for i, dim in dims.items()))

    def held(engine: Engine) -> Any:
        engine.kept()
        return engine.finished()[0]

    shares = replace(alone, reduction=KeptShares(), options=replace(t.options, reduce=None))
    kept: Reduction = RowsWithKept(not reduction.whole, shares.evaluating(given, kwargs, held))
    return replace(alone, reduction=kept)


# Destinations of rows of samples that need not be in memory together: tensors that are there, or a function

Rooms = tuple[str, torch.Tensor, int]
"""A tensor with its name and the axis that counts the samples."""


class Rows:
    """Takes the results of each batch behind those of the batches before."""

    def __init__(self, out: Any, quantities: Sequence[Quantity], several: bool) -> None:
        """`several` says that there is a tree for each quantity, in a tuple."""
        self.out, self.quantities, self.several, self.most = out, quantities, several, 0
        self.calls = callable(out)

    def check(self, known: int, params: Any) -> None:
        """Look for what is wrong before the first batch, if there will be so many samples."""
        if self.calls:
            return
        taken = {storage_of(p) for p in tree.tensors((params,))}
        for name, x, axis in self._parts(self.out):
            check_own(name, x, taken)
            if x.ndim <= axis or x.shape[axis] < known:
                raise ArgumentError(
                    f"{name} has shape {tuple(x.shape)}, but there are {known} samples for axis {axis}."
                )

    def put(self, results: Sequence[Any], start: int, n: int) -> None:
        """Write the results of n samples; nothing, if one of them does not fit."""
        rows = tuple(results) if self.several else results[0]
        if self.calls:
            self.out(start, rows)
            return
        given, found = list(self._parts(self.out)), list(self._parts(rows))
        check_like(given, found)
        for name, x, axis in given:
            if x.shape[axis] < start + n:
                raise ArgumentError(f"{name} has room for {x.shape[axis]} samples, but there are at least {start + n}.")
        for (_, x, axis), (_, y, _) in zip(given, found, strict=True):
            x.narrow(axis, start, n).copy_(y)
        self.most = max(self.most, n)

    def scaled(self, n: int, by: float) -> None:
        """Make the loss so many times as large in the rows of n samples, some at a time."""
        for q, out in zip(self.quantities, self._outs(self.out), strict=True):
            for x in tree.tensors((out,)):
                for rows in x.narrow(q.reduction.each[0], 0, n).split(self.most, q.reduction.each[0]):
                    rows.copy_(q.reduction.scaled((rows,), q.factor(by))[0])

    def result(self, n: int) -> Any:
        """Tensors that were written; None if a function was told."""
        if self.calls:
            return None
        axes = [q.reduction.each[0] for q in self.quantities]
        outs = [
            tree.map_tensors(lambda x: x.narrow(axis, 0, n), out)  # noqa: B023
            for axis, out in zip(axes, self._outs(self.out), strict=True)
        ]
        return tuple(outs) if self.several else outs[0]

    def _outs(self, out: Any) -> Sequence[Any]:
        if not self.several:
            return [out]
        if not isinstance(out, (tuple, list)) or len(out) != len(self.quantities):
            raise ArgumentTypeError(f"out has to be a tuple of {len(self.quantities)}, one for each statistic.")
        return out

    def _parts(self, out: Any) -> Iterator[Rooms]:
        for k, (q, one) in enumerate(zip(self.quantities, self._outs(out), strict=True)):
            for path, x in tree.named_leaves(one):
                yield f"out[{k}]{path}" if self.several else f"out{path}", x, q.reduction.each[0]


def check_like(out: Sequence[Rooms], wanted: Sequence[Rooms]) -> None:
    """Check that tensors have the names, sizes and dtypes of others, up to the axis that counts the samples."""
    if [name for name, _, _ in out] != [name for name, _, _ in wanted]:
        names = ", ".join(name for name, _, _ in wanted)
        raise ArgumentError(f"out has other parts than the result, which are {names}.")
    for (name, x, axis), (_, y, _) in zip(out, wanted, strict=True):
        pairs = zip(x.shape, y.shape, strict=False)
        if x.ndim != y.ndim or x.dtype != y.dtype or any(a != b and d != axis for d, (a, b) in enumerate(pairs)):
            sizes = ", ".join("N" if d == axis else str(size) for d, size in enumerate(y.shape))
            raise ArgumentError(f"{name} is {x.dtype} {tuple(x.shape)}, but has to be {y.dtype} ({sizes}).")


def check_own(name: str, x: Any, taken: set[int]) -> None:
    """Check that it is a tensor with memory of its own, which is taken from now on."""
    if not isinstance(x, torch.Tensor):
        kind = type(x).__name__
        raise ArgumentTypeError(f"{name} is of type {kind}, but has to be a tensor (torch.from_numpy makes one).")
    if storage_of(x) in taken or any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
        raise ArgumentError(f"{name} has no memory of its own; make it with torch.empty, or map a file.")
    taken.add(storage_of(x))
