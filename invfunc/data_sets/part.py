"""The batches of a call: those of one process or of one among several, and how all of them begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from invfunc import tree
from invfunc._torch.sharded import sharded
from invfunc.arguments.problem import InDims
from invfunc.errors import ArgumentTypeError
from invfunc.evaluation.batches import (
    GIVES_BATCHES,
    Batches,
    Feed,
    batches_of,
    check_loader,
    check_not_transforming,
    counted,
    samples_of,
)
from invfunc.evaluation.checkpoint import Checkpoint, Course, Head, Record
from invfunc.evaluation.processes import ALONE, Processes, bits, same
from invfunc.evaluation.rounds import Rounds, parted, through, whole
from invfunc.products.product import space_of

T = TypeVar("T")
PARAMETERS = ("the parameters",)


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
        args: tuple,
        own: tuple[str, ...],
        names: Any,
        alike: dict[str, str],
        keys: list[int],
        identity: Callable[[], dict[str, str]] = dict,
        again: str = "",
        check: Callable[[int, Any], None] | None = None,
        whole_first: bool = True,
        empty: list[tuple] | None = None,
    ) -> Begun:
        """Facts about all processes before the first batch is seen.

        The arguments have their `own` names in front of the batch, of which the first are the parameters. What is
        `alike` has to be the same in all processes, and `identity` in a checkpoint, too; by `keys` columns are drawn.
        Batches are seen twice for the reason `again`; `check` looks for what is wrong if there will be so many samples,
        with these parameters, which are gathered `whole_first`, or where they are read. `empty` takes the arguments of
        a batch without samples.
        """
        processes, params, counts = self.processes(), args[:1], bool(keys) and not self.alone

        def looked() -> tuple[tuple[Any, Course], tuple[dict[str, str], Head, int]]:
            check_not_transforming()
            space_of(args, names)
            scale = {} if self.reduction is None else {"reduction": self.reduction}
            drawn = "each sample draws by how many came before, so that they are counted first" if counts else ""
            loader = [args[len(own) :]] if self.feed is None else self.loader(args, own, again or drawn)
            if check is not None:
                check(counted(loader, self.in_dims), args[0])
            count = samples_of(loader, self.in_dims) if counts else 0
            course = self._course(processes, args[0], keys, lambda: {**scale, **identity()})
            said = {**alike, **scale, **bits("params", args[0])} if processes.size > 1 else {}
            return (loader, course), (said, course.record.head, count)

        (loader, course), each = processes.told("arguments", looked)
        same([alike for alike, _, _ in each])
        course.agree([head for _, head, _ in each])
        given, rounds = args[0], None
        if not self.alone and any(map(sharded, tree.tensors(params))):
            if whole_first:
                given = whole(processes, "params", given)
            else:
                given, rounds = parted(processes, "params", given)
        numbers = [n for _, _, n in each]
        total, before = sum(numbers) if counts else None, sum(numbers[: processes.rank])
        batches = batches_of(loader, given, self.in_dims, self.feed, empty if self.alone else None)
        return Begun(processes, given, rounds, batches, course, before, total)

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
