"""Work with the batches of a loader, of one process or of one among several."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch

from invfunc import tree
from invfunc._torch.functorch import storage_of
from invfunc._torch.sharded import sharded
from invfunc.arguments.problem import InDims, batch_dims
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.batches import (
    GIVES_BATCHES,
    Batches,
    Feed,
    batches_of,
    check_loader,
    check_not_transforming,
    counted,
    no_samples,
    samples_of,
)
from invfunc.evaluation.checkpoint import Checkpoint, Course, Record, check_loadable
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.kinds import Drew
from invfunc.evaluation.processes import ALONE, Processes, described, named, same, whole
from invfunc.evaluation.sweep import Sweep, check_number, dealt, one_scale
from invfunc.evaluation.weights import BatchWeights
from invfunc.loss.drawn import key_of
from invfunc.products.product import space_of
from invfunc.reductions import Reduction
from invfunc.reductions.columns import KeptShares, RowsWithKept
from invfunc.reductions.reduction import Quantity
from invfunc.statistic import Statistic
from invfunc.transform import own_memory

T = TypeVar("T")
PARAMETERS = ("the parameters",)
Evaluated = Callable[[Any, Sweep, tuple, dict[str, Any], Engine], Any]
"""Evaluates a statistic of a batch in a sweep, so that it is kept; aux."""


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
    ) -> Begun:
        """Facts about all processes before the first batch of a statistic is seen.

        The arguments have their `own` names in front of the batch, of which the first are the parameters. What is
        `alike` has to be the same in all processes, and `identity` in a checkpoint, too. Batches are seen twice for the
        reason `again`; `check` looks for what is wrong if there will be so many samples, with these parameters.
        """
        processes, scale = self.processes(), {} if self.reduction is None else {"reduction": self.reduction}
        keys = [key_of(d.generator) for d in dict.fromkeys(t.drawings)]
        counts = bool(keys) and not self.alone

        def looked() -> tuple[tuple[Any, Course], tuple[dict[str, str], Any, int]]:
            check_not_transforming()
            space_of(args, names)
            drawn = "each sample draws by how many came before, so that they are counted first" if counts else ""
            loader = [args[len(own) :]] if self.feed is None else self.loader(args, own, again or drawn)
            if check is not None:
                check(counted(loader, self.in_dims), args[0])
            course = self._course(processes, args[0], keys, lambda: {**scale, **identity()})
            said = {**alike, **scale, **named("params", args[0])} if processes.size > 1 else {}
            return (loader, course), (said, course.record.head, samples_of(loader, self.in_dims) if counts else 0)

        (loader, course), each = processes.told("arguments", looked)
        same([alike for alike, _, _ in each])
        course.record = course.record.agreed([head for _, head, _ in each])
        params = args[0] if self.alone else whole(processes, "params", args[0])
        numbers = [n for _, _, n in each]
        empty, before = list[tuple](), sum(numbers[: processes.rank])
        batches = batches_of(loader, params, self.in_dims, self.feed, empty)
        return Begun(processes, params, batches, course, empty, before, sum(numbers) if counts else None)

    def _course(
        self, processes: Processes, params: Any, keys: list[int], identity: Callable[[], dict[str, str]]
    ) -> Course:
        """The course of this process, which draws by these keys unless it goes on; of several, each has its file."""
        if self.file is None:
            return Course(Record({}, keys))
        file, place = self.file, {}
        if not self.alone:
            file, place = file.of_process(processes.rank), {"the process": f"{processes.rank} of {processes.size}"}
        return Course(file.record({**place, **identity()}, keys, (self.feed or Feed()).goal(params)), file)


@dataclass(frozen=True)
class Begun:
    """Facts about all processes before the first batch is seen."""

    processes: Processes
    params: Any
    batches: Batches
    """The batches of this process."""
    course: Course
    """The course from where all go on, with keys of drawn columns that are the same in all."""
    empty: list[tuple]
    """The arguments of a batch without samples, if there was one."""
    before: int
    """Number of samples of the processes before, where columns are drawn."""
    counted: int | None
    """Number of samples of all, where columns are drawn."""

    def told(self, at: str, step: Callable[[], T]) -> T:
        """The result of a step; where there are files, which are needed until all have done it, all do or none."""
        if not self.course.keeps:
            return step()
        return self.processes.told(at, lambda: (step(), None))[0]


def _evaluated(t: Any, sweep: Sweep, args: tuple, kwargs: dict[str, Any], engine: Engine) -> Any:
    return engine.kept()


class VisitWork:
    """Joins what the batches bring to a statistic, or to a product with a vector."""

    def __init__(
        self,
        t: Any,
        kwargs: dict[str, Any],
        begun: Begun,
        plans: Evaluated | None = None,
        reduction: str | None = None,
        expected: int | None = None,
    ) -> None:
        """`plans` evaluate batches if there are some, `reduction` is the scale of a loss that is one number, and so
        many samples are `expected`, if that is known."""
        self.t, self.kwargs, self.begun, self.evaluated = t, kwargs, begun, plans or _evaluated
        self.aux, self.sweep = list[Any](), Sweep()
        self.sweep.weights = BatchWeights(reduction)
        self.sweep.expected = begun.counted if expected is None else expected
        self.keys = dict(zip(dict.fromkeys(t.drawings), begun.course.record.keys, strict=True))
        self.looked = False
        """Tells whether f was seen to give samples the same beside fewer ones."""
        self.with_others: Statistic | None = None
        """The statistic with the per-sample gradients of its other batch, once they are known."""

    @property
    def phase(self) -> int:
        return self.sweep.phase

    @property
    def seen(self) -> int:
        return self.sweep.n

    def done(self, gather: bool = False) -> tuple[Any, Any]:
        """The results of all batches, and aux of each."""
        begun = self.begun
        begun.told("checkpoint", partial(begun.course.begin, self))
        self.share(gather)
        while self.phase + 1 < self.t.sweeps:
            self.sweep, self.aux = Sweep(self.sweep, partial(dealt, begun.processes)), []
            self.share(gather)
        return begun.told("result", self.results), self.aux

    def visit(self, args: tuple, n: int) -> int:
        before = self.sweep.n

        def add(engine: Engine) -> Any:
            aux = self.sweep.add(engine, partial(self.evaluated, t, self.sweep, args, self.kwargs))
            self.looked = self.looked or engine.check_joined()
            return aux

        t = self._with_kept(self.t.keyed(self.keys, self.begun.before + n), args)
        self.aux.append(t.evaluating(args, self.kwargs, add))
        return self.sweep.n - before

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

    def share(self, gather: bool) -> None:
        """Go through the batches for a phase, and have what they have brought joined with what those of others have."""
        run = partial(self.begun.course.through, self.begun.batches)
        if self.begun.processes.size == 1:
            run()
        else:
            self.sweep.share(self.begun.processes, run, gather, self.without_samples)

    def without_samples(self) -> Engine:
        """The evaluation of no samples."""
        return self.t.keyed(self.keys, 0).without_samples(self.begun.params)

    def results(self) -> Any:
        if self.sweep.engine is None and self.begun.empty and isinstance(self.t, Statistic):  # zeros, or why not
            (args,), t = self.begun.empty, self.t
            found, aux = t.compute(args, self.kwargs, t.names(len(args)))
            self.aux.append(aux)
            return found
        results = self.sweep.results()
        return tuple(results) if self.t.members else results[0]

    # In a checkpoint

    def state(self) -> dict[str, Any]:
        weights = self.sweep.weights.saved()
        if self.t.has_aux:
            check_loadable("aux", self.aux[-1:])
        state = {"sweep": self.sweep.state(), "weights": weights, "aux": self.aux[:], "known": self.sweep.known}
        if len(self.aux) == 1:
            check_loadable("the tree of the outputs", state["sweep"]["fold"])
            check_loadable("the first batch's outputs and target", weights)
        return state

    def resume(self, state: dict[str, Any]) -> None:
        self.aux, weights = state["aux"], self.sweep.weights
        self.sweep = Sweep.resumed(state["sweep"], self.without_samples())
        self.sweep.weights = weights
        weights.restore(state["weights"], self.t.loss)


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
        self.rows, self.n, self.of_all = rows, 0, 0
        """Numbers of samples of this process, and of all."""

    def visit(self, args: tuple, n: int) -> int:
        weights, self.sweep = self.sweep.weights, Sweep()
        self.sweep.weights = weights
        own = super().visit(args, n)
        assert self.sweep.engine is not None
        found = self.sweep.engine.finished()
        if self.rows.calls:
            if weights.mean:
                raise ArgumentError(
                    "the loss is a mean, whose N is known after the last batch, but out is a function that is called "
                    "after each. Return the [N] losses or their sum, and divide; or pass tensors as out."
                )
            found = own_memory(found, (args, self.kwargs))
        self.rows.put(found, self.n, own)
        self.n += own
        return own

    def share(self, gather: bool) -> None:
        weights, processes, run = self.sweep.weights, self.begun.processes, self.begun.course.through
        _, each = processes.told("samples", lambda: (run(self.begun.batches), (self.n, weights.seen)))
        self.of_all = sum(n for n, _ in each)
        one_scale(weights, processes, [mean for _, mean in each])

    def results(self) -> Any:
        if not self.of_all:
            raise no_samples()
        check_number(self.of_all, self.begun.counted)
        if self.sweep.weights.mean:
            self.rows.scaled(self.n, 1 / self.of_all)
        return self.rows.result(self.n)


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
        if [name for name, _, _ in given] != [name for name, _, _ in found]:
            wanted = ", ".join(name for name, _, _ in found)
            raise ArgumentError(f"out has other parts than the result, which are {wanted}.")
        for (name, x, axis), (_, y, _) in zip(given, found, strict=True):
            fits = x.ndim == y.ndim and x.shape[:axis] == y.shape[:axis] and x.shape[axis + 1 :] == y.shape[axis + 1 :]
            if not fits or x.dtype != y.dtype:
                sizes = ", ".join("N" if d == axis else str(size) for d, size in enumerate(y.shape))
                raise ArgumentError(f"{name} is {x.dtype} {tuple(x.shape)}, but has to be {y.dtype} ({sizes}).")
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


def check_own(name: str, x: Any, taken: set[int]) -> None:
    """Check that it is a tensor with memory of its own, which is taken from now on."""
    if not isinstance(x, torch.Tensor):
        kind = type(x).__name__
        raise ArgumentTypeError(f"{name} is of type {kind}, but has to be a tensor (torch.from_numpy makes one).")
    if storage_of(x) in taken or any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
        raise ArgumentError(f"{name} has no memory of its own; make it with torch.empty, or map a file.")
    taken.add(storage_of(x))
