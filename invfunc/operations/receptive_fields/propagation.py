"""Following from which entries of root tensors each entry of each tensor can depend, while a function runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from invfunc._functorch import TorchDispatchMode, memory_of, storage_of, unwatched
from invfunc.operations.operation import Operation, known_of_aten
from invfunc.operations.receptive_fields.affine import affine
from invfunc.operations.receptive_fields.regions import Frames, Region
from invfunc.operations.receptive_fields.step import Rows, Step

_LEAVING = {"is_nonzero", "masked_select", "nonzero_static", "to_sparse", "_to_sparse", "equal"}
"""Operations that give numbers of Python or a shape that depends on values, beyond those that torch tags as such."""
_MASKS = (torch.bool, torch.uint8)
_UNKNOWN = (RuntimeError, IndexError, KeyError, TypeError, ValueError, AttributeError)
"""What a rule raises at an overload that it does not know."""
_Found = list[tuple[torch.Tensor, Region]]


@dataclass(frozen=True)
class _Called:
    """What is known of an operation as its overloads are called."""

    name: str
    """The name of the operation, without the underscore of its in-place form."""
    known: Operation
    skipped: bool = False
    leaves: bool = False
    """Whether values become numbers or shapes."""
    writes: tuple[str, ...] = ()
    """The arguments that it writes to."""
    inside: bool = False
    """Whether it works in place on its first argument, and on nothing else."""

    def loses(self, labelled: list[torch.Tensor]) -> bool:
        """Whether labelled values become numbers or shapes."""
        return self.leaves and (self.name != "index" or any(x.dtype in _MASKS for x in labelled))

    def written(self, step: Step) -> list[torch.Tensor]:
        """The tensors that it writes to."""
        flag, others = self.known.writes_if or ("", ())
        names = (
            (*self.writes, *(name for name in others if name in step)) if flag in step and step[flag] else self.writes
        )
        return list(_tensors([step[name] for name in names])) if names else []


@lru_cache(maxsize=4096)
def _called(func: Any) -> _Called:
    schema = getattr(func, "_schema", None)
    arguments = [] if schema is None else schema.arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    writes = tuple(a.name for a in written)
    if getattr(func, "namespace", None) != "aten":
        return _Called(str(func), Operation(), writes=writes)
    packet, tags = str(func.overloadpacket).split(".")[-1], func.tags
    entry = known_of_aten(packet, *tags)
    if any(a.kwarg_only for a in written) or packet.startswith("_foreach"):
        entry = replace(entry, receptive_field=None)
    inside = writes == ("self",) and arguments[0].name == "self"
    return _Called(
        packet[:-1] if packet.endswith("_") and not packet.endswith("__") else packet,
        entry,
        skipped=entry.reads == "none" or torch.Tag.inplace_view in tags,
        leaves=bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*tags}) or packet in _LEAVING,
        writes=writes,
        inside=inside,
    )


class Labels(TorchDispatchMode):
    """Boxes of root coordinates for the entries of all tensors of a run, in several frames at once.

    They follow from the operations alone, never from values, and may be too large but not too small.
    """

    lost: str | None
    """The operation by which labelled values became numbers of Python or shapes; None if there was none."""

    def __init__(self) -> None:
        super().__init__()
        self.lost = None
        self._regions: dict[int | None, Region] = {}
        self._axes: dict[int, int] = {}
        self._heights: dict[int, int] = {}
        self._closed: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """A hook of torch: what asks the compiler to leave us alone would import it, which takes two seconds."""
        return False

    def enter(self, x: torch.Tensor, coordinates: Sequence[torch.Tensor], frame: int) -> None:
        """Give the entries of x fresh labels in a frame, in the place of those that they had there.

        The coordinates of the entries along each axis of the frame broadcast to the shape of x.
        """
        with unwatched(), torch.no_grad():
            self._axes[frame] = len(coordinates)
            self._heights[frame] = 2 * len(coordinates)
            at = [c.detach().to(x.device, torch.float32).expand(x.shape) for c in coordinates]
            rows = torch.stack([*(-c for c in at), *at])
            new = frame not in self._region(x).frames
            whole = x.is_contiguous() and x.numel() * x.element_size() == memory_of(x).nbytes()
            self._put(x, rows, frame)
            region = self._region(x)
            if new or whole:
                region.affine |= {frame}

    def set(self, x: torch.Tensor, rows: torch.Tensor, frame: int) -> None:
        """Write `[2, k, *x.shape]` as the labels of x, for all tensors in its memory."""
        with unwatched(), torch.no_grad():
            new = frame not in self._region(x).frames
            self._put(x, rows.detach().to(x.device, torch.float32).flatten(0, 1), frame)
            if new:
                self._region(x).affine -= {frame}

    def of(self, x: torch.Tensor, frame: int) -> torch.Tensor | None:
        """The labels `[2, k, *x.shape]`: -lo and hi along each axis, -inf where an entry depends on no root.

        None if nothing in the memory of x has a label in the frame.
        """
        region = self._regions.get(storage_of(x))
        if region is None or frame not in region.frames:
            return None
        with unwatched(), torch.no_grad():
            return region.of(x, (frame,)).unflatten(0, (2, self._axes[frame])).clone()

    def close(self, frame: int) -> None:
        """Label no further tensors in a frame; those that have labels keep them."""
        self._closed.add(frame)

    def affine(self, x: torch.Tensor, frame: int) -> bool:
        """Whether x is known to be affine in the roots of a frame, with coefficients that depend on no label."""
        region = self._regions.get(storage_of(x))
        if self.lost is not None:
            return False
        if region is None or frame not in region.frames:
            return frame not in self._closed
        return frame in region.affine

    def _region(self, x: torch.Tensor) -> Region:
        key = storage_of(x)
        if key not in self._regions:
            self._regions[key] = Region.blank(x, (), self._heights)
        return self._regions[key]

    def _put(self, x: torch.Tensor, rows: torch.Tensor, frame: int) -> None:
        self._region(x).write(x, rows, (frame,))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        if self._regions:
            found = self._found(args, kwargs)
            if found:
                operation = _called(func)
                if not operation.skipped:
                    with unwatched(), torch.no_grad():
                        self._follow(Step(func, args, kwargs), operation, out, found)
        return out

    def _found(self, args: tuple, kwargs: dict) -> _Found:
        """The tensors with labels among arguments, as often as they are there."""
        pairs = [(x, self._regions.get(_key(x))) for x in _tensors((*args, *kwargs.values()))]
        return [(x, region) for x, region in pairs if region is not None]

    def _follow(self, step: Step, op: _Called, out: Any, found: _Found) -> None:
        """Label what a call gave and what it wrote."""
        read = self._found(step.args[1:], step.kwargs) if op.known.fills else found
        frames = self._frames([region for _, region in found])
        step.reads(read, frames, sum([self._heights[f] for f in frames]))
        if op.loses(step.labelled):
            self.lost = self.lost or op.name
        targets = self._targets(step, op, out)
        if not targets:
            return
        labels = _labels(step, op, targets)
        kept = _still_affine(step, op, targets, frames, [region for _, region in read])
        for x, rows in zip(targets, labels, strict=True):
            self._label(x, rows, frames, kept, op.name, read)

    def _targets(self, step: Step, op: _Called, out: Any) -> list[torch.Tensor]:
        """The tensors that a call gave, unless they are in the memory of others, and those that it wrote."""
        written = op.written(step)
        known = {_key(x) for x in written}
        fresh = [x for x in _tensors(out) if x.numel() and (key := _key(x)) not in self._regions and key not in known]
        return [*written[:1], *fresh] if op.inside else [*fresh, *written]

    def _frames(self, regions: list[Region]) -> Frames:
        """The open frames in which something in these regions has labels."""
        first = regions[0].frames
        if not self._closed and all(region.frames == first for region in regions):
            return first
        return tuple(f for f in self._heights if f not in self._closed and any(f in r.frames for r in regions))

    def _label(
        self, x: torch.Tensor, rows: Rows, frames: Frames, kept: frozenset[int], name: str, found: _Found
    ) -> None:
        """Label a tensor that an operation gave or wrote."""
        key = _key(x)
        if key is None:
            self.lost = self.lost or name
            return
        region = self._regions.get(key)
        if region is None and rows is not None:
            region = Region.holding(x, rows, frames, self._heights)
            memory = storage_of(region.rows)
            for _, other in found:
                if storage_of(other.rows) == memory:
                    other.owned = False
            region.affine = kept
        elif region is None:
            if not found:
                return
            region = Region.blank(x, (), self._heights)  # depends on closed frames only
        else:
            region.write(x, rows, frames)
            region.affine &= kept
        self._regions[key] = region


def _still_affine(
    step: Step, op: _Called, targets: list[torch.Tensor], frames: Frames, regions: list[Region]
) -> frozenset[int]:
    """The frames in which what a call gives is affine, as all that it reads is."""
    if step.labelled and not affine(step, op.known, targets):
        return frozenset()
    return frozenset(f for f in frames if all(f in r.affine for r in regions if f in r.frames))


def _labels(step: Step, op: _Called, targets: list[torch.Tensor]) -> list[Rows]:
    """The labels of each target by the operation's rule; where it has no rule, or this gives none of the right shape,
    the hull of all labels that the operation reads."""
    if not step.height or not step.labelled:
        return [None] * len(targets)
    given: Any = None
    if op.known.receptive_field is not None:
        try:
            given = op.known.receptive_field(step, targets[0])
        except _UNKNOWN:
            given = None
    if isinstance(given, torch.Tensor):
        given = [given if x.shape == targets[0].shape else None for x in targets]
    given = [*(given or []), *[None] * len(targets)]
    found: list[Rows] = []
    for x, rows in zip(targets, given, strict=False):
        if rows is None or len(rows) != step.height or not _fits(rows, x):
            whole = step.hull()
            rows = None if whole is None else whole.view(-1, *[1] * x.ndim)
        found.append(rows)
    return found


def _fits(rows: torch.Tensor, x: torch.Tensor) -> bool:
    return rows.ndim == x.ndim + 1 and all(a in (1, b) for a, b in zip(rows.shape[1:], x.shape, strict=True))


def _key(x: torch.Tensor) -> int | None:
    """Which memory a tensor is in; None if it has no such thing."""
    try:
        return storage_of(x)
    except (RuntimeError, NotImplementedError):
        return None


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from _tensors(part)
