"""Checkpoints: the state of a call in a file, from which a next one goes on, and fingerprints of what it was of."""

from __future__ import annotations

import ctypes
import os
import re
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from invfunc import tree
from invfunc._torch.sharded import sharded
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.batches import Batches
from invfunc.evaluation.weights import BatchWeights
from invfunc.kronecker.matrix import Kronecker
from invfunc.kronecker.origin import Joint, Origin
from invfunc.kronecker.places import Place
from invfunc.reductions import Reduction
from invfunc.reductions.kept_factors import DiagonalFactors, Factors, ParameterFactors, Refused
from invfunc.reductions.sides import Sided

_SAFE = [DiagonalFactors, Factors, Joint, ParameterFactors, Kronecker, Origin, Place, Refused, Sided]
"""Types that reductions keep beside tensors, numbers and names."""
_FORMAT = "invfunc.streamed 4"
State = Callable[[], dict[str, Any]]
"""Makes what is known by now, in dicts, tensors and numbers."""


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
    prints: Sequence[int] = ()
    """The fingerprints of the batches that were seen, in this sweep or the one before."""
    phase: int = 0
    """For which the batches come in this sweep."""
    done: int = 0
    """Number of batches that are done."""
    n: int = 0
    """Number of samples of these."""
    state: State | None = None
    """State of the work; None if nothing was done."""

    @property
    def head(self) -> Head:
        known = [_known(t) for t in self.state()["kept"]] if self.state is not None and self.phase else []
        return Head(self.mark, self.keys, self.phase, fingerprint(known), self.state is None)

    def agreed(self, each: Sequence[Head]) -> Record:
        """Record from which this process goes on so that all do in one phase, with the same keys."""
        written = [head for head in each if not head.new] or each[:1]
        mark, keys = written[0].mark, written[0].keys
        if any(head.mark != mark for head in written):
            raise ArgumentError(
                "the checkpoints of the processes are of different calls. Remove them to start again, or go on with "
                "those of one call."
            )
        phase = min(head.phase for head in each)
        if phase and len({head.known for head in each}) > 1:  # found on other machines
            phase -= 1
        if self.phase > phase:  # another process has lost its file, or has not come as far
            return Record(self.identity, keys, mark)
        return replace(self, mark=mark, keys=keys)

    def written(self) -> dict[str, Any]:
        """It, in dicts, tensors and numbers."""
        state = None if self.state is None else self.state()
        return {**vars(self), "prints": torch.tensor(self.prints, dtype=torch.int64), "state": state}

    @classmethod
    def read(cls, found: dict[str, Any]) -> Record:
        state = found["state"]
        made = None if state is None else lambda: state
        return cls(**{**found, "prints": found["prints"].tolist(), "state": made})


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
        if not self.path.parent.is_dir():
            raise ArgumentError(f"checkpoint={str(self.path)!r}: there is no folder {str(self.path.parent)!r}.")
        if self.path.is_dir():
            raise ArgumentError(f"checkpoint={str(self.path)!r}: it is a folder. Give the name of a file in it.")
        if not os.access(self.path.parent, os.W_OK):
            raise self.unwritten("this process may not write there")
        return self._read(identity, device) if self.path.exists() else Record(identity, keys)

    def _read(self, identity: dict[str, str], device: torch.device) -> Record:
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
        return Record.read(found)

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
                torch.save({"format": _FORMAT, **record.written()}, file)
                file.flush()
                os.fsync(file.fileno())
            self.part.replace(self.path)
        except OSError as error:
            raise self.unwritten(error) from error
        finally:
            self.part.unlink(missing_ok=True)


def _known(kept: dict[str, Any] | None) -> list[Any]:
    """Facts that are known of each phase before."""
    return [] if kept is None else [kept["known"], *_known(kept["before"])]


def check_loadable(name: str, x: Any) -> None:
    """Check that what the caller's functions have made can be written down."""
    if not _loadable(x):
        raise ArgumentError(f"{name} is kept in the checkpoint, which takes tensors, numbers, texts and lists of them.")


def _loadable(x: Any) -> bool:
    """Tells whether `torch.load` gives back what was saved, with its default settings."""
    file = BytesIO()
    try:
        torch.save(x, file)
        file.seek(0)
        torch.load(file)
    except Exception:  # whatever objects of the caller's may raise
        return False
    return True


# How a call goes through its batches


class StreamWork(ABC):
    """Work that is done with the batches, whose state can be saved."""

    phase = 0
    """For which the batches come now."""
    has_aux = False
    aux: list[Any]
    """Those of the batches that were seen."""
    weights: BatchWeights
    loss: Any = None
    """The loss, if it is given apart."""

    @abstractmethod
    def visit(self, args: tuple, n: int) -> int:
        """See the next batch, behind n samples; how many it has."""

    @abstractmethod
    def kept(self) -> dict[str, Any]:
        """All that is known by now, but aux."""

    @abstractmethod
    def keep(self, kept: dict[str, Any]) -> None:
        """Go on from what was known."""

    def state(self) -> State:
        """All that is known by now."""
        if self.has_aux:
            check_loadable("aux", self.aux[-1:])
        kept, count, weights = self.kept(), len(self.aux), self.weights.saved()
        if weights is not None and count == 1:
            check_loadable("the first batch's outputs and target", weights)
        return lambda: {**kept, "weights": weights, "aux": self.aux[:count]}

    def resume(self, state: dict[str, Any]) -> None:
        """Go on from a state."""
        self.aux = state["aux"]
        self.weights.restore(state["weights"], self.loss)
        self.keep(state)


class Course:
    """Has a work see the batches that are not done: with a file, what they have brought is there when it is left too
    early."""

    work: StreamWork

    def __init__(self, record: Record, file: Checkpoint | None = None) -> None:
        self.record, self.several = record, False
        self.file: Any = file
        self._done = self._n = self._known = 0
        self._prints, self._new, self._written = list[int](), False, time.monotonic()

    @property
    def keeps(self) -> bool:
        """Tells whether a file has to be there until the result is."""
        return self.file is not None

    def agree(self, each: Sequence[Head]) -> None:
        """Go on from where all processes can, of whose records these are the heads."""
        self.record, self.several = self.record.agreed(each), len(each) > 1

    def begin(self, work: StreamWork) -> None:
        """Put it where it was when a call before ended."""
        self.work, self._prints, self._known = work, [*self.record.prints], len(self.record.prints)
        if self.record.state is not None:
            work.resume(self.record.state())

    def through(self, batches: Batches) -> None:
        """Have the batches seen, for the phase that the work is in."""
        if not self.keeps:
            batches(self.work.visit, enumerate)
            return
        if self.work.phase > self.record.phase:
            self._known = len(self._prints)
            self._note(phase=self.work.phase, done=0, n=0)
            self._before_others()
        self._done, self._n = self.record.done, self.record.n
        batches(self._visit, self._remaining)
        self._before_others()

    def __enter__(self) -> Course:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if self.keeps and kind is None:
            self.file.remove()
        elif self._new:
            self._write()

    def _remaining(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """The batches that are not done, with their numbers."""
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
            if number >= self._done:
                yield number, batch
                self._note(done=number + 1, n=self._n)
        if number + 1 < len(self._prints):
            raise self.file.refused(f"is of a loader with at least {len(self._prints)} batches, and not {number + 1}")

    def _visit(self, args: tuple, n: int) -> int:
        """See one of those."""
        own = self.work.visit(args, self._n)
        self._n += own
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


# What tells values from others, also in another process


def fingerprint(x: Any) -> int:
    """A number of 63 bits that depends on all numbers, names and shapes in a tree."""
    found = blake2b(digest_size=8)
    for path, leaf in tree.named_leaves(x):
        found.update(f"{path} {_shown(leaf)} ".encode())
        if isinstance(leaf, torch.Tensor) and leaf.numel() and not leaf.is_meta:
            leaf = leaf.to_local() if sharded(leaf) else leaf  # pyright: ignore[reportAttributeAccessIssue]
            dense = leaf.detach() if leaf.layout == torch.strided else leaf.detach().to_dense()
            y = dense.resolve_conj().resolve_neg().cpu().contiguous()
            found.update((ctypes.c_char * y.nbytes).from_address(y.data_ptr()))
    return int.from_bytes(found.digest(), "big") >> 1


def described(x: Any) -> str:
    """An option as a text that is the same in every process."""
    if isinstance(x, Reduction):
        return f"{type(x).__name__}({_named(vars(x))})"
    if isinstance(x, torch.Tensor):
        return f"{_shown(x)} {fingerprint(x):x}"
    if isinstance(x, Mapping):
        return f"{{{_named(x)}}}"
    if isinstance(x, (tuple, list)):
        return f"({', '.join(map(described, x))})"
    return re.sub(" at 0x[0-9a-f]+", "", getattr(x, "__name__", repr(x))) if callable(x) else _shown(x)


def named(name: str, x: Any) -> dict[str, str]:
    """The leaves of a tree by name, as such texts."""
    return {name + path: described(leaf) for path, leaf in tree.named_leaves(x)}


def _named(options: Mapping[Any, Any]) -> str:
    return ", ".join(f"{name}={described(x)}" for name, x in options.items())


def _shown(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"{x.dtype} {tuple(x.shape)}"
    plain = x is None or isinstance(x, (bool, int, float, complex, str, bytes, torch.dtype, torch.Size))
    return repr(x) if plain else type(x).__name__
