"""What is done with the batches of a loader, of one process or of one among several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

from invfunc import tree
from invfunc._torch.sharded import sharded
from invfunc.arguments.problem import InDims, batch_dims
from invfunc.data_sets.rows import Rows
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
from invfunc.reductions.kept_shares import KeptShares, RowsWithKept
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
        batches = batches_of(loader, params, self.in_dims, self.feed)
        return Begun(
            processes, params, batches, course, sum(numbers[: processes.rank]), sum(numbers) if counts else None
        )

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
            engine.check_joined()
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
