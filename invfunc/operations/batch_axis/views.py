"""Views and other moves: where the sample axis goes when entries only change places."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import torch

from invfunc import tree
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import Call, Mixed, Place, pointwise, rule
from invfunc.operations.batch_axis.samples import located, moved, samples_of


@rule(
    *"transpose permute t get:T get:mT get:H get:mH movedim moveaxis swapaxes swapdims expand expand_as select narrow "
    "chunk split split_with_sizes tensor_split unbind unsqueeze squeeze hsplit vsplit dsplit adjoint unsafe_chunk "
    "unsafe_split broadcast_to".split()
)
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


@rule(*"view reshape flatten unflatten ravel view_as reshape_as".split())
def reshape(call: Call) -> Place | list[Place]:
    x, axis = call.first, call.place(call.first)
    assert isinstance(axis, Axis)
    if axis.rows is not None:
        return moved(call)
    found = axis.reshaped(x.shape, call.out.shape, call.n) if x.numel() == call.out.numel() else None
    if found is None:
        raise Mixed("it takes the sample axis apart")
    return found


@rule(*"cat concat concatenate hstack vstack row_stack".split())
def cat(call: Call) -> Place | list[Place]:
    if call.name in ("hstack", "vstack", "row_stack"):
        dim = int(call.name == "hstack")
    else:
        dim = call.arg(1, "dim", call.kwargs.get("axis", 0))
    dim -= call.out.ndim if dim >= 0 else 0
    if any(isinstance(a, Axis) and (a.dim is None or a.dim - x.ndim == dim) for x, a in call.samples):
        return moved(call)
    grown = call.name in ("hstack", "vstack", "row_stack") and call.samples[0][0].ndim < 2
    return moved(call) if grown else pointwise(call)


@rule("stack")
def stack(call: Call) -> Place | list[Place]:
    dim = call.arg(1, "dim", 0) % call.out.ndim
    place = call.samples[0][1]
    if any(other != place for _, other in call.samples):
        return moved(call)
    assert isinstance(place, Axis) and place.dim is not None
    return place.at(place.dim + (dim <= place.dim))


@rule("repeat", "tile")
def repeat(call: Call) -> Place | list[Place]:
    x, axis = call.first, call.place(call.first)
    assert isinstance(axis, Axis) and axis.dim is not None
    if axis.rows is not None:
        return moved(call)
    dim = axis.dim + call.out.ndim - x.ndim
    return Axis(dim, axis.outer * (call.out.shape[dim] // x.shape[axis.dim]), axis.inner)


@rule("repeat_interleave")
def repeat_interleave(call: Call) -> Place | list[Place]:
    axis, times, dim = call.place(call.first), call.arg(1, "repeats"), call.arg(2, "dim")
    if isinstance(axis, Axis) and axis.dim is not None and axis.rows is None and isinstance(times, int):
        if dim is not None:
            same = dim % call.first.ndim == axis.dim
            return Axis(axis.dim, axis.outer, axis.inner * (times if same else 1))
    if not isinstance(times, torch.Tensor):
        return moved(call)
    if not isinstance(axis, Axis):
        raise Mixed("it repeats constants as often as samples say")
    options = {key: value for key, value in call.kwargs.items() if key not in ("input", "repeats")}
    return located(torch.repeat_interleave(samples_of(call, call.first), times, *call.args[2:], **options), call.n)


@rule(
    *"rot90 fliplr flipud diagonal diag_embed atleast_1d atleast_2d atleast_3d dstack column_stack slice_scatter "
    "select_scatter diagonal_scatter block_diag diag linalg_diagonal meshgrid cartesian_prod".split()
)
def movement(call: Call) -> Place | list[Place]:
    return moved(call)
