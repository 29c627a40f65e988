"""The batches of a call: those of one process or of one among several, and how all of them begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

from invfunc import tree
from invfunc._torch.functorch import transforming
from invfunc._torch.sharded import sharded
from invfunc.arguments.problem import InDims
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.batches import (
    GIVES_BATCHES,
    Batches,
    Feed,
    batches_of,
    check_loader,
    counted,
    samples_of,
    size_of,
)
from invfunc.evaluation.checkpoint import Checkpoint, Course, Head, course_of
from invfunc.evaluation.processes import ALONE, Processes, bits, same
from invfunc.evaluation.rounds import Rounds, parted, through, whole
from invfunc.products.product import space_of

T = TypeVar("T")
PARAMETERS = ("the parameters",)
At = Callable[[Any], Batches]
"""From the whole parameters to the batches at them."""


@dataclass(frozen=True)
class Asked:
    """Arguments of a call, and what has to be known of it before the first batch is seen."""

    args: tuple
    own: tuple[str, ...]
    """Names of the arguments in front of the batch; the first are the parameters."""
    names: Any
    alike: dict[str, str]
    """Descriptions that have to be the same in all processes, beside the parameters."""
    keys: list[int]
    """Keys of drawn columns."""
    identity: Callable[[], dict[str, str]] = dict
    """Descriptions that a checkpoint has to have."""
    again: str = ""
    """Reason for which batches are seen twice, if they are."""
    check: Callable[[int, Any], None] | None = None
    """Looks for what is wrong if there will be so many samples, with these parameters."""
    whole: bool = True
    """Tells whether parameters are gathered before the first batch, and not where they are read."""
    empty: list[tuple] = field(default_factory=list)
    """Takes the arguments of a batch without samples."""


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

    def begun(self, asked: Asked) -> Begun:
        """Facts about all processes before the first batch is seen."""
        processes, params = self.processes(), asked.args[:1]

        def looked() -> tuple[tuple[At, Course], tuple[dict[str, str], Head, int]]:
            if transforming():
                raise ArgumentError(
                    "within a transform of torch.func, as it is not differentiated. Apply the transform to the "
                    "function, or to what is computed of each batch."
                )
            space_of(asked.args, asked.names)
            at, count = (self._of_batch if self.feed is None else self._of_loader)(asked, processes)
            course = self._course(processes, asked)
            alike = {**asked.alike, **self._scale(), **bits("params", params[0])} if processes.size > 1 else {}
            return (at, course), (alike, course.record.head, count)

        (at, course), each = processes.told("arguments", looked)
        same([alike for alike, _, _ in each])
        course.agree([head for _, head, _ in each])
        given, rounds = params[0], None
        if not self.alone and any(map(sharded, tree.tensors(params))):
            if asked.whole:
                given = whole(processes, "params", given)
            else:
                given, rounds = parted(processes, "params", given)
        counts = [n for _, _, n in each]
        total = sum(counts) if asked.keys and not self.alone else None
        return Begun(processes, given, rounds, at(given), course, sum(counts[: processes.rank]), total)

    def _course(self, processes: Processes, asked: Asked) -> Course:
        """The course of this process; of several, each has a file of its own."""
        file, place = self.file, {} if self.alone else {"the process": f"{processes.rank} of {processes.size}"}
        if file is not None and not self.alone:
            file = file.of_process(processes.rank)
        device = (self.feed or Feed()).goal(asked.args[0])
        return course_of(file, lambda: {**place, **self._scale(), **asked.identity()}, asked.keys, device)

    def _scale(self) -> dict[str, str]:
        return {} if self.reduction is None else {"reduction": self.reduction}

    def _of_batch(self, asked: Asked, processes: Processes) -> tuple[At, int]:
        batch = asked.args[len(asked.own) :]
        n = size_of((asked.args[0], *batch), self.in_dims)
        return lambda params: lambda visit, _: visit((params, *batch), 0) if n else 0, n

    def _of_loader(self, asked: Asked, processes: Processes) -> tuple[At, int]:
        counts = bool(asked.keys) and not self.alone
        drawn = "each sample draws by how many came before, so that they are counted first" if counts else ""
        loader, feed = self.loader(asked.args, asked.own, asked.again or drawn), self.feed or Feed()
        if asked.check is not None:
            asked.check(counted(loader, self.in_dims), asked.args[0])
        empty = asked.empty if self.alone else None
        count = samples_of(loader, self.in_dims) if counts else 0
        return lambda params: batches_of(loader, params, self.in_dims, feed, empty), count


@dataclass(frozen=True)
class Begun:
    """Facts about all processes before the first batch is seen."""

    processes: Processes
    params: Any
    """The parameters as a whole, or tensors that stand for them."""
    rounds: Rounds | None
    """Brings parameters to operations that are not here."""
    batches: Batches
    """The batches of this process."""
    course: Course
    """The course from where all go on, with keys of drawn columns that are the same in all."""
    before: int
    """Number of samples of the processes before, where columns are drawn."""
    counted: int | None
    """Number of samples of all, where columns are drawn."""

    def through(self) -> None:
        """Have the batches seen, for the phase that the work is in."""
        through(self.rounds, lambda: self.course.through(self.batches))

    def told(self, at: str, step: Callable[[], T]) -> T:
        """The result of a step; where there are files, which are needed until all have done it, all do or none."""
        if not self.course.keeps:
            return step()
        return self.processes.told(at, lambda: (step(), None))[0]
