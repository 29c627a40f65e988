"""Views, and what else only moves entries: where they go is all that is to be known."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from invfunc import tree
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import Call, Mixed, Place
from invfunc.operations.batch_axis.samples import located, moved, samples_of
from invfunc.operations.equations import LETTERS
from invfunc.operations.factors.recipe import Recipe, Site
from invfunc.operations.operation import define
from invfunc.operations.pointwise import pointwise

# The batch axis


def view(call: Call) -> list[Place] | Place:
    x = call.first
    axis = call.place(x)
    assert isinstance(axis, Axis)
    args = tuple(_PROBE if a is x else a for a in call.args)
    kwargs = tuple((k, _PROBE if a is x else a) for k, a in call.kwargs.items())
    found = None
    if len(tree.tensors((call.args, call.kwargs))) == 1:
        try:
            found = _viewed(call.func, tuple(x.shape), axis, args, kwargs)
        except TypeError:  # slices and lists cannot be looked up
            found = _viewed.__wrapped__(call.func, tuple(x.shape), axis, args, kwargs)
    return moved(call) if found is None else list(found)


_PROBE = object()


@lru_cache(maxsize=4096)
def _viewed(func: Callable, shape: tuple[int, ...], axis: Axis, args: tuple, kwargs: tuple) -> list[Place] | None:
    """The view of an empty tensor that has a stride in the sample's dimension only; None if samples are selected."""
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
            return None
        places.append(axis.at(dims[0]))
    return places


def reshape(call: Call) -> Place | list[Place]:
    x, axis = call.first, call.place(call.first)
    assert isinstance(axis, Axis)
    if axis.rows is not None:
        return moved(call)
    found = axis.reshaped(x.shape, call.out.shape, call.n) if x.numel() == call.out.numel() else None
    if found is None:
        raise Mixed("it takes the sample axis apart")
    return found


def cat(call: Call) -> Place | list[Place]:
    if call.name in ("hstack", "vstack", "row_stack"):
        dim = int(call.name == "hstack")
    else:
        dim = call.arg("dim", 0)
    dim -= call.out.ndim if dim >= 0 else 0
    if any(isinstance(a, Axis) and (a.dim is None or a.dim - x.ndim == dim) for x, a in call.samples):
        return moved(call)
    grown = call.name in ("hstack", "vstack", "row_stack") and call.samples[0][0].ndim < 2
    return moved(call) if grown else pointwise(call)


def stack(call: Call) -> Place | list[Place]:
    dim = call.arg("dim", 0) % call.out.ndim
    place = call.samples[0][1]
    if any(other != place for _, other in call.samples):
        return moved(call)
    assert isinstance(place, Axis) and place.dim is not None
    return place.at(place.dim + (dim <= place.dim))


def repeat(call: Call) -> Place | list[Place]:
    x, axis = call.first, call.place(call.first)
    assert isinstance(axis, Axis) and axis.dim is not None
    if axis.rows is not None:
        return moved(call)
    dim = axis.dim + call.out.ndim - x.ndim
    return Axis(dim, axis.outer * (call.out.shape[dim] // x.shape[axis.dim]), axis.inner)


def repeat_interleave(call: Call) -> Place | list[Place]:
    axis, times, dim = call.place(call.first), call.arg("repeats"), call.arg("dim")
    if isinstance(axis, Axis) and axis.dim is not None and axis.rows is None and isinstance(times, int):
        if dim is not None:
            same = dim % call.first.ndim == axis.dim
            return Axis(axis.dim, axis.outer, axis.inner * (times if same else 1))
    if times is None or times is call.first:  # their numbers, each as often as it says
        return located(samples_of(call, call.first).repeat_interleave(call.first), call.n)
    if not isinstance(times, torch.Tensor):
        return moved(call)
    own, along = samples_of(call, call.first), 0 if dim is None else dim % max(call.first.ndim, 1)
    own = own.flatten() if dim is None else own
    said = samples_of(call, times).expand(own.shape[along])  # an entry is also of the sample that says how often it is
    said = said.reshape([-1 if d == along else 1 for d in range(own.ndim)]).expand(own.shape)
    return located(own.repeat_interleave(times, along), call.n, said.repeat_interleave(times, along))


# Receptive fields: the same operation on the labels


# The others


def placed(site: Site, param: torch.Tensor) -> Recipe | None:
    """A parameter that is a part of the output, as in `cat` and `stack`: its share is that part of the cotangent."""
    call, labels = site.call, LETTERS[: site.call.out.ndim]
    tensors, dim = call.arg("tensors"), call.arg("dim", 0) % call.out.ndim
    at = [i for i, x in enumerate(tensors) if x is param]
    if len(at) != 1 or dim == site.axis.dim:
        return None
    if call.name == "stack":
        labels = labels[:dim] + labels[dim + 1 :]
        return Recipe(labels, labels, lambda cotangent, part: cotangent.select(2 + dim, at[0]))
    if any(x.ndim != call.out.ndim for x in tensors):  # torch passes over empty ones
        return None
    start = sum(x.shape[dim] for x in tensors[: at[0]])
    return Recipe(labels, labels, lambda cotangent, part: cotangent.narrow(2 + dim, start, param.shape[dim]))


def pad_sequence(
    sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> torch.Tensor:
    """`pad_sequence` as what pads each of the sequences to the length of the longest, and stacks them."""
    longest, side, dim = max(len(x) for x in sequences), padding_side == "right", 0 if batch_first else 1
    missing = [[0, 0] * (x.ndim - 1) + [0, longest - len(x)][:: 1 if side else -1] for x in sequences]
    return torch.stack(
        [F.pad(x, pad, value=padding_value) if any(pad) else x for x, pad in zip(sequences, missing, strict=True)], dim
    )


def broadcast_tensors(*given: Any) -> tuple[torch.Tensor, ...]:
    tensors = given[0] if len(given) == 1 and isinstance(given[0], (tuple, list)) else given
    shape = torch.broadcast_shapes(*(x.shape for x in tensors))
    return tuple(x.expand(shape) for x in tensors)


define("expand_as", reads="first")
define("view_as reshape_as", reads="first")
define("pad_sequence", composed=pad_sequence)
define("broadcast_tensors", composed=broadcast_tensors)
