"""The sample of each entry of a tensor, as a tensor: what entries that only change places are followed by."""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import Call, Mixed, Place

NONE = -1
"""The sample of an entry that depends on no sample."""


def samples_of(call: Call, x: torch.Tensor) -> torch.Tensor:
    """The sample of each entry of what a call reads."""
    axis = call.place(x)
    if not isinstance(axis, Axis):
        return torch.full((), NONE, device=x.device).expand(x.shape)
    return spread(axis, x.shape, call.n, x.device)


def spread(axis: Axis, shape: Iterable[int], n: int, device: torch.device) -> torch.Tensor:
    """The sample of each entry of a tensor of a shape."""
    shape = tuple(shape)
    if axis.dim is None:
        assert axis.rows is not None
        return torch.full((), axis.rows[0], device=device).expand(shape)
    along = axis.of_entries(shape[axis.dim], n).to(device)
    return along.reshape([-1 if d == axis.dim else 1 for d in range(len(shape))]).expand(shape)


def located(samples: torch.Tensor, n: int, *more: torch.Tensor, some: bool = False) -> Place:
    """Where the samples are in a tensor, given the one of each of its entries; all that is given has to agree.

    `some` says that there may be samples though no entry is of one: as many as a mask has selected.
    """
    given = (samples, *more)
    if not some and samples.numel() and _true(*(s < 0 for s in given)):
        return None
    only = _only(given, each=True)
    if only is not None:
        return only
    for dim, size in enumerate(samples.shape):
        if not size:  # none were selected
            return Axis(dim, rows=())
        for inner in [i for i in range(1, size // n + 1) if size % (i * n) == 0]:
            axis = Axis(dim, size // (inner * n), inner)
            if agree(spread(axis, samples.shape, n, samples.device), given):
                return axis
    for dim in range(samples.ndim):
        rows = _rows(given, dim)
        if rows is not None:
            axis = Axis(dim, rows=rows) if len(set(rows)) > 1 else Axis(None, rows=rows[:1])
            if agree(spread(axis, samples.shape, n, samples.device), given):
                return axis
    only = _only(given, each=False)
    if only is not None:
        return only
    if _true(*(s < 0 for s in given)):
        return None
    raise Mixed("it puts entries of several samples into one place")


def ordered(call: Call, axis: Axis) -> bool:
    """Whether an order is enough to follow samples that trade places: only for data, none of which were selected."""
    return not (call.active or call.by_rows) and axis.rows is None


def agree(own: torch.Tensor, given: Iterable[torch.Tensor]) -> bool:
    """Whether each given entry is of the sample `own`, or of none."""
    return _true(*((s < 0) | (s == own) for s in given))


def _true(*conditions: torch.Tensor) -> bool:
    return all(bool(innermost(c).all()) for c in conditions)


def _only(given: tuple[torch.Tensor, ...], each: bool) -> Axis | None:
    """The only sample that entries are of; with `each`, every entry has to be of it. None if there are several."""
    if not given[0].numel():
        return None
    found = reduce(torch.maximum, (innermost(s).flatten() for s in given))
    least, most = (int(end) for end in found.aminmax())
    only = Axis(None, rows=(most,))
    return only if (least if each else most) >= 0 and agree(found.new_tensor(most), given) else None


def _rows(given: tuple[torch.Tensor, ...], dim: int) -> tuple[int, ...] | None:
    """The sample of each entry of a dimension; None if an entry is of no sample."""
    plain = [innermost(s) for s in given]
    if any(s.ndim != p.ndim for s, p in zip(given, plain, strict=True)):  # of an index that a vmap around f has batched
        return None
    if not given[0].numel():
        return () if not given[0].shape[dim] else None
    found = torch.stack([s.movedim(dim, 0).reshape(s.shape[dim], -1).amax(1) for s in plain]).amax(0).tolist()
    return tuple(found) if min(found) >= 0 else None


def moved(call: Call) -> Place | list[Place]:
    """Follow the samples through a function that only moves entries and fills with zeros, by running it on the sample
    of each entry."""
    args, kwargs = tree.map_tensors(lambda x: samples_of(call, x) - NONE, (call.args, call.kwargs))
    out = call.func(*args, **kwargs)
    if isinstance(out, torch.Tensor):
        return located(out + NONE, call.n)
    return [located(samples + NONE, call.n) for samples in out]
