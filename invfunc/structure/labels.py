"""Labels: on which entries of some roots each entry of each tensor can depend, while a function runs on one sample.

A root is a tensor whose entries get coordinates along some axes. The label of an entry has two rows for each axis,
`-lo` and `hi`, of a box of coordinates, so that the hull of boxes is a maximum; -inf depends on nothing. All roots have
rows of their own in one tensor of labels, `[rows, *shape]`. They follow from the operations of aten alone, never from
values: a dead unit hides nothing. A box may be too large, but not too small.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from invfunc._torch.functorch import TorchDispatchMode, memory_of, storage_of, unwatched
from invfunc.core.marks import Unsupported, tensors
from invfunc.structure.rules import Fact, Rows, Step, blank, fact_of, hull

_LEAVING = {"is_nonzero", "masked_select", "nonzero_static", "to_sparse", "_to_sparse", "equal"}
"""Operations that give numbers of Python or a shape that depends on values, beyond those that torch tags as such."""
_MASKS = (torch.bool, torch.uint8)


class _Called(NamedTuple):
    """Facts about an operation of aten."""

    name: str
    fact: Fact
    skipped: bool
    leaves: bool
    """True if values become numbers or shapes."""
    writes: tuple[str, ...]
    """The arguments that it writes to."""


@lru_cache(maxsize=4096)
def _called(func: Any) -> _Called:
    arguments = func._schema.arguments
    written = [a for a in arguments if a.alias_info is not None and a.alias_info.is_write]
    writes = tuple(a.name for a in written)
    if func.namespace != "aten":
        return _Called(str(func), Fact(), False, False, writes)
    packet, tags = str(func.overloadpacket).split(".")[-1], func.tags
    name = packet[:-1] if packet.endswith("_") and not packet.endswith("__") else packet
    fact = fact_of(packet, torch.Tag.pointwise in tags)
    if any(a.kwarg_only for a in written) or packet.startswith("_foreach"):
        fact = fact._replace(rule=None)
    leaves = bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & {*tags}) or packet in _LEAVING
    return _Called(name, fact, fact.skipped or torch.Tag.inplace_view in tags, leaves, writes)


class Region:
    """The labels of a memory, `[rows, *shape]` of a contiguous tensor that fills it."""

    __slots__ = ("memory", "size", "itemsize", "rows", "shape")

    def __init__(self, x: torch.Tensor, height: int) -> None:
        self.memory = memory_of(x)  # kept, so that no other tensor gets it
        self.size, self.itemsize = self.memory.nbytes(), x.element_size()
        self.shape = torch.Size([self.size // self.itemsize])
        self.rows = blank(x, (height, 1))

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """The labels of a tensor in this memory."""
        self._check(x)
        if x.shape == self.shape and x.is_contiguous():
            return self.rows.expand(-1, *self.shape)
        return self._view(self._flat(), x)

    def write(self, x: torch.Tensor, rows: torch.Tensor | None) -> None:
        """Put labels, which broadcast to `[rows, *x.shape]`, in the place of those that a tensor had; None for none."""
        self._check(x)
        rows = blank(self.rows, (len(self.rows), *[1] * x.ndim)) if rows is None else rows
        if x.is_contiguous() and x.numel() * self.itemsize == self.size:
            self.rows, self.shape = rows, x.shape
            return
        flat = self._flat().clone()
        self._view(flat, x).copy_(rows.expand(-1, *x.shape))
        self.rows, self.shape = flat, torch.Size([self.size // self.itemsize])

    def _flat(self) -> torch.Tensor:
        return self.rows.expand(-1, *self.shape).contiguous().view(len(self.rows), -1)

    def _check(self, x: torch.Tensor) -> None:
        if x.element_size() != self.itemsize or self.memory.nbytes() != self.size:
            raise Unsupported("a tensor is read as one of entries of another size")

    @staticmethod
    def _view(rows: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        shape, strides = (len(rows), *x.shape), (rows.stride(0), *x.stride())
        return rows.as_strided(shape, strides, rows.storage_offset() + x.storage_offset())


class LabelRows(NamedTuple):
    """Rows of labels."""

    start: int
    axes: int

    @property
    def rows(self) -> slice:
        """Its place among all rows."""
        return slice(self.start, self.start + 2 * self.axes)


class Labels(TorchDispatchMode):
    """A mode in which each operation gives its results labels."""

    def __init__(self) -> None:
        super().__init__()
        self.height = 0
        self.regions: dict[int, Region] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """A hook of torch: what asks the compiler to leave us alone would import it, which takes two seconds."""
        return False

    def root(self, axes: int) -> LabelRows:
        """A new root, before anything has labels."""
        self.height += 2 * axes
        return LabelRows(self.height - 2 * axes, axes)

    def of(self, x: torch.Tensor, root: LabelRows) -> torch.Tensor | None:
        """The labels `[2, axes, *x.shape]`; None if nothing in its memory has any."""
        with unwatched(), torch.no_grad():
            region = self.regions.get(_key(x))
            return None if region is None else region.of(x)[root.rows].unflatten(0, (2, root.axes))

    def set(self, x: torch.Tensor, root: LabelRows, rows: torch.Tensor) -> None:
        """Write `[2, axes, *x.shape]` as the labels of x."""
        with unwatched(), torch.no_grad():
            self.write(x, {root: rows})

    def write(self, x: torch.Tensor, found: dict[LabelRows, torch.Tensor]) -> None:
        """Write labels of several roots."""
        key = _key(x)
        if key not in self.regions:
            self.regions[key] = Region(x, self.height)
        region, parts, start = self.regions[key], list[torch.Tensor](), 0
        before = region.of(x)
        for root, rows in found.items():
            parts += [before[start : root.start], rows.flatten(0, 1).to(x.device, torch.float32).expand(-1, *x.shape)]
            start = root.rows.stop
        region.write(x, shrunk(torch.cat([*parts, before[start:]])))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        given = [*tensors((*args, *kwargs.values()))]
        if any(_key(x) in self.regions for x in given):
            called = _called(func)
            if not called.skipped:
                with unwatched(), torch.no_grad():
                    self._follow(Step(func, args, kwargs), called, given[1:] if called.fact.fills else given, out)
        return out

    def _follow(self, step: Step, called: _Called, given: list[torch.Tensor], out: Any) -> None:
        """Label what a call gave and what it wrote."""
        for x in given:
            if x.numel() and (region := self.regions.get(_key(x))) is not None:
                step.reads(x, region.of(x))
        masks = any(x.dtype in _MASKS for x in step.labelled)
        if called.leaves and step.labelled and (called.name != "index" or masks):
            raise Unsupported(f"{called.name} makes numbers or a shape of values")
        written = [y for name in called.writes for y in tensors([step[name]])]
        keys = {_key(x) for x in written}
        fresh = [x for x in tensors(out) if x.numel() and (key := _key(x)) not in self.regions and key not in keys]
        targets = [*written[:1], *fresh] if called.writes == ("self",) else [*fresh, *written]
        if not targets:
            return
        for x, rows in zip(targets, _labels(step, called, targets), strict=True):
            key = _key(x)
            if key not in self.regions:
                if rows is None:
                    continue
                self.regions[key] = Region(x, self.height)
            self.regions[key].write(x, rows)


def _labels(step: Step, called: _Called, targets: list[torch.Tensor]) -> Sequence[Rows]:
    """The labels of each target by the operation's rule; where it has none, the hull of all that it reads."""
    if not step.labelled:
        return [None] * len(targets)
    given: Any = None
    if called.fact.rule is not None:
        try:
            given = called.fact.rule(step, targets[0])
        except (RuntimeError, IndexError, KeyError, TypeError, ValueError, AttributeError):  # an unknown overload
            given = None
    if isinstance(given, torch.Tensor):
        given = [given if x.shape == targets[0].shape else None for x in targets]
    given = [*(given or ()), *[None] * len(targets)]
    whole, found = None, list[Rows]()
    for x, rows in zip(targets, given, strict=False):
        if rows is None or not _fits(rows, x):
            whole = hull(step) if whole is None else whole
            rows = whole.view(-1, *[1] * x.ndim)
        found.append(rows)
    return found


def _fits(rows: torch.Tensor, x: torch.Tensor) -> bool:
    return rows.ndim == x.ndim + 1 and all(a in (1, b) for a, b in zip(rows.shape[1:], x.shape, strict=True))


def _key(x: torch.Tensor) -> int:
    """The memory that a tensor is in."""
    if x.layout is not torch.strided:
        raise Unsupported("a tensor that is not strided")
    return storage_of(x)


def shrunk(rows: torch.Tensor) -> torch.Tensor:
    """Labels with one entry along the dims in which all are equal."""
    for dim in range(1, rows.ndim):
        first = rows.narrow(dim, 0, 1)
        if rows.shape[dim] > 1 and bool((rows == first).all()):
            rows = first
    return rows


def coordinates(x: torch.Tensor, axes: int) -> torch.Tensor:
    """The places of the entries along the last dims that have several, as labels."""
    if axes == 1:  # all are told apart
        at = [torch.arange(x.numel(), dtype=torch.float32, device=x.device).reshape(x.shape)]
    else:
        dims, at = [d for d in range(x.ndim) if x.shape[d] > 1][-axes:], []
        for d in dims:
            numbers = torch.arange(x.shape[d], dtype=torch.float32, device=x.device)
            at.append(numbers.reshape([-1 if e == d else 1 for e in range(x.ndim)]))
        at = [*[x.new_zeros((), dtype=torch.float32)] * (axes - len(dims)), *at]
    whole = torch.stack([c.expand(x.shape) for c in at])
    return torch.stack([-whole, whole])
