"""Entries that are read, written or added up by indices: their values tell where the samples go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from invfunc import tree
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.index import Index, spelled
from invfunc.operations.batch_axis.indices import advanced
from invfunc.operations.batch_axis.propagation import BATCH_SUM, Call, Mixed, Place, Unknown
from invfunc.operations.batch_axis.samples import NONE, agree, located, ordered, samples_of, spread
from invfunc.operations.receptive_fields.step import Rows, Step, behind
from invfunc.operations.views import view

# The batch axis


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


def setitem(call: Call) -> Place:
    """`x[index] = value`: where the samples of the value end up in x."""
    x, index, value = call.args
    axis = call.place(x)
    if not isinstance(value, torch.Tensor) or call.place(value) is None:
        if isinstance(axis, Axis):
            return axis
    return written(call, spelled(call, x, index), value)


def index_put(call: Call) -> Place:
    indices = tuple(slice(None) if i is None else i for i in call.arg("indices"))
    return written(call, spelled(call, call.first, indices), call.arg("values"))


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
        axis = _masked(call, index, read) or _located_by(call, index, read)
    if isinstance(axis, Axis) and not agree(spread(axis, x.shape, call.n, x.device)[index.key], read):
        raise Mixed("it writes entries of one sample into those of another")
    return axis


def _masked(call: Call, index: Index, read: list[torch.Tensor]) -> Axis | None:
    """Where masks say that the samples are, if that is where they are written."""
    x = call.first
    for axis in index.masks:
        if axis.fits(x, call.n) and agree(spread(axis, x.shape, call.n, x.device)[index.key], read):
            return axis
    return None


def _located_by(call: Call, index: Index, read: list[torch.Tensor]) -> Place:
    """Where the samples are in what had none, after some entries were written."""
    x = call.first
    blank = torch.full(x.shape, NONE, device=x.device)
    for samples in read:
        blank[index.key] = samples
    return located(blank, call.n, some=True)


def masked_select(call: Call) -> Place:
    x, mask = call.first, call.arg("mask")
    shape = torch.broadcast_shapes(x.shape, mask.shape)
    return _located(call, [samples_of(call, t).expand(shape)[mask.expand(shape)] for t in (x, mask)])


def nonzero(call: Call) -> Place | list[Place]:
    rows = samples_of(call, call.first)[call.first != 0]
    if isinstance(call.out, torch.Tensor):
        return located(rows[:, None].expand(call.out.shape), call.n)
    return [located(rows, call.n)] * len(call.out)


def take(call: Call) -> Place:
    samples = samples_of(call, call.first).reshape(-1)
    return _located(call, spelled(call, samples, call.arg("index")).read(samples, samples.shape))


def index_select(call: Call) -> Place:
    x, index = call.first, call.arg("index")
    dim, axis = call.arg("dim") % max(x.ndim, 1), call.place(x)
    if isinstance(axis, Axis) and call.place(index) is None:
        if axis.dim != dim or (ordered(call, axis) and call.out.shape == x.shape):
            return axis
    found = spelled(call, x, (*[slice(None)] * dim, index))
    return _located(call, found.read(samples_of(call, x), x.shape))


def gather(call: Call) -> Place:
    x = call.first
    many = call.name == "take_along_dim"
    index, dim = call.arg("indices" if many else "index"), call.arg("dim")
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


def added(rule: Callable[[Call], Place]) -> Callable[[Call], Place]:
    """The rule of what writes, for what adds: where several samples meet in an entry of a constant, it is their sum."""

    def place(call: Call) -> Place:
        try:
            return rule(call)
        except Mixed:
            if call.place(call.first) is not None:
                raise
            return BATCH_SUM

    return place


def scattered(call: Call) -> Place:
    """`x[i, index[i, j]] = source[i, j]`, or added to it."""
    x, index, axis = call.first, call.arg("index"), call.place(call.first)
    source = call.arg("value", call.arg("src"))
    dim = call.arg("dim") % max(x.ndim, 1)
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
    if isinstance(axis, Axis) and not agree(spread(axis, x.shape, call.n, x.device).gather(dim, index), given):
        raise Mixed("it writes entries of one sample into those of another")
    return axis


# Receptive fields


def _gather(step: Step, out: torch.Tensor) -> Rows:
    x, index = step["self"], step["index"]
    if not step.only(x) or x.ndim != index.ndim or not x.ndim:
        return None
    return step.filled(x).gather(behind(step["dim"], x.ndim)[0], index.expand(step.height, *index.shape))


def _index(step: Step, out: torch.Tensor) -> Rows:
    x = step["self"]
    if not step.only(x):
        return None
    rows = step.filled(x).movedim(0, -1)  # last, indices of whichever axes leave it there
    return torch.ops.aten.index.Tensor(rows, step["indices"]).movedim(-1, 0)


def _put(step: Step, out: torch.Tensor) -> Rows:
    x, indices, values = step["self"], step["indices"], step["values"]
    known = [step.rows(i) is None for i in indices if i is not None]
    if step["accumulate"] or not all(known):
        return None
    rows, put = step.filled(x), step.filled(values)
    return torch.stack([torch.ops.aten.index_put.default(a, indices, b) for a, b in zip(rows, put, strict=True)])
