"""Views and other moves: where the sample axis goes when entries only change places."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch

from invfunc import tree
from invfunc.jacobian.axis import Axis
from invfunc.jacobian.follow.call import Call, Mixed, Place, Unknown, pointwise, rule
from invfunc.jacobian.follow.indices import advanced


@rule(
    *"transpose permute t get:T get:mT get:H get:mH movedim moveaxis swapaxes swapdims expand expand_as select narrow "
    "chunk split split_with_sizes tensor_split unbind unsqueeze squeeze hsplit vsplit dsplit adjoint unsafe_chunk "
    "unsafe_split matrix_H broadcast_to iter".split()
)
def view(call: Call) -> list[Place]:
    x = call.first
    axis = call.place(x)
    assert isinstance(axis, Axis)
    args = tuple(_PROBE if a is x else a for a in call.args)
    kwargs = tuple((k, _PROBE if a is x else a) for k, a in call.kwargs.items())
    if len(tree.tensors((call.args, call.kwargs))) == 1:
        try:
            return list(_viewed(call.func, tuple(x.shape), axis, args, kwargs))
        except TypeError:  # slices and lists cannot be looked up
            pass
    return _viewed.__wrapped__(call.func, tuple(x.shape), axis, args, kwargs)


_PROBE = object()


@lru_cache(maxsize=4096)
def _viewed(func: Callable, shape: tuple[int, ...], axis: Axis, args: tuple, kwargs: tuple) -> list[Place]:
    """Run the view on an empty tensor of the same shape that has a stride in the sample's dimension only."""
    assert axis.dim is not None
    size = shape[axis.dim]
    probe = torch.empty_strided(shape, [int(d == axis.dim) for d in range(len(shape))], dtype=torch.bool, device="meta")
    like = [probe if a is _PROBE else a for a in args]
    out = func(*like, **{k: probe if a is _PROBE else a for k, a in kwargs})
    moved = [out] if isinstance(out, torch.Tensor) else list(out)
    places: list[Place] = []
    for y in moved:
        dims = [d for d in range(y.ndim) if y.stride(d) != 0 and y.shape[d] > 1]
        if len(dims) != 1 or y.shape[dims[0]] != size or y.stride(dims[0]) != 1 or y.storage_offset():
            raise Mixed("it selects or splits samples")
        places.append(axis.at(dims[0]))
    return places


@rule(*"view reshape flatten unflatten ravel view_as reshape_as".split())
def reshape(call: Call) -> Place:
    x, axis = call.first, call.place(call.first)
    assert isinstance(axis, Axis)
    found = axis.reshaped(x.shape, call.out.shape, call.n) if x.numel() == call.out.numel() else None
    if found is None:
        raise Mixed("it takes the sample axis apart")
    return found


@rule("getitem")
def getitem(call: Call) -> Place | list[Place]:
    x, index = call.args
    axis = call.place(x)
    parts = _without_masks(call, list(index) if isinstance(index, tuple) else [index])
    if not advanced(index):
        if isinstance(axis, Axis):
            return view(call)
        return None
    if any(advanced(p) and not isinstance(p, (torch.Tensor, list)) for p in parts):
        raise Unknown("it indexes by something else than ints, slices, lists and tensors")
    if axis is None and len(parts) == 1:  # a table, looked up by sample indices
        return call.place(parts[0])
    if not isinstance(axis, Axis) or axis.dim is None:
        raise Mixed("it looks constants up by several sample indices")
    width = [0 if p is None else p.ndim if isinstance(p, torch.Tensor) and p.dtype == torch.bool else 1 for p in parts]
    if Ellipsis in [p for p in parts if not isinstance(p, torch.Tensor)]:
        at = next(i for i, p in enumerate(parts) if p is Ellipsis)
        width[at] = x.ndim - sum(width) + 1
    if any(isinstance(p, torch.Tensor) and id(p) in call.places for p in parts):
        raise Mixed("it indexes by samples; gather keeps them apart")
    d = 0
    for part, w in zip(parts, width, strict=True):
        if d <= axis.dim < d + w and not (part is Ellipsis or part == slice(None)):
            if (
                not call.active
                and isinstance(part, torch.Tensor)
                and axis.dim == 0
                and call.out.shape[:1] == x.shape[:1]
            ):
                return axis  # data alone in another order: entry n now belongs to sample n
            raise Mixed("it selects samples")
        d += w
    return _only_changed_size(call, x, axis, parts)


def _without_masks(call: Call, parts: list[Any]) -> list[Any]:
    """Constant masks as the indices of their entries."""
    found: list[Any] = []
    for p in parts:
        mask = torch.tensor(p) if isinstance(p, list) and p and all(isinstance(i, bool) for i in p) else p
        if isinstance(mask, torch.Tensor) and mask.dtype == torch.bool and mask.ndim and call.place(mask) is None:
            found.extend(mask.nonzero(as_tuple=True))
        else:
            found.append(p)
    return found


def _only_changed_size(call: Call, x: torch.Tensor, axis: Axis, index: list[Any]) -> Place:
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
    """A bool mask selects as many as it has True entries: only its positions can stand for it on the meta device."""
    if index.ndim == 0 and index.dtype != torch.bool:
        return 0
    if index.dtype == torch.bool:
        raise Mixed("it indexes by a mask; masked_fill or where keep the shape")
    return torch.empty(tuple(index.shape), dtype=index.dtype, device="meta")


@rule("setitem")
def setitem(call: Call) -> Place:
    """`x[index] = value`: where the samples of the value end up in x."""
    x, index, value = call.args
    axis, source = call.place(x), call.place(value)
    if source is None or advanced(index):
        if isinstance(axis, Axis) and source is None:
            return axis
        raise Mixed("it writes samples by an index tensor")
    assert isinstance(source, Axis) and source.dim is not None
    for dim in range(x.ndim):
        probe = torch.empty_strided(
            tuple(x.shape), [int(d == dim) for d in range(x.ndim)], dtype=torch.bool, device="meta"
        )[index]
        back = [d - probe.ndim for d in range(probe.ndim) if probe.stride(d) and probe.shape[d] > 1]
        if back == [source.dim - value.ndim] and probe.shape[back[0]] == x.shape[dim]:
            target = source.at(dim)
            if axis is None or axis == target:
                return target
    raise Mixed("it writes samples where nothing can follow")


@rule(*"cat concat concatenate hstack vstack".split())
def cat(call: Call) -> Place:
    dim = {"hstack": 1, "vstack": 0}.get(call.name, call.arg(1, "dim", call.kwargs.get("axis", 0)))
    place = pointwise(call)
    assert isinstance(place, Axis)
    if place.dim == dim % call.out.ndim:
        raise Mixed("it concatenates along the sample axis")
    return place


@rule("stack")
def stack(call: Call) -> Place:
    dim = call.arg(1, "dim", 0) % call.out.ndim
    first, place = call.samples[0]
    if any(other != place for _, other in call.samples):
        raise Mixed("it stacks tensors whose samples lie along different axes")
    assert isinstance(place, Axis) and place.dim is not None
    return place.at(place.dim + (dim <= place.dim))


@rule("repeat", "tile")
def repeat(call: Call) -> Place:
    x, axis = call.first, call.place(call.first)
    assert isinstance(axis, Axis) and axis.dim is not None
    dim = axis.dim + call.out.ndim - x.ndim
    return Axis(dim, axis.outer * (call.out.shape[dim] // x.shape[axis.dim]), axis.inner)


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> Place:
    axis, times, dim = call.place(call.first), call.arg(1, "repeats"), call.arg(2, "dim")
    if not isinstance(axis, Axis) or axis.dim is None or not isinstance(times, int) or dim is None:
        raise Mixed("it repeats samples unevenly")
    same = dim % call.first.ndim == axis.dim
    return Axis(axis.dim, axis.outer, axis.inner * (times if same else 1))
