"""Reductions, norms, convolutions, products and losses: over the samples they are a sum, or a mix."""

from __future__ import annotations

from typing import Any

import torch

from invfunc import tree
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import (
    BATCH_SUM,
    Call,
    Mixed,
    Place,
    Unknown,
    pointwise,
    rule,
)
from invfunc.operations.batch_axis.samples import located, moved, ordered, samples_of
from invfunc.operations.equations import equation

# Along a dimension: over the samples it is a sum (sum, mean) or a mix (everything else)


def _dims(x: torch.Tensor, dims: Any) -> set[int]:
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return set(range(x.ndim))
    return {d % max(x.ndim, 1) for d in (dims if isinstance(dims, (tuple, list)) else [dims])}


_DIM_ARGUMENT: dict[str, int] = dict.fromkeys("norm linalg_vector_norm linalg_norm kthvalue".split(), 2)


@rule(
    *"sum mean nansum nanmean amax amin max min prod logsumexp norm linalg_vector_norm linalg_norm var std "
    "var_mean std_mean median nanmedian argmax argmin all any count_nonzero mode kthvalue".split()
)
def reduce(call: Call) -> Place | list[Place]:
    x = call.first
    if call.name in ("max", "min") and isinstance(call.arg(1, "other"), torch.Tensor):
        return pointwise(call)
    axis = call.place(x)
    assert isinstance(axis, Axis) and axis.dim is not None
    position = _DIM_ARGUMENT.get(call.name, 1)
    dim = call.arg(position, "dim", call.kwargs.get("axis"))
    dims = _dims(x, None if isinstance(dim, bool) else dim)
    if axis.dim in dims:
        if not call.active or call.name in _NUMBERS:
            return BATCH_SUM
        if not isinstance(call.out, torch.Tensor) and call.name in _PICK:
            return picked(call)
        if call.name not in ("sum", "mean", "nansum"):
            raise Mixed("it reduces over the sample axis")
        return BATCH_SUM
    out = tree.tensors(call.out)[0]
    for keep in (True, False):
        left = [1 if d in dims else size for d, size in enumerate(x.shape) if keep or d not in dims]
        if list(out.shape) == left:
            return axis if keep else axis.at(axis.dim - sum(d < axis.dim for d in dims))
    raise Unknown("it reduces over dimensions that cannot be read off the call")


_PICK = {"max", "min", "median", "nanmedian", "kthvalue", "mode"}
"""Which, along one dimension, give entries and their places."""
_NUMBERS = {"argmax", "argmin", "any", "all", "count_nonzero"}
"""Which have no derivative."""


@rule("cosine_similarity", "pairwise_distance")
def paired(call: Call) -> Place:
    axis, ndim = pointwise(call), max(x.ndim for x, _ in call.samples)
    default = -1 if call.name == "pairwise_distance" else 1
    dim = call.arg(2, "dim", default) if call.name == "cosine_similarity" else default
    if tree.tensors(call.out)[0].ndim == ndim:
        return axis
    assert isinstance(axis, Axis)
    place, other = call.samples[0]
    assert isinstance(other, Axis) and other.dim is not None
    at = other.dim - place.ndim + ndim
    if at == dim % ndim:
        raise Mixed("it compares along the sample axis")
    return other.at(at - (at > dim % ndim))


@rule("prelu")
def prelu(call: Call) -> Place:
    axis = call.place(call.first)
    if not isinstance(axis, Axis) or (axis.dim == 1 and call.arg(1, "weight").numel() > 1):
        raise Mixed("its channels are the samples")
    return axis


def _along(x: torch.Tensor, axis: Axis, dims: set[int], active: bool, name: str) -> Axis:
    if axis.dim in dims and (active or name in _ELSEWHERE):
        raise Mixed(f"it computes {name} along the sample axis")
    return axis


_ELSEWHERE = set("unfold diff glu scatter scatter_add index_add index_copy".split())
"""Along the samples, they put entries where those of other samples are."""


@rule(
    *"softmax log_softmax softmin cumsum cumprod logcumsumexp cummax cummin flip roll sort argsort topk glu diff "
    "unfold".split()
)
def along(call: Call) -> Place | list[Place]:
    x = call.first
    axis = call.place(x)
    if not isinstance(axis, Axis):
        raise Unknown("other arguments than its input depend on the samples")
    if call.name == "unfold" and getattr(call.func, "__module__", None) == "torch.nn.functional":
        return _leading(call, x.ndim - 1)
    default = -1 if call.name in ("glu", "sort", "argsort", "diff") else None
    position = {"topk": 2, "roll": 2, "diff": 2}.get(call.name, 1)
    dim = call.arg(position, "dim", call.kwargs.get("dims", -1 if call.name == "topk" else default))
    if call.name == "flip" and len(call.args) > 2:
        dim = call.args[1:]
    if call.name in ("flip", "roll") and axis.dim in _dims(x, dim) and not ordered(call, axis):
        return moved(call)
    if call.name in _RANKS and axis.dim in _dims(x, dim):
        return picked(call)
    out = _along(x, axis, _dims(x, dim), call.active, call.name)
    for y, other in call.samples:
        if y is not x and other != axis:
            raise Mixed("its arguments have their samples along different axes")
    return out


_RANKS = {"sort", "argsort", "topk"}


def picked(call: Call) -> Place | list[Place]:
    """Where the samples are when entries were picked along their axis: the indices in the result tell which. These
    indices themselves count as a sum over the samples, as they are computed from all of the data."""
    if isinstance(call.out, torch.Tensor):
        return BATCH_SUM
    values, indices = call.out
    x, axis = call.first, call.place(call.first)
    assert isinstance(axis, Axis) and axis.dim is not None
    if values.shape == x.shape and ordered(call, axis):
        return [axis, BATCH_SUM]
    dim = axis.dim
    where = indices if indices.ndim == x.ndim else indices.unsqueeze(dim)
    samples = samples_of(call, x).gather(dim, where)
    return [located(samples.reshape(indices.shape), call.n), BATCH_SUM]


def _leading(call: Call, trailing: int) -> Place:
    """The last `trailing` dimensions are computed on, those before them only go along."""
    x, axis = call.samples[0]
    others = [a for key, a in (*enumerate(call.args), *call.kwargs.items()) if key not in (0, "input")]
    if any(isinstance(a, torch.Tensor) and call.place(a) is not None for a in others):
        raise Unknown("other arguments than its input depend on the samples")
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
    for prefix, suffixes in (
        *((f"{kind}_pool", ("", "_with_indices")) for kind in ("max", "adaptive_max", "fractional_max")),
        *((f"{kind}_pool", ("",)) for kind in ("avg", "lp", "adaptive_avg")),
    )
    for d in (1, 2, 3)[prefix.startswith("fractional") :]
    for suffix in suffixes
}
_SPATIAL |= {f"{prefix}{d}d": d + 1 for d in (1, 2, 3) for prefix in ("conv", "conv_transpose")}
_SPATIAL |= {"pixel_shuffle": 3, "pixel_unshuffle": 3, "channel_shuffle": 3, "tril": 2, "triu": 2, "one_hot": 0}
_SPATIAL |= {"col2im": 2}


@rule(*_SPATIAL)
def spatial(call: Call) -> Place:
    return _leading(call, _SPATIAL[call.name])


@rule("max_unpool2d", "max_unpool3d")
def unpooled(call: Call) -> Place:
    """Unpooling keeps the sample axis: it puts each entry where an index says, within its own image."""
    axes = {axis for _, axis in call.samples}
    if len(axes) > 1:
        raise Mixed("its arguments have their samples along different axes")
    (axis,) = axes
    assert isinstance(axis, Axis) and axis.dim is not None
    if axis.dim >= call.first.ndim - int(call.name[-2]):
        raise Mixed("it computes across the sample axis")
    return axis


@rule("embedding")
def lookup(call: Call) -> Place:
    if call.arg(3, "scale_grad_by_freq"):
        raise Mixed("scale_grad_by_freq depends on which indices the whole batch has")
    if call.place(call.arg(0, "weight")) is not None:
        raise Mixed("its table depends on the samples")
    return call.place(call.arg(1, "indices"))


@rule("interpolate", "grid_sample", "affine_grid")
def batch_first(call: Call) -> Place:
    if any(axis != Axis(0) for _, axis in call.samples):
        raise Unknown("its samples do not all lie along axis 0")
    return Axis(0)


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
        raise Unknown("it has no rule that follows the sample axis")
    found: set[tuple[str, Axis]] = set()
    for x, labels in zip(parsed.operands, parsed.inputs, strict=True):
        axis = call.place(x)
        if isinstance(axis, Axis) and axis.dim is not None:
            found.add((labels[axis.dim], axis.at(0)))
    for x, _ in parsed.added:
        axis = call.place(x)
        if isinstance(axis, Axis) and axis.dim is not None:
            found.add((parsed.output[axis.dim - x.ndim + len(parsed.output)], axis.at(0)))
    if len(found) != 1:
        raise Mixed("it multiplies samples with each other")
    label, axis = found.pop()
    if label not in parsed.output:
        return BATCH_SUM
    return axis.at(parsed.output.index(label))
