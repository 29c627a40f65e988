"""What the batches of a loader have brought so far, in a file from which a next call goes on."""

from __future__ import annotations

import ctypes
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from hashlib import blake2b
from io import BytesIO
from pathlib import Path
from typing import Any, Protocol

import torch

from invfunc import tree
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.sweep import Sweep
from invfunc.kronecker import Joint, Kronecker, Origin
from invfunc.per_sample.places import Place
from invfunc.reductions import Reduction
from invfunc.reductions.kept_factors import Diagonal, Factors, Kept, Refused
from invfunc.reductions.quantity import Accumulator

_SAFE = [Diagonal, Factors, Joint, Kept, Kronecker, Origin, Place, Refused]
"""What reductions keep beside tensors, numbers and names."""
_FORMAT = "invfunc.streamed 1"
State = Callable[[], dict[str, Any]]


@dataclass(frozen=True)
class Checkpoint:
    """A file, and after how many seconds it is written anew."""

    path: Path
    every: float

    @classmethod
    def of(cls, path: Any, every: Any) -> Checkpoint | None:
        if path is None:
            return None
        if not isinstance(path, (str, os.PathLike)):
            kind = type(path).__name__
            raise ArgumentTypeError(f"streamed(t, checkpoint=...): it is of type {kind}, but has to be a file name.")
        if not isinstance(every, (int, float)) or not every >= 0:
            raise ArgumentError(f"streamed(t, every={every!r}): it has to be a number of seconds.")
        return cls(Path(path), float(every))

    def read(self, identity: dict[str, str], device: torch.device) -> dict[str, Any] | None:
        """What a call before has written, if it was of the same statistic and parameters; None if there is no file."""
        if not self.path.parent.is_dir():
            raise ArgumentError(f"checkpoint={str(self.path)!r}: there is no folder {str(self.path.parent)!r}.")
        if not self.path.exists():
            return None
        try:
            with torch.serialization.safe_globals(_SAFE):
                found = torch.load(self.path, map_location=device)
        except Exception as error:  # of what is no file of torch's, whatever its bytes lead to
            raise self.refused(f"cannot be read ({type(error).__name__})") from None
        if not isinstance(found, dict) or found.get("format") != _FORMAT:
            raise self.refused("is something else than a state of `streamed` of this version")
        for name in {**found["identity"], **identity}:
            was, now = (each.get(name, "none") for each in (found["identity"], identity))
            if was != now:
                raise self.refused(f"was written with another value of {name}: {was}, and not {now}")
        return found

    @property
    def part(self) -> Path:
        """What is written next."""
        return self.path.with_name(self.path.name + ".part")

    def remove(self) -> None:
        for file in (self.path, self.part):
            file.unlink(missing_ok=True)

    def refused(self, why: str) -> ArgumentError:
        return ArgumentError(
            f"checkpoint={str(self.path)!r}: the file {why}. Remove it to begin anew, or go on with what it is of."
        )

    def write(self, record: dict[str, Any]) -> None:
        """Replace the file at once, so that it is the old or the new one whatever happens meanwhile."""
        with self.part.open("wb") as file:
            torch.save(record, file)
            file.flush()
            os.fsync(file.fileno())
        self.part.replace(self.path)
        with suppress(OSError):  # not every system opens folders
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


class Work(Protocol):
    """What is done with the batches."""

    def visit(self, args: tuple, n: int) -> int:
        """See the next batch, behind n samples; how many it has."""
        ...

    def resumed(self, args: tuple, state: dict[str, Any], last: bool) -> int:
        """See the first batch or the last one of those that led to a state, after which n samples more are done."""
        ...

    def state(self) -> State:
        """What makes what is known by now, in dicts, tensors and numbers."""
        ...


class Log:
    """The batches that are done, and what they have brought: written to the file when it is left too early."""

    def __init__(self, checkpoint: Checkpoint, work: Work, identity: dict[str, str], device: torch.device) -> None:
        """`identity` says by name what has to be the same as before; states are on a device."""
        self.checkpoint, self.work, self.identity = checkpoint, work, identity
        found = checkpoint.read(identity, device)
        self._before: dict[str, Any] = found["state"] if found else {}
        self._prints: list[int] = found["prints"].tolist() if found else []
        self._ends: list[int] = found["ends"] if found else []
        """The first batch that has samples, and the last one of those that are done."""
        self._done, self._number = len(self._prints), 0
        self._latest: tuple[int, list[int], State] | None = None
        self._written = time.monotonic()

    def __enter__(self) -> Log:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is not None:
            self._write()
        else:
            self.checkpoint.remove()

    def remaining(self, batches: Iterable[Any]) -> Iterator[tuple[int, Any]]:
        """The batches that are not done, with their numbers, and of the others those that are seen again."""
        number = -1
        for number, batch in enumerate(batches):
            mark = fingerprint(batch)
            if number < self._done:
                if self._prints[number] != mark:
                    raise self.checkpoint.refused(
                        f"is of a loader whose batch {number} was another one (one that shuffles has to give its "
                        "batches in the same order again)"
                    )
                if number not in self._ends:
                    continue
            else:
                self._prints[number:] = [mark]
            self._number = number
            yield number, batch
            if number >= self._done:
                self._latest = number + 1, self._ends, self.work.state()
                if time.monotonic() - self._written >= self.checkpoint.every:
                    self._write()
        if number + 1 < self._done:
            raise self.checkpoint.refused(f"is of a loader with at least {self._done} batches, and not {number + 1}")

    def visit(self, args: tuple, n: int) -> int:
        """See one of those."""
        if self._number < self._done:
            last = self._number == self._ends[-1]
            before, self._before = self._before, {} if last else self._before
            return self.work.resumed(args, before, last)
        own = self.work.visit(args, n)
        self._ends = [*self._ends[:1], self._number]
        return own

    def _write(self) -> None:
        if self._latest is None:
            return
        count, ends, state = self._latest
        prints = torch.tensor(self._prints[:count], dtype=torch.int64)
        record = {"identity": self.identity, "prints": prints, "ends": ends, "state": state()}
        self.checkpoint.write({"format": _FORMAT, **record})
        self._latest, self._written = None, time.monotonic()


def state_of(sweep: Sweep) -> dict[str, Any]:
    """What a sweep has kept, without what the next batch makes of it."""
    if sweep.engine is None:
        return {}
    found = sweep.engine.fold.found
    return {
        "n": sweep.n,
        "kept": [_kept(t) for t in sweep.engine.fold.accumulators],
        "outputs": found.outputs,
        "structure": tree.unflatten([*range(len(found.outputs))], found.structure),
        "weighed": sweep.weights.first is not None,
    }


def _kept(t: Accumulator) -> dict[str, Any]:
    before = None if t.before is None else _kept(t.before)
    return {"states": dict(t.states), "columns": t.columns, "before": before}


def resume(sweep: Sweep, engine: Engine, state: dict[str, Any]) -> None:
    """Put a sweep behind the last batch that was done, at whose arguments the engine is."""
    sweep.engine, sweep.n, fold = engine, state["n"], engine.fold
    structure = tree.flatten(state["structure"])[1]
    fold.found = replace(fold.found, n=sweep.n, outputs=state["outputs"], structure=structure)
    for t, kept in zip(fold.accumulators, state["kept"], strict=True):
        _restore(t, kept)


def _restore(t: Accumulator, kept: dict[str, Any]) -> None:
    t.states, t.columns = dict(kept["states"]), kept["columns"]
    if t.before is not None:
        _restore(t.before, kept["before"])


def loadable(x: Any) -> bool:
    """Whether `torch.load` gives back what was saved, with its default settings."""
    file = BytesIO()
    try:
        torch.save(x, file)
        file.seek(0)
        torch.load(file)
    except Exception:  # whatever objects of the caller's may raise
        return False
    return True


def fingerprint(x: Any) -> int:
    """A number of 63 bits that depends on all numbers, names and shapes in a tree."""
    found = blake2b(digest_size=8)
    for path, leaf in tree.named_leaves(x):
        found.update(f"{path} {_shown(leaf)} ".encode())
        if isinstance(leaf, torch.Tensor) and leaf.numel() and not leaf.is_meta:
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


def _named(options: Mapping[Any, Any]) -> str:
    return ", ".join(f"{name}={described(x)}" for name, x in options.items())


def _shown(x: Any) -> str:
    if isinstance(x, torch.Tensor):
        return f"{x.dtype} {tuple(x.shape)}"
    plain = x is None or isinstance(x, (bool, int, float, complex, str, bytes, torch.dtype, torch.Size))
    return repr(x) if plain else type(x).__name__
