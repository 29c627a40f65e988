"""Entries that are read, written or added up by indices: their values tell where the samples go."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from invfunc import tree
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.indices import advanced
from invfunc.operations.batch_axis.propagation import Call, Mixed, Place, Unknown, rule
from invfunc.operations.batch_axis.samples import NONE, agree, located, ordered, samples_of, spread
from invfunc.operations.batch_axis.views import view


@dataclass
class Index:
    """An index as it is spelled out: a part for each dimension, or None for a new one."""

    parts: list[Any]
    dims: list[int | None]
    """The dimension of each part."""
    samples: dict[int, torch.Tensor]
    """The samples of the entries of those parts that are tensors of samples, by the number of the part."""

    @property
    def key(self) -> tuple:
        return tuple(self.parts)

    def append(self, part: Any, samples: torch.Tensor | None = None) -> None:
        """Add the part for the next dimension (or a new one), with the samples of its entries if they are of some."""
        if samples is not None:
            self.samples[len(self.parts)] = samples
        self.dims.append(None if part is None else len(self.dims) - self.dims.count(None))
        self.parts.append(part)

    def at(self, dim: int) -> Any:
        """The part of the index that picks from a dimension."""
        return self.parts[self.dims.index(dim)]

    def read(self, table: torch.Tensor | None, shape: torch.Size) -> list[torch.Tensor]:
        """The samples of the entries that the index reads: those of the entries of the table, if it has any (`table`),
        and those of each index."""
        found = [] if table is None else [table[self.key]]
        for at, samples in self.samples.items():
            dim, parts = self.dims[at], list(self.parts)
            assert dim is not None
            parts[at] = torch.arange(samples.numel(), device=samples.device).view(samples.shape)
            along = samples.reshape([-1 if d == dim else 1 for d in range(len(shape))])
            wide = [samples.numel() if d == dim else size for d, size in enumerate(shape)]
            found.append(along.expand(wide)[tuple(parts)])
        return found


def spelled(call: Call, x: torch.Tensor, index: Any) -> Index:
    """Masks become the indices of their entries, lists become tensors, and an ellipsis is filled in."""
    found = Index([], [], {})
    for part in _filled(index, x):
        if isinstance(part, torch.Tensor):
            indices, samples = _indices(call, part)
            for one in indices:
                found.append(one, samples)
        elif advanced(part):
            raise Unknown("it indexes by something else than ints, slices, lists and tensors")
        else:
            found.append(part)
    return found


def _filled(index: Any, x: torch.Tensor) -> list[Any]:
    """Return the parts of an index of x, with full slices for an ellipsis and for dimensions that are not named."""
    given = index if isinstance(index, tuple) else (index,)
    parts = [_tensor(p, x.device) if _is_list(p) else p for p in given]
    full = [slice(None)] * (x.ndim - sum(_width(p) for p in parts))
    at = next((i for i, p in enumerate(parts) if p is Ellipsis), len(parts))
    return [*parts[:at], *full, *parts[at + 1 :]]


def _indices(call: Call, part: torch.Tensor) -> tuple[tuple[torch.Tensor, ...], torch.Tensor | None]:
    """Return the indices of a part along each of its dimensions, and their samples if they are of some."""
    if not part.ndim and part.dtype == torch.bool:
        raise Unknown("it indexes by a mask without dimensions")
    samples = samples_of(call, part) if isinstance(call.place(part), Axis) else None
    if not _is_mask(part):
        return (part,), samples
    return part.nonzero(as_tuple=True), None if samples is None else samples[part.bool()]


def _width(part: Any) -> int:
    """How many dimensions a part of an index stands for."""
    return part.ndim if _is_mask(part) else int(part is not None and part is not Ellipsis)


def _is_mask(part: Any) -> bool:
    return isinstance(part, torch.Tensor) and part.dtype in (torch.bool, torch.uint8)


def _is_list(p: Any) -> bool:
    return not isinstance(p, torch.Tensor) and hasattr(p, "__len__") and hasattr(p, "__getitem__")


def _tensor(p: Any, device: torch.device) -> torch.Tensor:
    found = torch.as_tensor(p, device=device)
    return found if found.numel() else found.long()  # an empty list is one of indices


@rule("getitem")
def getitem(call: Call) -> Place | list[Place]:
    x, index = call.args
    axis = call.place(x)
    if not advanced(index):
        return view(call) if isinstance(axis, Axis) else None
    found = spelled(call, x, index)
    if not isinstance(axis, Axis):
        first, others = found.parts[0], found.parts[1:]
        if call.place(first) is not None and not any(isinstance(p, torch.Tensor) for p in others):
            return call.place(first)  # a table, looked up by sample indices
        return _located(call, found.read(None, x.shape))
    if not found.samples:
        assert axis.dim is not None
        own = found.at(axis.dim)
        if isinstance(own, slice) and own == slice(None):
            return _only_changed_size(x, axis, found.key)
        whole = axis.dim == 0 and call.out.shape[:1] == x.shape[:1]
        if ordered(call, axis) and isinstance(own, torch.Tensor) and whole:
            return axis  # data alone in another order: entry n now belongs to sample n
    return _located(call, found.read(samples_of(call, x), x.shape))


def _located(call: Call, read: list[torch.Tensor]) -> Place:
    if any(samples.shape != call.out.shape for samples in read):
        raise Unknown("it indexes in a way that is not known")
    return located(read[0], call.n, *read[1:])


def _only_changed_size(x: torch.Tensor, axis: Axis, index: tuple) -> Place:
    """The dimension of the result that grows with the sample's dimension of x."""
    assert axis.dim is not None
    shape = list(x.shape)
    shape[axis.dim] += 1
    meta = [torch.empty(s, device="meta") for s in (tuple(x.shape), tuple(shape))]
    parts = tuple(tree.map_tensors(_meta_index, p) for p in index)
    small, large = (m[parts].shape for m in meta)
    dims = [d for d, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
    if len(dims) != 1:
        raise Mixed("it moves the sample axis where nothing can follow")
    return axis.at(dims[0])


def _meta_index(index: torch.Tensor) -> torch.Tensor | int:
    return torch.empty(tuple(index.shape), dtype=index.dtype, device="meta") if index.ndim else 0


@rule("setitem")
def setitem(call: Call) -> Place:
    """`x[index] = value`: where the samples of the value end up in x."""
    x, index, value = call.args
    axis = call.place(x)
    if not isinstance(value, torch.Tensor) or call.place(value) is None:
        if isinstance(axis, Axis):
            return axis
    return written(call, spelled(call, x, index), value)


@rule("index_put")
def index_put(call: Call) -> Place:
    indices = tuple(slice(None) if i is None else i for i in call.arg(1, "indices"))
    return written(call, spelled(call, call.first, indices), call.arg(2, "values"))


def written(call: Call, index: Index, value: Any) -> Place:
    """Where the samples are after `x[index] = value`, or after it was added there."""
    x, axis = call.first, call.place(call.first)
    read = index.read(None, x.shape)
    if isinstance(value, torch.Tensor) and isinstance(call.place(value), Axis):
        there = torch.zeros((), dtype=torch.bool, device=x.device).expand(x.shape)[index.key].shape
        read.append(samples_of(call, value).expand(there))
    if not read:
        return axis
    if not isinstance(axis, Axis):
        blank = torch.full(x.shape, NONE, device=x.device)
        for samples in read:
            blank[index.key] = samples
        axis = located(blank, call.n, some=True)
        assert isinstance(axis, Axis)
    if not agree(spread(axis, x.shape, call.n, x.device)[index.key], read):
        raise Mixed("it writes entries of one sample into those of another")
    return axis


@rule("masked_select")
def masked_select(call: Call) -> Place:
    x, mask = call.first, call.arg(1, "mask")
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return _located(call, [samples_of(call, t).expand(shape)[mask.expand(shape)] for t in (x, mask)])


@rule("masked_scatter")
def masked_scatter(call: Call) -> Place:
    x, mask, source = call.first, call.arg(1, "mask"), call.arg(2, "source")
    samples, mask = samples_of(call, x).expand(call.out.shape), mask.expand(call.out.shape)
    found = located(samples.masked_scatter(mask, samples_of(call, source).contiguous()), call.n)
    if isinstance(found, Axis) and not agree(spread(found, call.out.shape, call.n, x.device), [samples]):
        raise Mixed("it writes entries of one sample into those of another")
    return found


@rule("nonzero", "argwhere")
def nonzero(call: Call) -> Place | list[Place]:
    rows = samples_of(call, call.first)[call.first != 0]
    if isinstance(call.out, torch.Tensor):
        return located(rows[:, None].expand(call.out.shape), call.n)
    return [located(rows, call.n)] * len(call.out)


@rule("take")
def take(call: Call) -> Place:
    samples = samples_of(call, call.first).reshape(-1)
    return _located(call, spelled(call, samples, call.arg(1, "index")).read(samples, samples.shape))


@rule("index_select")
def index_select(call: Call) -> Place:
    x, index = call.first, call.arg(2, "index")
    dim, axis = call.arg(1, "dim") % max(x.ndim, 1), call.place(x)
    if isinstance(axis, Axis) and call.place(index) is None:
        if axis.dim != dim or (ordered(call, axis) and call.out.shape == x.shape):
            return axis
    found = spelled(call, x, (*[slice(None)] * dim, index))
    return _located(call, found.read(samples_of(call, x), x.shape))


@rule("gather", "take_along_dim")
def gather(call: Call) -> Place:
    x = call.first
    many = call.name == "take_along_dim"
    index, dim = call.arg(1 if many else 2, "indices" if many else "index"), call.arg(2 if many else 1, "dim")
    axis = call.place(x)
    if dim is not None and x.ndim and all(a == axis for _, a in call.samples) and call.out.ndim == x.ndim:
        assert isinstance(axis, Axis) and axis.dim is not None
        if axis.dim != dim % x.ndim and call.out.shape[axis.dim] == x.shape[axis.dim]:
            return axis
    if dim is None:
        samples, taken = samples_of(call, x).reshape(-1)[index.reshape(-1)], samples_of(call, index).reshape(-1)
        return _located(call, [samples, taken])
    if many:
        return _located(
            call,
            [
                torch.take_along_dim(samples_of(call, x), index, dim),
                samples_of(call, index).expand(torch.broadcast_shapes(call.out.shape, index.shape)),
            ],
        )
    return _located(call, [samples_of(call, x).gather(dim, index), samples_of(call, index)])


@rule("index_add", "index_copy", "index_reduce", "index_fill")
def along_index(call: Call) -> Place:
    """`x[:, index] = source` along a dimension, or added to it."""
    x, index = call.first, call.arg(2, "index")
    dim = call.arg(1, "dim") % max(x.ndim, 1)
    source = call.arg(3, "value" if call.name == "index_fill" else "source")
    axes = {a for t in (x, source) if isinstance(t, torch.Tensor) and (a := call.place(t)) is not None}
    if len(axes) == 1 and call.place(index) is None:
        (axis,) = axes
        if isinstance(axis, Axis) and axis.dim not in (None, dim):
            return axis
    return written(call, spelled(call, x, (*[slice(None)] * dim, index)), source)


@rule("scatter", "scatter_add", "scatter_reduce")
def scattered(call: Call) -> Place:
    """`x[i, index[i, j]] = source[i, j]`, or added to it."""
    x, index, axis = call.first, call.arg(2, "index"), call.place(call.first)
    source = call.kwargs.get("value", call.arg(3, "src"))
    dim = call.arg(1, "dim") % max(x.ndim, 1)
    (first, *others) = {a for _, a in call.samples}
    assert isinstance(first, Axis)
    constants_met = [t for t in (index, source) if isinstance(t, torch.Tensor) and t.ndim]
    if (
        not others
        and first.dim not in (None, dim)
        and all(t.shape[first.dim] == x.shape[first.dim] for t in constants_met)
    ):
        return first
    given = [samples_of(call, t) for t in constants_met if call.place(t) is not None]
    given = [samples[tuple(map(slice, index.shape))] for samples in given]
    if not isinstance(axis, Axis):
        blank = torch.full(x.shape, NONE, device=x.device)
        for samples in given:
            blank = blank.scatter(dim, index, torch.where(samples < 0, blank.gather(dim, index), samples))
        axis = located(blank, call.n, some=True)
        assert isinstance(axis, Axis)
    if not agree(spread(axis, x.shape, call.n, x.device).gather(dim, index), given):
        raise Mixed("it writes entries of one sample into those of another")
    return axis
