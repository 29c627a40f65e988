"""The samples of one process among those of several, and how all of them begin."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, TypeVar

from invfunc import tree
from invfunc._torch.functorch import transforming
from invfunc._torch.sharded import sharded
from invfunc.arguments.problem import InDims
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.batches import Batches, Feed, batches_of, check_loader, counted, samples_of, size_of
from invfunc.evaluation.checkpoint import Checkpoint, Head
from invfunc.evaluation.course import Course, course_of
from invfunc.evaluation.layout import parted, whole
from invfunc.evaluation.processes import Processes, bits, same
from invfunc.evaluation.rounds import Rounds, through
from invfunc.products.along import space_of

T = TypeVar("T")
At = Callable[[Any], Batches]
"""From the whole parameters to the batches at them."""


@dataclass(frozen=True)
class Asked:
    """What a call has to know before the first batch is seen."""

    args: tuple
    own: int
    """How many of these are not of the batch; the first are the parameters."""
    names: Any
    alike: dict[str, str]
    """What has to be the same in all processes, beside the parameters."""
    keys: list[int]
    """Of drawn columns."""
    identity: Callable[[], dict[str, str]] = dict
    """What a checkpoint has to be of."""
    again: str = ""
    """Why batches are seen twice, if they are."""
    check: Callable[[int], None] | None = None
    """Looks for what is wrong if there will be so many samples."""
    whole: bool = True
    """Whether DTensors are gathered before the first batch, and not where they are read."""


@dataclass(frozen=True)
class Part:
    """The samples of this process, among those of a group."""

    group: Any
    feed: Feed | None
    """How the batches of a loader come; None if the arguments are one batch."""
    in_dims: InDims
    file: Checkpoint | None = None
    """That of the process, but for the number of this one."""

    def shown(self, t: Any) -> str:
        return f"distributed({t!r})" if self.feed is None else f"distributed(streamed({t!r}))"

    def names(self, first: Sequence[str], own: Any, count: int) -> Any:
        """What so many arguments are called, of which a loader comes behind the first ones."""
        return own if self.feed is None else [*first, "loader"][:count]

    def alone(self, params: Any) -> Processes:
        """All processes, of which no other one is asked: this one has to have the parameters."""
        if any(map(sharded, tree.tensors((params,)))):
            raise ArgumentError(
                "the parameters are DTensors, and this process has a part of each; no other is asked. Pass "
                "p.full_tensor() of each to explain, which is what a call computes with."
            )
        return Processes.of(self.group)

    def call(self) -> AbstractContextManager[None]:
        """One of all processes."""
        return Processes.of(self.group).call()

    def begun(self, asked: Asked) -> Begun:
        """What is known of all processes before the first batch is seen."""
        processes = Processes.of(self.group)

        def looked() -> tuple[tuple[At, Course], tuple[dict[str, str], Head, int]]:
            if transforming():
                raise ArgumentError(
                    "within a transform of torch.func, as it is not differentiated. Apply the transform to the "
                    "function, or to what is computed of each batch."
                )
            space_of(asked.args, asked.names)
            at, count = (self._of_batch if self.feed is None else self._of_loader)(asked)
            course, alike = self._course(processes, asked), {**asked.alike, **bits("params", asked.args[0])}
            return (at, course), (alike, course.record.head, count)

        (at, course), each = processes.told("arguments", looked)
        same([alike for alike, _, _ in each])
        course.agree([head for _, head, _ in each])
        params, rounds = asked.args[0], None
        if asked.whole or not any(map(sharded, tree.tensors((params,)))):
            params = whole(processes, "params", params)
        else:
            params, rounds = parted(processes, "params", params)
        counts = [n for _, _, n in each]
        counted, batches = sum(counts) if asked.keys else None, at(params)
        if rounds is None and processes.size > 1:  # else all meet where a parameter is read
            processes.alarm.mark = course.record.mark
            batches = processes.alarm.heard_in(batches)
        return Begun(processes, params, rounds, batches, course, sum(counts[: processes.rank]), counted)

    def _course(self, processes: Processes, asked: Asked) -> Course:
        """That of this process, which has a file of its own."""
        file, place = self.file, f"{processes.rank} of {processes.size}"
        if file is not None:
            file = file.of_process(processes.rank)
        device = (self.feed or Feed()).goal(asked.args[0])
        return course_of(file, lambda: {"the process": place, **asked.identity()}, asked.keys, device)

    def _of_batch(self, asked: Asked) -> tuple[At, int]:
        batch = asked.args[asked.own :]
        n = size_of((asked.args[0], *batch), self.in_dims)
        return lambda params: lambda visit, _: visit((params, *batch), 0) if n else 0, n

    def _of_loader(self, asked: Asked) -> tuple[At, int]:
        args, own = asked.args, asked.own
        if len(args) != own + 1:
            wanted = " and ".join(["the parameters", "a vector"][:own])
            raise ArgumentTypeError(f"it takes {wanted} and a loader, and got {len(args)} positional arguments.")
        drawn = "each sample draws by how many came before, so that they are counted first" if asked.keys else ""
        check_loader(args[own], sweeps=asked.again or drawn)
        if asked.check is not None:
            asked.check(counted(args[own], self.in_dims))
        feed = self.feed or Feed()
        count = samples_of(args[own], self.in_dims) if asked.keys else 0
        return lambda params: batches_of(args[own], params, self.in_dims, feed), count


@dataclass(frozen=True)
class Begun:
    """What is known of all processes before the first batch is seen."""

    processes: Processes
    params: Any
    """As a whole."""
    rounds: Rounds | None
    """What brings those to operations that are not here."""
    batches: Batches
    """Those of this one."""
    course: Course
    """From where all go on, with keys of drawn columns that are the same in all."""
    before: int
    """How many samples the processes before have, where columns are drawn."""
    counted: int | None
    """How many all have, where columns are drawn."""

    def through(self) -> None:
        """Have the batches seen, for the phase that the work is in."""
        through(self.rounds, lambda: self.course.through(self.batches))

    def told(self, at: str, step: Callable[[], T]) -> T:
        """What a step gives; where there are files, which are needed until all have done it, all do or none."""
        if not self.course.keeps:
            return step()
        return self.processes.told(at, lambda: (step(), None))[0]
