"""Reductions along dimensions: over the samples they are a sum (sum, mean), a choice (max), or a mix."""

from __future__ import annotations

from typing import Any

import torch

from invfunc import tree
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import BATCH_SUM, Call, Mixed, Place, Unknown
from invfunc.operations.batch_axis.samples import located, ordered, samples_of
from invfunc.operations.pointwise import pointwise
from invfunc.operations.receptive_fields.step import Rows, Step, behind, most


def dims_of(x: torch.Tensor, dims: Any) -> set[int]:
    """The dimensions that an argument names, counted from the start; all for None."""
    if dims is None or (isinstance(dims, (tuple, list)) and not dims):
        return set(range(x.ndim))
    return {d % max(x.ndim, 1) for d in (dims if isinstance(dims, (tuple, list)) else [dims])}


def reduce(call: Call) -> Place | list[Place]:
    x = call.first
    if call.name in ("max", "min") and isinstance(call.arg("other"), torch.Tensor):
        return pointwise(call)
    axis = call.place(x)
    assert isinstance(axis, Axis) and axis.dim is not None
    dim = call.arg("dim")
    dims = dims_of(x, None if isinstance(dim, bool) else dim)
    if axis.dim in dims:
        if not call.active or call.name in _NUMBERS:
            return BATCH_SUM
        if not isinstance(call.out, torch.Tensor) and call.name in _PICK:
            return picked(call)
        if call.name in _WHOSE:
            whose = f"`{_WHOSE[call.name]}(0).values` of a vector is of one sample"
            raise Mixed(f"it gives an entry along the sample axis without its place there; {whose}")
        if call.name not in ("sum", "mean", "nansum"):
            raise Mixed("it reduces over the sample axis")
        return BATCH_SUM
    out = tree.tensors(call.out)[0]
    for keep in (True, False):
        left = [1 if d in dims else size for d, size in enumerate(x.shape) if keep or d not in dims]
        if list(out.shape) == left:
            return axis if keep else axis.at(axis.dim - sum(d < axis.dim for d in dims))
    raise Unknown("it reduces over dimensions that cannot be read off the call")


def entries(call: Call) -> torch.Tensor | None:
    """What each sample adds to a sum or a mean."""
    (x, axis), *others = call.samples
    if others or not isinstance(axis, Axis):
        return None
    dims = [d + 1 for d in dims_of(x, call.arg("dim"))]
    added = axis.expose(x, call.n).sum(dims, bool(call.arg("keepdim", False)), dtype=call.out.dtype)
    return added if call.name == "sum" else added * (call.out.numel() / max(1, x.numel()))


_PICK = {"max", "min", "median", "nanmedian", "kthvalue", "mode"}
"""Which, along one dimension, give entries and their places."""
_WHOSE = {"max": "max", "amax": "max", "min": "min", "amin": "min", "median": "median", "nanmedian": "nanmedian"}
"""Which give entries without their places, and what gives them with these."""
_NUMBERS = {"argmax", "argmin", "any", "all", "count_nonzero"}
"""Which have no derivative."""


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


def counted(call: Call) -> Place | list[Place]:
    """What is counted over all samples of data: how often each value is there, which are there, and how they vary."""
    x, axis = call.samples[0]
    if call.active and x.is_floating_point():
        raise Mixed("it counts over the sample axis")
    if call.name in ("cov", "corrcoef") and isinstance(axis, Axis) and axis.dim != x.ndim - 1:
        raise Mixed("it computes across the sample axis")
    if call.name == "unique" and isinstance(call.out, tuple) and call.arg("return_inverse", False):
        if call.arg("dim") is not None:
            raise Unknown("it looks at slices of a tensor")
        return [BATCH_SUM, axis, *[BATCH_SUM] * (len(call.out) - 2)]
    return BATCH_SUM


def reduced(step: Step, out: torch.Tensor) -> Rows:
    x = step.args[0]
    if not step.only(x):
        return None
    axes = behind(step["dim"] if "dim" in step else None, x.ndim)
    return most(step.filled(x), axes).reshape(-1, *out.shape)
