"""How each torch function moves the sample axis: from the axes of what it read to that of what it returned.

A rule takes a `Call` and returns an `Axis`, `TOTAL` (summed over the samples) or None (no sample in it), one for all
tensors that came out or a list with one for each. It raises `Mixed` where samples meet or the axis cannot be followed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

from invfunc import tree
from invfunc.jacobian.axis import Axis
from invfunc.jacobian.equations import equation


class Mixed(Exception):
    """Samples are mixed by an operation, or it moves the sample axis where nothing can follow; says how."""


class Unknown(Mixed):
    """Nothing is known about the operation; it may well keep the samples apart."""


class Total:
    """In place of an axis: the tensor is a sum over the samples, as a scalar loss is."""

    def __repr__(self) -> str:
        return "TOTAL"


TOTAL = Total()
Place = Axis | Total | None


@dataclass
class Call:
    """One call of a torch function: what it read, what it returned, and where the samples are in what it read."""

    name: str
    func: Callable
    args: tuple
    kwargs: dict[str, Any]
    out: Any
    places: dict[int, Axis | Total]
    n: int
    active: bool
    """Whether the sample tensors depend on the parameters."""

    def arg(self, position: int, name: str, default: Any = None) -> Any:
        return self.args[position] if len(self.args) > position else self.kwargs.get(name, default)

    def place(self, x: Any) -> Place:
        return self.places.get(id(x))

    @property
    def samples(self) -> list[tuple[torch.Tensor, Axis | Total]]:
        return [(x, self.places[id(x)]) for x in tree.tensors((self.args, self.kwargs)) if id(x) in self.places]

    @property
    def first(self) -> torch.Tensor:
        return self.args[0] if self.args else next(iter(self.kwargs.values()))


Rule = Callable[[Call], "Place | list[Place]"]
RULES: dict[str, Rule] = {}


def rule(*names: str) -> Callable[[Rule], Rule]:
    def register(fn: Rule) -> Rule:
        RULES.update(dict.fromkeys(names, fn))
        return fn

    return register


@cache
def find(name: str) -> Rule | None:
    """The rule of a function, by its name; functions that torch itself tags as pointwise share one."""
    if name in RULES:
        return RULES[name]
    packet = getattr(torch.ops.aten, name, None)
    if packet is not None and any(torch.Tag.pointwise in getattr(packet, o).tags for o in packet.overloads()):
        return pointwise
    return None


def follow(call: Call) -> Place | list[Place]:
    """Where the samples are in the result of a call."""
    if all(place is TOTAL for _, place in call.samples):
        return total(call)
    if any(place is TOTAL for _, place in call.samples):
        raise Mixed("it combines a sum over the samples with tensors that keep them apart")
    found = find(call.name)
    if call.n == 1:  # nothing to mix, and everything is of the one sample
        return Axis(None)
    if found is None:
        raise Unknown("it has no rule that follows the sample axis")
    return found(call)


# Sums over the samples: linear operations keep them a total


_LINEAR = set(
    "add sub rsub mul div neg sum mean stack cat to float double half bfloat16 type clone contiguous squeeze unsqueeze "
    "reshape view flatten subtract multiply divide true_divide negative positive getitem expand alias detach".split()
)


def total(call: Call) -> Place:
    several = len(call.samples) > 1
    if call.name in ("mul", "multiply") and several:
        raise Mixed("it multiplies two sums over the samples")
    if call.name in ("div", "divide", "true_divide") and call.place(call.arg(1, "other")) is TOTAL:
        raise Mixed("it divides by a sum over the samples")
    if call.name not in _LINEAR:
        raise Mixed("it is not linear in a sum over the samples")
    return TOTAL


# Element by element


@rule(
    *"dropout alpha_dropout feature_dropout feature_alpha_dropout dropout1d dropout2d dropout3d type_as contiguous to "
    "float double half bfloat16 int long bool type clone detach requires_grad alias hardswish softsign tanhshrink "
    "log_sigmoid logsigmoid floor_divide negative subtract multiply divide true_divide absolute square prelu "
    "special_expit bernoulli relu6 clip clamp greater less greater_equal less_equal not_equal isclose get:data "
    "get:real get:imag rrelu rsub rdiv rpow pow copy nan_to_num fill masked_fill where maximum minimum".split()
)
def pointwise(call: Call) -> Place:
    first, place = call.samples[0]
    assert isinstance(place, Axis) and place.dim is not None
    back = place.dim - first.ndim
    for x, other in call.samples[1:]:
        assert isinstance(other, Axis) and other.dim is not None
        if (other.dim - x.ndim, other.outer, other.inner) != (back, place.outer, place.inner):
            raise Mixed(f"it combines samples along {place} of a tensor with samples along {other} of another")
    out = tree.tensors(call.out)[0]
    return place.at(out.ndim + back)


# Views and other moves


@rule(
    *"transpose permute t get:T get:mT get:H get:mH movedim moveaxis swapaxes swapdims expand expand_as select narrow "
    "chunk split split_with_sizes tensor_split unbind unsqueeze squeeze hsplit vsplit dsplit adjoint unsafe_chunk "
    "unsafe_split matrix_H broadcast_to iter".split()
)
def view(call: Call) -> list[Place]:
    """Run the view on an empty tensor of the same shape that has a stride in the sample's dimension only."""
    x = call.first
    axis = call.place(x)
    assert isinstance(axis, Axis) and axis.dim is not None
    size = x.shape[axis.dim]
    probe = torch.empty_strided(
        tuple(x.shape), [int(d == axis.dim) for d in range(x.ndim)], dtype=torch.bool, device="meta"
    )
    like = [probe if a is x else a for a in call.args]
    out = call.func(*like, **{k: probe if a is x else a for k, a in call.kwargs.items()})
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
    parts = list(index) if isinstance(index, tuple) else [index]
    if not any(isinstance(p, (torch.Tensor, list)) for p in parts):
        if isinstance(axis, Axis):
            return view(call)
        return None
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
    return _only_changed_size(call, x, axis)


def _only_changed_size(call: Call, x: torch.Tensor, axis: Axis) -> Place:
    """The dimension of the result that grows with the sample's dimension of x; for functions that do not mix along it."""
    assert axis.dim is not None
    shape = list(x.shape)
    shape[axis.dim] += 1
    meta = [torch.empty(s, device="meta") for s in (tuple(x.shape), tuple(shape))]
    parts = [tree.map_tensors(lambda t: _meta_index(t), a) for a in call.args[1:]]
    small, large = (call.func(m, *parts, **call.kwargs).shape for m in meta)
    dims = [d for d, (a, b) in enumerate(zip(small, large, strict=True)) if a != b]
    if len(dims) != 1:
        raise Mixed("it moves the sample axis where nothing can follow")
    return axis.at(dims[0])


def _meta_index(index: torch.Tensor) -> torch.Tensor:
    """A bool mask selects as many as it has True entries: only its positions can stand for it on the meta device."""
    if index.dtype == torch.bool:
        raise Mixed("it indexes by a mask; masked_fill or where keep the shape")
    return torch.empty(tuple(index.shape), dtype=index.dtype, device="meta")


@rule("setitem")
def setitem(call: Call) -> Place:
    """`x[index] = value`: where the samples of the value end up in x."""
    x, index, value = call.args
    axis, source = call.place(x), call.place(value)
    if source is None or (isinstance(index, torch.Tensor) or isinstance(index, list)):
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


# Along a dimension: over the samples it is a sum (sum, mean) or a mix (everything else)


def _dims(x: torch.Tensor, dims: Any) -> set[int]:
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return set(range(x.ndim))
    return {d % max(x.ndim, 1) for d in (dims if isinstance(dims, (tuple, list)) else [dims])}


_DIM_ARGUMENT = dict.fromkeys("norm linalg_vector_norm vector_norm linalg_norm".split(), 2) | {"roll": 2}


@rule(
    *"sum mean nansum nanmean amax amin max min prod logsumexp norm linalg_vector_norm vector_norm linalg_norm var std "
    "var_mean std_mean median nanmedian argmax argmin all any count_nonzero mode kthvalue".split()
)
def reduce(call: Call) -> Place:
    x = call.first
    if call.name in ("max", "min") and isinstance(call.arg(1, "other"), torch.Tensor):
        return pointwise(call)
    axis = call.place(x)
    assert isinstance(axis, Axis) and axis.dim is not None
    position = _DIM_ARGUMENT.get(call.name, 1)
    dim = call.arg(position, "dim", call.kwargs.get("axis"))
    dims = _dims(x, None if isinstance(dim, bool) else dim)
    if axis.dim in dims:
        if not call.active:
            return None
        if call.name not in ("sum", "mean", "nansum"):
            raise Mixed("it reduces over the sample axis")
        return TOTAL
    kept = tree.tensors(call.out)[0].ndim == x.ndim
    return axis if kept else axis.at(axis.dim - sum(d < axis.dim for d in dims))


def _along(x: torch.Tensor, axis: Axis, dims: set[int], active: bool, name: str) -> Axis:
    if active and axis.dim in dims:
        raise Mixed(f"it computes {name} along the sample axis")
    return axis


@rule(
    *"softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin flip roll sort argsort topk renorm glu "
    "index_select gather scatter scatter_add index_add index_copy index_fill take_along_dim diff unfold diag_embed "
    "fliplr flipud rot90".split()
)
def along(call: Call) -> Place:
    x = call.first
    axis = call.place(x)
    if not isinstance(axis, Axis):
        raise Mixed("it looks constants up by sample indices")
    default = -1 if call.name in ("glu", "sort", "argsort", "diff") else None
    position = {"topk": 2, "roll": 2, "diff": 2, "take_along_dim": 2, "renorm": 2}.get(call.name, 1)
    dim = call.arg(position, "dim", call.kwargs.get("dims", -1 if call.name == "topk" else default))
    out = _along(x, axis, _dims(x, dim), call.active, call.name)
    for y, other in call.samples:
        if y is not x and other != axis:
            raise Mixed("its arguments have their samples along different axes")
    return out


def _leading(call: Call, trailing: int) -> Place:
    """The last `trailing` dimensions are computed on, those before them only go along."""
    x, axis = call.samples[0]
    assert isinstance(axis, Axis) and axis.dim is not None
    if axis.dim >= x.ndim - trailing:
        raise Mixed("it computes across the sample axis")
    return axis


@rule("layer_norm", "rms_norm")
def layer_norm(call: Call) -> Place:
    shape = call.arg(1, "normalized_shape")
    return _leading(call, len(shape))


@rule("batch_norm", "group_norm", "instance_norm", "native_batch_norm", "native_group_norm", "local_response_norm")
def channel_norm(call: Call) -> Place:
    if call.name == "batch_norm" and call.arg(5, "training"):  # in both of torch's signatures the sixth argument
        raise Mixed("in train mode it normalises with the statistics of the whole batch; put it in eval mode")
    return _leading(call, call.first.ndim - 1)


_SPATIAL = {
    f"{prefix}{d}d{suffix}": d
    for d in (1, 2, 3)
    for suffix in ("", "_with_indices")
    for prefix in ("max_pool", "avg_pool", "lp_pool", "adaptive_max_pool", "adaptive_avg_pool", "fractional_max_pool")
}
_SPATIAL |= {f"{prefix}{d}d": d + 1 for d in (1, 2, 3) for prefix in ("conv", "conv_transpose")}
_SPATIAL |= {"pixel_shuffle": 3, "pixel_unshuffle": 3, "channel_shuffle": 3, "tril": 2, "triu": 2, "one_hot": 0}
_SPATIAL |= {
    "linalg_inv": 2,
    "linalg_solve": 2,
    "linalg_cholesky": 2,
    "inverse": 2,
    "embedding": 0,
    "im2col": 2,
    "col2im": 2,
}


@rule(*_SPATIAL)
def spatial(call: Call) -> Place:
    return _leading(call, _SPATIAL[call.name])


@rule("interpolate", "upsample", "grid_sample", "affine_grid")
def batch_first(call: Call) -> Place:
    axis = _leading(call, call.first.ndim - 1)
    if any(other != axis for _, other in call.samples):
        raise Mixed("its arguments have their samples along different axes")
    return axis


@rule("pad")
def pad(call: Call) -> Place:
    return _leading(call, len(call.arg(1, "pad")) // 2)


@rule("scaled_dot_product_attention")
def attention(call: Call) -> Place:
    for x, axis in call.samples:
        assert isinstance(axis, Axis) and axis.dim is not None
        if axis.dim >= x.ndim - 2:
            raise Mixed("it attends across the sample axis")
    return pointwise(call)


# Products: by their equation


@rule(*"linear matmul rmatmul mm bmm mv dot inner addmm addmv baddbmm einsum bilinear tensordot vdot outer".split())
def product(call: Call) -> Place:
    parsed = equation(call.name, call.args, call.kwargs)
    if parsed is None:
        raise Mixed("it has no rule that follows the sample axis")
    found: set[tuple[str, int, int]] = set()
    for x, labels in zip(parsed.operands, parsed.inputs, strict=True):
        axis = call.place(x)
        if isinstance(axis, Axis) and axis.dim is not None:
            found.add((labels[axis.dim], axis.outer, axis.inner))
    for x, _ in parsed.added:
        axis = call.place(x)
        if isinstance(axis, Axis) and axis.dim is not None:
            label = parsed.output[axis.dim - x.ndim + len(parsed.output)]
            found.add((label, axis.outer, axis.inner))
    if len(found) != 1:
        raise Mixed("it multiplies samples with each other")
    label, outer, inner = found.pop()
    if label not in parsed.output:
        return TOTAL if call.active else None
    return Axis(parsed.output.index(label), outer, inner)


# Losses: by their reduction


_ELEMENTWISE_LOSSES = (
    "mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits kl_div "
    "poisson_nll_loss soft_margin_loss"
).split()


def reduction(call: Call) -> str:
    """The reduction of a loss, also where its deprecated flags say it."""
    average, reduced = call.kwargs.get("size_average"), call.kwargs.get("reduce")
    if average is not None or reduced is not None:
        return "none" if reduced is False else "sum" if average is False else "mean"
    said = [a for a in call.args if isinstance(a, str)]
    return said[0] if said else call.kwargs.get("reduction", "mean")


@rule(*_ELEMENTWISE_LOSSES, "cross_entropy", "nll_loss")
def loss(call: Call) -> Place:
    if reduction(call) != "none":
        return TOTAL if call.active else None
    if call.name in _ELEMENTWISE_LOSSES:
        return pointwise(call)
    x, axis = call.first, call.place(call.first)
    if not isinstance(axis, Axis) or axis.dim is None:
        raise Mixed("its input does not depend on the samples, but its target does")
    classes = 0 if x.ndim == 1 else 1
    if axis.dim == classes:
        raise Mixed("it normalises over the sample axis as if these were classes")
    return axis.at(axis.dim - (axis.dim > classes))
