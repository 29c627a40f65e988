"""Checkpoints: the state of a call in a file, from which a next one goes on."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple, Protocol
from uuid import uuid4

import torch

from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.batches import Batches
from invfunc.evaluation.processes import fingerprint
from invfunc.kronecker.matrix import Joint, Kronecker, Origin
from invfunc.kronecker.places import Place
from invfunc.reductions.factors import Factors, ParameterFactors, Sided

_SAFE = [Factors, Joint, ParameterFactors, Kronecker, Origin, Place, Sided]
"""Types that reductions keep beside tensors, numbers and names."""
_FORMAT = "invfunc.streamed 5"


class Head(NamedTuple):
    """Facts about a record that other processes have to know."""

    mark: str
    keys: list[int]
    phase: int
    known: int
    """A fingerprint of what is known of the phases before, as eigenvectors."""
    new: bool


@dataclass(frozen=True)
class Record:
    """Record of a call: the batches that are done, and the state that they have brought."""

    identity: dict[str, str]
    """Descriptions that have to be the same for a call that goes on, by name."""
    keys: list[int]
    """Of drawn columns."""
    mark: str = field(default_factory=lambda: uuid4().hex)
    """The same in the files of all processes of a call."""
    prints: list[int] = field(default_factory=list)
    """The fingerprints of the batches that were done, in this sweep or the one before."""
    phase: int = 0
    """For which the batches come in this sweep."""
    done: int = 0
    """Number of batches that are done."""
    n: int = 0
    """Number of samples of these."""
    state: dict[str, Any] | None = None
    """State of the work; None if nothing was done."""

    @property
    def head(self) -> Head:
        known = fingerprint(self.state["known"]) if self.state is not None and self.phase else 0
        return Head(self.mark, self.keys, self.phase, known, self.state is None)

    def agreed(self, each: Sequence[Head]) -> Record:
        """Record from which this process goes on so that all do in one phase, with the same keys."""
        first, *others = [head for head in each if not head.new] or each[:1]
        phase = min(head.phase for head in each)
        if any(head.mark != first.mark for head in others) or (phase and len({head.known for head in each}) > 1):
            raise ArgumentError(
                "the checkpoints of the processes are of different calls. Remove them to start again, or go on with "
                "those of one call."
            )
        if self.phase > phase:  # another process has lost its file, or has not come as far
            return Record(self.identity, first.keys, first.mark)
        return replace(self, mark=first.mark, keys=first.keys)


@dataclass(frozen=True)
class Checkpoint:
    """A file, and after how many seconds it is written anew."""

    path: Path
    every: float

    @classmethod
    def of(cls, path: Any, every: Any) -> Checkpoint | None:
        if path is None:
            if every != 60:
                raise ArgumentError(f"streamed(t, every={every!r}): there is no file to write. Give checkpoint=, too.")
            return None
        if not isinstance(path, (str, os.PathLike)):
            kind = type(path).__name__
            raise ArgumentTypeError(f"streamed(t, checkpoint=...): it is of type {kind}, but has to be a file name.")
        if not isinstance(every, (int, float)) or not every >= 0:
            raise ArgumentError(f"streamed(t, every={every!r}): it has to be a number of seconds.")
        return cls(Path(path), float(every))

    def of_process(self, rank: int) -> Checkpoint:
        """The file of one of several."""
        return replace(self, path=self.path.with_name(f"{self.path.name}.{rank}"))

    def record(self, identity: dict[str, str], keys: list[int], device: torch.device) -> Record:
        """Record of a call before, if it was of the same; a new one, with these keys, if there is no file."""
        if not self.path.exists():
            if not os.access(self.path.parent, os.W_OK):
                raise self.unwritten(f"this process may not write in the folder {str(self.path.parent)!r}")
            return Record(identity, keys)
        try:
            known = torch.serialization.get_safe_globals()  # at its end the context takes away what it was given
            with torch.serialization.safe_globals([kind for kind in _SAFE if kind not in known]):
                found = torch.load(self.path, map_location=device)
        except Exception as error:  # of what is no file of torch's, whatever its bytes lead to
            raise self.refused(f"cannot be read ({type(error).__name__})") from None
        if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
            raise self.refused("is something else than a state of `streamed` of this version")
        for name in {**found["identity"], **identity}:
            was, now = (each.get(name, "none") for each in (found["identity"], identity))
            if was != now:
                raise self.refused(f"was written with another value of {name}: {was}, and not {now}")
        return Record(**found)

    @property
    def part(self) -> Path:
        """The next file, while it is written: a process that is killed leaves it, and the next call replaces it."""
        return self.path.with_name(f"{self.path.name}.part")

    def remove(self) -> None:
        for path in (self.path, self.part):
            path.unlink(missing_ok=True)

    def unwritten(self, why: Any) -> ArgumentError:
        return ArgumentError(
            f"checkpoint={str(self.path)!r}: the file cannot be written: {why}. Make room for it, or give another one."
        )

    def refused(self, why: str) -> ArgumentError:
        return ArgumentError(
            f"checkpoint={str(self.path)!r}: the file {why}. Remove it to start again, or go on with its own call."
        )

    def write(self, record: Record) -> None:
        """Replace the file at once, so that it is the old or the new one whatever happens meanwhile."""
        try:
            with self.part.open("wb") as file:
                torch.save({"format": _FORMAT, **vars(record)}, file)
                file.flush()
                os.fsync(file.fileno())
            self.part.replace(self.path)
        except OSError as error:
            raise self.unwritten(error) from error
        finally:
            self.part.unlink(missing_ok=True)


def check_loadable(name: str, x: Any) -> None:
    """Check that `torch.load` gives back what the caller's functions have made, with its default settings."""
    file = BytesIO()
    try:
        torch.save(x, file)
        file.seek(0)
        torch.load(file)
    except Exception:  # whatever objects of the caller's may raise
        raise ArgumentError(
            f"{name} is kept in the checkpoint, which takes tensors, numbers, texts and lists of them."
        ) from None


class Resumable(Protocol):
    """Work that is done with batches, whose state can be saved."""

    @property
    def phase(self) -> int:
        """For which the batches come now."""
        ...

    @property
    def seen(self) -> int:
        """Number of samples of this phase that were seen."""
        ...

    def visit(self, args: tuple, n: int) -> int:
        """See the next batch, behind n samples; how many it has."""
        ...

    def state(self) -> dict[str, Any]:
        """All that is known by now, and under `known` what is of the phases before."""
        ...

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        ...


class Course:
    """Has a work see the batches that are not done: with a file, what they have brought is there when it is left too
    early."""

    work: Resumable

    def __init__(self, record: Record, file: Checkpoint | None = None) -> None:
        self.record, self._new, self._written = record, False, time.monotonic()
        self.file: Any = file

    @property
    def keeps(self) -> bool:
        """Tells whether a file has to be there until the result is."""
        return self.file is not None

    def begin(self, work: Resumable) -> None:
        """Put it where it was when a call before ended."""
        self.work = work
        if self.record.state is not None:
            work.resume(self.record.state)

    def through(self, batches: Batches) -> None:
        """Have the batches seen, for the phase that the work is in."""
        if not self.keeps:
            batches(self.work.visit, enumerate)
            return
        if self.work.phase > self.record.phase:
            self._note(phase=self.work.phase, done=0, n=0)
        batches(lambda args, n: self.work.visit(args, self.record.n), self._remaining)

    def __enter__(self) -> Course:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self.keeps and kind is None:
            self.file.remove()
        elif self._new:
            self._write()

    def _remaining(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
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
                self._note(done=number + 1, n=self.work.seen)
        if number + 1 < len(prints):
            raise self.file.refused(f"is of a loader with at least {len(prints)} batches, and not {number + 1}")

    def _note(self, **what: Any) -> None:
        self.record, self._new = replace(self.record, state=self.work.state(), **what), True
        if time.monotonic() - self._written >= self.file.every:
            self._write()

    def _write(self) -> None:
        self.file.write(self.record)
        self._new, self._written = False, time.monotonic()
