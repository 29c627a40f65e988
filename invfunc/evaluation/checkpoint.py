"""What a call has done so far, in a file from which a next one goes on."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from glob import escape
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple
from uuid import uuid4
from zipfile import BadZipFile, ZipFile

import torch

from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.fingerprint import fingerprint
from invfunc.kronecker.matrix import Kronecker
from invfunc.kronecker.origin import Joint, Origin
from invfunc.kronecker.places import Place
from invfunc.reductions.kept_factors import Diagonal, Factors, Kept, Refused
from invfunc.reductions.sides import Sided

_SAFE = [Diagonal, Factors, Joint, Kept, Kronecker, Origin, Place, Refused, Sided]
"""What reductions keep beside tensors, numbers and names."""
_FORMAT = "invfunc.streamed 2"
State = Callable[[], dict[str, Any]]
"""Makes what is known by now, in dicts, tensors and numbers."""


class Head(NamedTuple):
    """What processes have to know of the records of each other."""

    mark: str
    keys: list[int]
    phase: int
    known: int
    """A fingerprint of what is known of the phases before, as eigenvectors."""
    new: bool


@dataclass(frozen=True)
class Record:
    """What a call has done, and what that has brought."""

    identity: dict[str, str]
    """What has to be the same for a call that goes on, by name."""
    keys: list[int]
    """Of drawn columns."""
    mark: str = field(default_factory=lambda: uuid4().hex)
    """The same in the files of all processes of a call."""
    prints: Sequence[int] = ()
    """The fingerprints of the batches that were seen, in this sweep or the one before."""
    phase: int = 0
    """For which the batches come in this sweep."""
    done: int = 0
    """How many of them are done."""
    n: int = 0
    """How many samples those have."""
    first: int | None = None
    """The first batch that has any."""
    state: State | None = None
    """That of the work; None if nothing was done."""
    before: Record | None = None
    """That at the end of the phase before, where other processes may be in that."""

    @property
    def head(self) -> Head:
        known = [_known(t) for t in self.state()["kept"]] if self.state is not None and self.phase else []
        return Head(self.mark, self.keys, self.phase, fingerprint(known), self.state is None)

    def agreed(self, each: Sequence[Head]) -> Record:
        """What this process goes on from so that all do in one phase, with the same keys: of the records of all."""
        written = [head for head in each if not head.new] or each[:1]
        if any(head.mark != written[0].mark for head in written):
            raise ArgumentError(
                "the checkpoints of the processes are of different calls. Remove them to start again, or go on with "
                "those of one call."
            )
        found, phase = self, min(head.phase for head in each)
        if phase and len({head.known for head in each if head.phase == phase}) > 1:  # found on other machines
            phase -= 1
        while found is not None and found.phase > phase:
            found = found.before
        mark, keys = written[0].mark, written[0].keys
        if found is None:  # another process has lost its file: there is nothing that all could go on from
            return Record(self.identity, keys, mark)
        return replace(found, mark=mark, keys=keys, prints=self.prints)

    def written(self) -> dict[str, Any]:
        """It, in dicts, tensors and numbers."""
        state = None if self.state is None else self.state()
        before = None if self.before is None else self.before.written()
        prints = torch.tensor(self.prints, dtype=torch.int64)
        return {**vars(self), "prints": prints, "state": state, "before": before}

    @classmethod
    def read(cls, found: dict[str, Any]) -> Record:
        state, before = found["state"], found["before"]
        made = None if state is None else lambda: state
        return cls(
            **{
                **found,
                "prints": found["prints"].tolist(),
                "state": made,
                "before": None if before is None else cls.read(before),
            }
        )


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
        """What a call before has written, if it was of the same; a new one, with these keys, if there is no file."""
        if not self.path.parent.is_dir():
            raise ArgumentError(f"checkpoint={str(self.path)!r}: there is no folder {str(self.path.parent)!r}.")
        if self.path.is_dir():
            raise ArgumentError(f"checkpoint={str(self.path)!r}: it is a folder. Give the name of a file in it.")
        if not os.access(self.path.parent, os.W_OK):
            raise self.unwritten("this process may not write there")
        self._remove_parts()
        with suppress(FileNotFoundError), self.path.open("rb") as file:  # another call may remove it meanwhile
            return self._read(file, identity, device)
        return Record(identity, keys)

    def _read(self, file: BinaryIO, identity: dict[str, str], device: torch.device) -> Record:
        try:
            with ZipFile(file) as parts:
                if (broken := parts.testzip()) is not None:  # which torch.load does not look for
                    raise BadZipFile(broken)
            file.seek(0)
            known = torch.serialization.get_safe_globals()  # at its end the context takes away what it was given
            with torch.serialization.safe_globals([kind for kind in _SAFE if kind not in known]):
                found = torch.load(file, map_location=device)
        except Exception as error:  # of what is no file of torch's, whatever its bytes lead to
            raise self.refused(f"cannot be read ({type(error).__name__})") from None
        if not isinstance(found, dict) or found.pop("format", None) != _FORMAT:
            raise self.refused("is something else than a state of `streamed` of this version")
        for name in {**found["identity"], **identity}:
            was, now = (each.get(name, "none") for each in (found["identity"], identity))
            if was != now:
                raise self.refused(f"was written with another value of {name}: {was}, and not {now}")
        return Record.read(found)

    def remove(self) -> None:
        self.path.unlink(missing_ok=True)
        self._remove_parts()

    def _remove_parts(self) -> None:
        """Remove what processes that were killed while they wrote have left."""
        for part in self.path.parent.glob(f"{escape(self.path.name)}.{'[0-9a-f]' * 32}.part"):
            part.unlink(missing_ok=True)

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
        part = self.path.with_name(f"{self.path.name}.{uuid4().hex}.part")  # another call may write its own
        try:
            with part.open("xb") as file:
                torch.save({"format": _FORMAT, **record.written()}, file)
                file.flush()
                os.fsync(file.fileno())
            with suppress(FileNotFoundError):  # another call with this file has begun or ended meanwhile
                part.replace(self.path)
        except OSError as error:
            raise self.unwritten(error) from error
        finally:
            part.unlink(missing_ok=True)
        with suppress(OSError):  # not every system opens folders
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


def _known(kept: dict[str, Any] | None) -> list[Any]:
    """What is known of each phase before."""
    return [] if kept is None else [kept["known"], *_known(kept["before"])]


def check_loadable(name: str, x: Any) -> None:
    """Check that what the caller's functions have made can be written down."""
    if not _loadable(x):
        raise ArgumentError(f"{name} is kept in the checkpoint, which takes tensors, numbers, texts and lists of them.")


def _loadable(x: Any) -> bool:
    """Whether `torch.load` gives back what was saved, with its default settings."""
    file = BytesIO()
    try:
        torch.save(x, file)
        file.seek(0)
        torch.load(file)
    except Exception:  # whatever objects of the caller's may raise
        return False
    return True
