"""Batches that come one after the other: what is checked of a loader, and how it is gone through."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from operator import length_hint
from typing import Any

import torch

from invfunc import tree
from invfunc._extras import told_of_parts
from invfunc._torch.functorch import transforming, version
from invfunc.arguments.problem import InDims, batch_dims
from invfunc.errors import ArgumentError, ArgumentTypeError

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
            raise written_meanwhile()

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


def written_meanwhile() -> ArgumentError:
    return ArgumentError(
        "the parameters were written in place while the loader was read (an optimizer?), but all samples need the same "
        "ones. Pass copies: {name: p.clone() for name, p in params.items()}."
    )


def not_scalar(reduction: str) -> ArgumentError:
    """The error for losses of the samples, of which nothing has to be said."""
    return ArgumentError(
        f"reduction={reduction!r} is for a loss that is one number for its batch, but f returned the losses of the "
        "samples. Leave reduction out."
    )


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
