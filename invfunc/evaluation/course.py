"""How a call goes through its batches, and what it writes down of those that are done."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Protocol

import torch

from invfunc.evaluation.batches import Batches
from invfunc.evaluation.checkpoint import Checkpoint, Head, Record, State
from invfunc.evaluation.fingerprint import fingerprint


class Work(Protocol):
    """What is done with the batches."""

    @property
    def phase(self) -> int:
        """For which they come now."""
        ...

    def visit(self, args: tuple, n: int) -> int:
        """See the next batch, behind n samples; how many it has."""
        ...

    def state(self) -> State:
        """All that is known by now."""
        ...

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        ...

    def weigh(self, args: tuple) -> None:
        """See the first batch once more, which is no part of a state: a loss is compared with what it is there."""
        ...


class Course:
    """Has a work see batches."""

    work: Work
    keeps = False
    """Whether a file has to be there until the result is."""

    def __init__(self, record: Record) -> None:
        self.record = record

    def agree(self, each: Sequence[Head]) -> None:
        """Go on from where all processes can, of whose records these are the heads."""
        self.record = self.record.agreed(each)

    def begin(self, work: Work) -> None:
        """Put it where it was when a call before ended."""
        self.work = work

    def through(self, batches: Batches) -> None:
        """Have the batches seen, for the phase that the work is in."""
        batches(self.work.visit, enumerate)

    def __enter__(self) -> Course:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        return


class Log(Course):
    """Has a work see those that are not done: what they have brought is in a file when it is left too early."""

    keeps = True

    def __init__(self, file: Checkpoint, record: Record) -> None:
        super().__init__(record)
        self.file, self.several = file, False
        self._done = self._n = self._number = 0
        self._new, self._written = False, time.monotonic()

    def agree(self, each: Sequence[Head]) -> None:
        super().agree(each)
        self.several = len(each) > 1  # which may have to go back to the phase before, and this one with them

    def begin(self, work: Work) -> None:
        super().begin(work)
        self._prints, self._known = [*self.record.prints], len(self.record.prints)
        if self.record.state is not None:
            work.resume(self.record.state())

    def through(self, batches: Batches) -> None:
        if self.work.phase > self.record.phase:
            before, self._known = self.record if self.several else None, len(self._prints)
            self._note(phase=self.work.phase, done=0, n=0, before=before)
            self._before_others()
        self._done, self._n = self.record.done, self.record.n
        batches(self._visit, self._remaining)
        self._before_others()

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None:
            self.file.remove()
        elif self._new:
            self._write()

    def _remaining(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """The batches that are not done, with their numbers, and the first one, which is seen again."""
        number = -1
        for number, batch in enumerate(batches):
            mark = fingerprint(batch)
            if number == len(self._prints):
                self._prints.append(mark)
            elif self._prints[number] != mark:
                raise self.file.refused(
                    f"is of a loader whose batch {number} was another one (one that shuffles has to give its batches "
                    "in the same order again)"
                )
            if number < self._done and number != self.record.first:
                continue
            self._number = number
            yield number, batch
            if number >= self._done:
                self._note(done=number + 1, n=self._n)
        if number + 1 < len(self._prints):
            raise self.file.refused(f"is of a loader with at least {len(self._prints)} batches, and not {number + 1}")

    def _visit(self, args: tuple, n: int) -> int:
        """See one of those."""
        if self._number < self._done:
            self.work.weigh(args)
            return 0
        own = self.work.visit(args, self._n)
        self._n += own
        if self.record.first is None:
            self.record = replace(self.record, first=self._number)
        return own

    def _before_others(self) -> None:
        """Write what is new before other processes are waited for, as that may take long."""
        if self.several and self._new:
            self._write()

    def _note(self, **what: Any) -> None:
        self.record, self._new = replace(self.record, state=self.work.state(), **what), True
        if time.monotonic() - self._written >= self.file.every:
            self._write()

    def _write(self) -> None:
        self.file.write(replace(self.record, prints=self._prints[: max(self._known, self.record.done)]))
        self._new, self._written = False, time.monotonic()


def course_of(
    file: Checkpoint | None, identity: Callable[[], dict[str, str]], keys: list[int], device: torch.device
) -> Course:
    """That of a call which draws by these keys, unless it goes on with a file, if it has one; states are on a device.

    `identity` says by name what has to be the same as before, beside the batches.
    """
    if file is None:
        return Course(Record({}, keys))
    return Log(file, file.record(identity(), keys, device))
