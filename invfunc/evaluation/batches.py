"""Batches that come one after the other: what is checked of a loader, how it is gone through, and checkpoints."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from io import BytesIO
from operator import length_hint
from pathlib import Path
from typing import Any, NamedTuple
from uuid import uuid4

import torch

from invfunc import tree
from invfunc._extras import told_of_parts
from invfunc._torch.functorch import transforming, version
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.processes import fingerprint
from invfunc.kronecker.matrix import Joint, Kronecker, Origin
from invfunc.kronecker.places import Place
from invfunc.problem import InDims, batch_dims
from invfunc.reductions.factors import Factors, ParameterFactors, Sided

Visit = Callable[[tuple, int], int]
"""Sees the arguments of a batch behind so many samples; returns how many there are in it."""
Numbered = Callable[[Iterable[Any]], Iterable[tuple[int, Any]]]
"""Batches with their numbers, perhaps without some."""
Batches = Callable[[Visit, Numbered], int]
"""Has all batches seen; returns how many samples there were."""


GIVES_BATCHES = "a loader gives batches, as a DataLoader does, or the list [(x, y)] of one batch."


def check_loader(loader: Any, sweeps: str = "") -> None:
    """Check that there are batches in it, and, if it has to be gone through more than once, say for what, that it can
    be."""
    if isinstance(loader, (torch.Tensor, Mapping, str)) or not (isinstance(loader, Iterable) or callable(loader)):
        kind = type(loader).__name__
        raise ArgumentTypeError(f"loader is of type {kind}, but has to give batches, as a DataLoader or [(x, y)] does.")
    if isinstance(loader, type):
        raise ArgumentTypeError(f"loader is the class {loader.__name__}, but has to be an instance of it.")
    if sweeps and isinstance(loader, Iterator):
        raise ArgumentTypeError(
            f"loader is of type {type(loader).__name__}, which gives its batches once, but {sweeps}. Pass a list, a "
            "DataLoader, or the function that makes the generator, without calling it."
        )
    check_not_transforming()


def check_not_transforming() -> None:
    """Check that no transform of torch.func is around a call that is not differentiated."""
    if transforming():
        raise ArgumentError(
            "within a transform of torch.func, but a sum over a loader is not differentiated. Apply the transform "
            "inside of the statistic's function, or to the statistic of one batch."
        )


@dataclass(frozen=True)
class Feed:
    """Options of how the batches of a loader are brought to where they are needed."""

    device: torch.device | None = None
    """One of those of the parameters; without it that of the first one."""
    progress: str = ""
    """Title of a progress bar, if there is one."""

    @classmethod
    def of(cls, device: Any, progress: str) -> Feed:
        try:
            return cls(None if device is None else torch.device(device), progress)
        except (RuntimeError, TypeError) as error:
            raise ArgumentError(f"streamed(t, device={device!r}): no device: {str(error).splitlines()[0]}.") from None

    def goal(self, params: Any) -> torch.device:
        """The destination of batches."""
        found = list(dict.fromkeys(p.device for p in tree.tensors((params,)))) or [torch.device("cpu")]
        if self.device is None:
            return found[0]
        for device in found:
            if device.type == self.device.type and self.device.index in (None, device.index):
                return device
        raise ArgumentError(
            f"device={str(self.device)!r} would move batches away from the parameters, which are on "
            f"{', '.join(map(str, found))}. Move the parameters, or leave device out."
        )


def batches_of(
    loader: Any, params: Any, in_dims: InDims, feed: Feed | None, empty: list[tuple] | None = None
) -> Batches:
    """Gives `visit` the arguments of each batch, and how many samples came before; it returns how many there are. There
    is no `feed` if the caller has given one batch, and no loader.

    Batches without samples are left out (the last one is kept in `empty`), and those that `numbered` leaves out. The
    parameters have to stay as they are.
    """
    known, options = _written(params), feed or Feed()

    def check() -> None:
        if _written(params) != known:
            raise ArgumentError(
                "the parameters were written in place while the loader was read (an optimizer?), but all samples need "
                "the same ones. Pass copies: {name: p.clone() for name, p in params.items()}."
            )

    def batches(visit: Visit, numbered: Numbered) -> int:
        check_loader(loader)
        n, device = 0, options.goal(params)
        given = _opened(loader)
        with told_of_parts(options.progress, given) as tell:
            for number, batch in numbered(given):
                check()
                args = (params, *_arguments(batch, device))
                before = _written(args)
                try:
                    none = _sizes(args, in_dims) == {0}
                    if none and empty is not None:
                        empty[:] = [args]
                    own = 0 if none else visit(args, n)  # what else is wrong is told there
                    if _written(args) != before:
                        raise ArgumentError("f writes into its batch in place, and it may come again. Copy it first.")
                except Exception as error:
                    if feed is not None:
                        error.add_note(f"This is batch {number} of the loader.")
                    if isinstance(error, ArgumentTypeError) and isinstance(batch, torch.Tensor):
                        error.args = (f"{error} Each batch of the loader is one tensor: {GIVES_BATCHES}",)
                    raise
                n += own
                tell(number + 1, own)
        check()
        return n

    return batches


def _written(x: Any) -> list[int]:
    """Numbers of times that the tensors of a tree were written in place."""
    return [version(y) for y in tree.tensors((x,))]


def first(loader: Any, params: Any, in_dims: InDims, feed: Feed) -> tuple[tuple, int | None]:
    """The arguments of the first batch with samples, and how many batches there are, if they are counted."""
    device = feed.goal(params)
    with torch.random.fork_rng([]):  # a DataLoader draws numbers when it begins
        batches = _opened(loader)
        count = length_hint(batches, 0) or None
        for batch in batches:
            args = (params, *_arguments(batch, device))
            if _sizes(args, in_dims) != {0}:
                return args, count
    raise no_samples()


def no_samples() -> ArgumentError:
    return ArgumentError("the loader gave no samples: it is empty, or a generator that was used up before.")


def unscaled(n: int) -> ArgumentError:
    """The error for a loss that is one number, of n samples, where it is not given apart."""
    alone = " Of this batch of one sample, f may have dropped the axis: squeeze(1), not squeeze()." if n == 1 else ""
    return ArgumentError(
        "the loss is one number, which may be the mean over its batch or the sum, so that it is not known how to add "
        "batches up. Return the [N] losses of the samples, as with reduction='none'. Or pass model and loss apart, as "
        "in `diag_ggn(f, loss)`, or streamed(t, reduction='sum') if it is the sum."
        f"{alone}"
    )


def _arguments(batch: Any, device: torch.device) -> tuple:
    """The arguments behind the parameters, on a device."""

    def moved(x: torch.Tensor) -> torch.Tensor:
        return x.to(device, non_blocking=device.type == "cuda")

    return tuple(tree.map_tensors(moved, x) for x in _parts(batch))


def size_of(args: tuple, in_dims: InDims) -> int:
    """Number of samples in the arguments of a batch; 1 where that is not clear, of which errors tell later."""
    sizes = _sizes(args, in_dims)
    return 1 if len(sizes) != 1 or None in sizes else sizes.pop()


def samples_of(loader: Any, in_dims: InDims) -> int:
    """Number of samples that a loader gives, which is gone through for that."""
    with torch.random.fork_rng([]):  # a DataLoader draws numbers when it begins
        return sum(size_of((None, *_parts(batch)), in_dims) for batch in _opened(loader))


def counted(loader: Any, in_dims: InDims) -> int:
    """Number of samples that are sure to come: those of a list, else 0."""
    batches = loader if isinstance(loader, (list, tuple)) else ()
    sizes = (_sizes((None, *_parts(batch)), in_dims) - {None} for batch in batches)
    return sum(min(each, default=0) for each in sizes)


def _opened(loader: Any) -> Iterable[Any]:
    return loader if isinstance(loader, Iterable) else loader()


def _parts(batch: Any) -> tuple:
    return tuple(batch) if isinstance(batch, (tuple, list)) else (batch,)


def _sizes(args: tuple, in_dims: InDims) -> set[Any]:
    """Numbers of samples of the arguments; None if one has no such axis."""
    dims = batch_dims(in_dims, list(range(1, len(args))))
    return {
        x.shape[dim] if -x.ndim <= dim < x.ndim else None
        for i, dim in dims.items()
        if dim is not None
        for x in tree.tensors((args[i],))
    }


_SAFE = [Factors, Joint, ParameterFactors, Kronecker, Origin, Place, Sided]
"""Types that reductions keep beside tensors, numbers and names."""
_FORMAT = "invfunc.streamed 6"


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
