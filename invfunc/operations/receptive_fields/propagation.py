"""Following on which entries of root tensors each entry of each tensor can depend, while a function runs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import torch

from invfunc._torch.functorch import TorchDispatchMode, memory_of, storage_of, unwatched
from invfunc.operations.operation import Operation, known_of_aten
from invfunc.operations.receptive_fields.affine import affine
from invfunc.operations.receptive_fields.regions import Region, Regions
from invfunc.operations.receptive_fields.step import Rows, Step

_LEAVING = {"is_nonzero", "masked_select", "nonzero_static", "to_sparse", "_to_sparse", "equal"}
"""Operations that give numbers of Python or a shape that depends on values, beyond those that torch tags as such."""
_MASKS = (torch.bool, torch.uint8)
_UNKNOWN = (RuntimeError, IndexError, KeyError, TypeError, ValueError, AttributeError)
"""What a rule raises at an overload that it does not know."""
_Given = list[tuple[torch.Tensor, int]]
"""Tensors with their memory, as often as they are there."""


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


class Labels:
    """Boxes of root coordinates for the entries of all tensors of a run: each may be too large, but not too small."""

    def __init__(self, axes: int = 0) -> None:
        self.axes = axes
        """How many coordinates a root has; 0 before there is one."""
        self.regions = Regions()

    def enter(self, x: torch.Tensor, coordinates: Sequence[torch.Tensor]) -> None:
        """Give the entries of x fresh labels, in the place of those that they had.

        The coordinates of the entries along each axis broadcast to the shape of x.
        """
        with unwatched(), torch.no_grad():
            self.axes = len(coordinates)
            at = [c.detach().to(x.device, torch.float32).expand(x.shape) for c in coordinates]
            whole = x.is_contiguous() and x.numel() * x.element_size() == memory_of(x).nbytes()
            region = self._written(x, torch.stack([*(-c for c in at), *at]))
            region.affine |= whole

    def set(self, x: torch.Tensor, rows: torch.Tensor) -> None:
        """Write `[2, k, *x.shape]` as the labels of x, for all tensors in its memory."""
        with unwatched(), torch.no_grad():
            new = storage_of(x) not in self.regions
            region = self._written(x, rows.detach().to(x.device, torch.float32).flatten(0, 1))
            region.affine &= not new

    def reach(self, read: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> None:
        """Let each entry of some tensors depend on all that others depend on, beside what it did before."""
        with unwatched(), torch.no_grad():
            known = [rows.flatten(2).amax(2) for x in read if (rows := self.of(x)) is not None]
            for x in found if known else ():
                whole, own = torch.stack(known).amax(0).reshape(2, self.axes, *[1] * x.ndim), self.of(x)
                self.set(x, whole.expand(2, self.axes, *x.shape) if own is None else torch.maximum(own, whole))

    def _written(self, x: torch.Tensor, rows: torch.Tensor) -> Region:
        key = storage_of(x)
        if key not in self.regions:
            self.regions.add(x, Region.blank(x, len(rows)))
            self.regions[key].affine = True
        self.regions[key].write(x, rows)
        return self.regions[key]

    def of(self, x: torch.Tensor) -> torch.Tensor | None:
        """The labels `[2, k, *x.shape]`: -lo and hi along each axis, -inf where an entry depends on no root.

        They are a view, to be read before anything is written. None if nothing in the memory of x has a label.
        """
        region = self.regions.get(storage_of(x))
        if region is None:
            return None
        with unwatched(), torch.no_grad():
            return region.of(x).unflatten(0, (2, self.axes))

    def affine(self, x: torch.Tensor) -> bool:
        """Whether x is known to be affine in the roots, with coefficients that depend on no label."""
        region = self.regions.get(storage_of(x))
        return region is None or region.affine

    def has(self, given: _Given) -> bool:
        """Whether something in the memory of any of these tensors has a label."""
        return any(key in self.regions for _, key in given)

    def follow(self, step: Step, op: _Called, read: _Given, targets: list[torch.Tensor], affine: bool) -> None:
        """Label what a call gave and what it wrote. `read` has labels, if only others; `affine` is about all of it."""
        found = [(x, self.regions.get(key)) for x, key in read]
        step.reads(found, 2 * self.axes)
        own = [region for _, region in found if region is not None]
        affine = affine and all(region.affine for region in own)
        for x, rows in zip(targets, _labels(step, op, targets), strict=True):
            self._label(x, rows, affine, own)

    def _label(self, x: torch.Tensor, rows: Rows, affine: bool, read: list[Region]) -> None:
        """Label a tensor that an operation gave or wrote."""
        key = storage_of(x)
        region = self.regions.get(key)
        if region is not None:
            region.write(x, rows)
            region.affine &= affine
        elif rows is not None:
            self.regions.add(x, region := Region.holding(x, rows))
            memory = storage_of(region.rows)
            for other in read:
                if storage_of(other.rows) == memory:
                    other.owned = False
            region.affine = affine


class Following(TorchDispatchMode):
    """Several labels of one run, each with roots of its own; they follow from the operations alone, never from values.

    What has a label of any of them is no constant for the others: neither a coefficient, nor an index of entries.
    """

    def __init__(self, *labels: Labels) -> None:
        super().__init__()
        self.labels = labels
        self.lost: str | None = None
        """The first operation by which labels were lost, as values became numbers of Python or shapes; None if none."""
        self.fault: str | None = None
        """What went wrong here, and not in the function that runs; None if nothing did."""
        self.whole: dict[str, str] = {}
        """The operations all of whose results count as read from everything, as their rules raised these errors."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """A hook of torch: what asks the compiler to leave us alone would import it, which takes two seconds."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = _given((*args, *kwargs.values()))
        if any(labels.has(given) for labels in self.labels):
            operation = _called(func)
            if not operation.skipped:
                with unwatched(), torch.no_grad(), self.blamed(f"`{operation.name}`"):
                    self._follow(Step(func, args, kwargs), operation, given, out)
        return out

    @contextmanager
    def blamed(self, where: str) -> Iterator[None]:
        """Note what is raised within as a fault of the library, since nothing of the user's runs there."""
        try:
            yield
        except Exception as error:
            self.fault = self.fault or f"{where} ({told(error)})"
            raise

    def lose(self, name: str) -> None:
        """Note an operation by which labels are lost."""
        self.lost = self.lost or name

    def _follow(self, step: Step, op: _Called, given: _Given, out: Any) -> None:
        """Label what a call gave and what it wrote."""
        read = [(x, key) for x, key in (given[1:] if op.known.fills else given) if self._known(key)]
        step.labelled = [x for x, _ in read if x.numel()]
        targets = self._targets(step, op, out)
        if op.loses(step.labelled) or len(_given(targets)) < len(targets):
            self.lose(op.name)
        targets = [x for x, _ in _given(targets)]
        if targets:
            kept = not step.labelled or affine(step, op.known, targets)
            for labels in self.labels:
                if labels.has(given):
                    labels.follow(step, op, read, targets, kept)
        if step.failed is not None:
            self.whole.setdefault(op.name, step.failed)

    def _known(self, key: int | None) -> bool:
        return any(key in labels.regions for labels in self.labels)

    def _targets(self, step: Step, op: _Called, out: Any) -> list[torch.Tensor]:
        """The tensors that a call gave, unless they are in the memory of others, and those that it wrote."""
        written = op.written(step)
        known = {_key(x) for x in written}
        fresh = [x for x in _tensors(out) if x.numel() and not self._known(key := _key(x)) and key not in known]
        return [*written[:1], *fresh] if op.inside else [*fresh, *written]


def _labels(step: Step, op: _Called, targets: list[torch.Tensor]) -> list[Rows]:
    """The labels of each target by the operation's rule; where it has no rule, or this gives none of the right shape,
    the hull of all labels that the operation reads."""
    if not step.height or not step.labelled:
        return [None] * len(targets)
    given: Any = None
    if op.known.receptive_field is not None:
        try:
            given = op.known.receptive_field(step, targets[0])
        except _UNKNOWN as error:
            given, step.failed = None, told(error)
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


def told(error: Exception) -> str:
    """An error in one line."""
    first = next(iter(str(error).splitlines()), "")
    return f"{type(error).__name__}: {first}" if first else type(error).__name__


def _fits(rows: torch.Tensor, x: torch.Tensor) -> bool:
    return rows.ndim == x.ndim + 1 and all(a in (1, b) for a, b in zip(rows.shape[1:], x.shape, strict=True))


def _key(x: torch.Tensor) -> int | None:
    """Which memory a tensor is in; None if it has no such thing."""
    try:
        return storage_of(x) if x.layout in (torch.strided, torch.jagged) else None
    except (RuntimeError, NotImplementedError):  # a functional or opaque tensor, which torch tells so
        return None


def _given(x: Any) -> _Given:
    """The tensors in something that have a memory."""
    return [(x, key) for x in _tensors(x) if (key := _key(x)) is not None]


def _tensors(x: Any) -> Iterator[torch.Tensor]:
    if isinstance(x, torch.Tensor):
        yield x
    elif isinstance(x, (tuple, list)):
        for part in x:
            yield from _tensors(part)
