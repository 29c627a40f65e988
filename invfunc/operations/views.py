"""Views, and what else only moves entries: where they go is all that is to be known."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from invfunc import tree
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import Call, Mixed, Place, leading
from invfunc.operations.batch_axis.samples import located, moved, samples_of
from invfunc.operations.equations import LETTERS
from invfunc.operations.factors.recipe import Recipe, Site
from invfunc.operations.operation import define
from invfunc.operations.pointwise import entry_by_entry, pointwise
from invfunc.operations.receptive_fields import regions
from invfunc.operations.receptive_fields.step import Rows, Step, behind, elementwise, flattened, raised

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


def movement(call: Call) -> Place | list[Place]:
    return moved(call)


def _pad_axis(call: Call) -> Place:
    axis = call.place(call.first)
    if isinstance(axis, Axis) and axis.rows == () and call.out.shape[axis.dim or 0]:
        return None  # nothing of a sample was padded
    return leading(call, len(call.arg("pad")) // 2)


# Receptive fields: the same operation on the labels


def _cat_field(step: Step, out: torch.Tensor) -> Rows:
    parts = [step.filled(x) for x in step["tensors"] if x.ndim == out.ndim]
    return torch.cat(parts, behind(step["dim"], out.ndim)[0])


def _stacked_field(step: Step, out: torch.Tensor) -> Rows:
    return torch.stack([step.filled(x) for x in step["tensors"]], behind(step["dim"], out.ndim)[0])


def _constant_pad(step: Step, out: torch.Tensor) -> Rows:
    return torch.constant_pad_nd(step.filled(step["self"]), step["pad"], regions.NONE)


def _reflected(step: Step, out: torch.Tensor) -> Rows:
    rows, padding = step.filled(step["self"]), step["padding"]
    return flattened(rows, len(padding) // 2, lambda maps: step.func(maps, padding))


def _repeated(step: Step, out: torch.Tensor) -> Rows:
    return raised(step.filled(step["self"]), out.ndim).repeat(1, *step["repeats"])


def _scattered(step: Step, out: torch.Tensor) -> Rows:
    rows, src, dim = step.filled(step["self"]), step.filled(step["src"]), behind(step["dim"], out.ndim)[0]
    if "index" in step:
        return rows.select_scatter(src, dim, step["index"])
    return rows.slice_scatter(src, dim, step["start"], step["end"], step["step"])


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


define(
    "transpose permute t get:T get:mT get:H get:mH movedim moveaxis swapaxes swapdims select narrow chunk split "
    "split_with_sizes tensor_split unbind unsqueeze squeeze hsplit vsplit dsplit",
    batch_axis=view,
    linear="all",
    picks="once",
)
define("adjoint unsafe_chunk unsafe_split", batch_axis=view, linear="all")
define("expand broadcast_to", batch_axis=view, linear="all", picks="any")
define("expand_as", batch_axis=view, linear="all", picks="any", reads="first")
define("view reshape flatten unflatten ravel", batch_axis=reshape, linear="all", picks="once")
define("view_as reshape_as", batch_axis=reshape, linear="all", picks="once", reads="first")
define(
    "cat concat concatenate",
    batch_axis=cat,
    factor=placed,
    receptive_field=_cat_field,
    linear="all",
    places="reads",
    paired=entry_by_entry,
)
define("hstack vstack row_stack", batch_axis=cat, linear="all", places="reads", paired=entry_by_entry)
define(
    "stack",
    batch_axis=stack,
    factor=placed,
    receptive_field=_stacked_field,
    linear="all",
    places="reads",
    paired=entry_by_entry,
)
define("dstack column_stack block_diag", batch_axis=movement, linear="all", places="reads")
define("repeat", batch_axis=repeat, receptive_field=_repeated, linear="all", picks="any")
define("tile", batch_axis=repeat, linear="all", picks="any")
define("repeat_interleave", batch_axis=repeat_interleave, linear="all", picks="any")
define("fliplr flipud", batch_axis=movement, linear="all", picks="any", permutes=True)
define("rot90", batch_axis=movement, linear="all", permutes=True)
define(
    "diagonal diag_embed atleast_1d atleast_2d atleast_3d diagonal_scatter diag linalg_diagonal meshgrid "
    "cartesian_prod",
    batch_axis=movement,
    linear="all",
)
define("slice_scatter select_scatter", batch_axis=movement, receptive_field=_scattered, linear="all", places="writes")
define("trace", linear="all")
define("tril triu", batch_axis=partial(leading, trailing=2), receptive_field=elementwise, linear="all")
define("pad", batch_axis=_pad_axis, linear="all")
define("constant_pad_nd", receptive_field=_constant_pad, linear="all")
define(
    [f"{kind}_pad{d}d" for kind in ("reflection", "replication") for d in (1, 2, 3)],
    receptive_field=_reflected,
    linear="all",
)
define("pad_sequence", composed=pad_sequence)
define("broadcast_tensors", composed=broadcast_tensors)
