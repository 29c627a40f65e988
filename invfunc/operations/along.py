"""Along dimensions that stay: softmax, cumulative sums, sorting, rolls and flips."""

from __future__ import annotations

import torch

from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import Call, Mixed, Place, Unknown, leading
from invfunc.operations.batch_axis.samples import moved, ordered
from invfunc.operations.operation import define
from invfunc.operations.reductions import dims_of, picked


def _kept(x: torch.Tensor, axis: Axis, dims: set[int], active: bool, name: str) -> Axis:
    if axis.dim in dims and (active or name in _ELSEWHERE):
        raise Mixed(f"it computes {name} along the sample axis")
    return axis


_ELSEWHERE = {"unfold", "diff", "glu"}
"""Along the samples, they put entries where those of other samples are."""


def along(call: Call) -> Place | list[Place]:
    x = call.first
    axis = call.place(x)
    if not isinstance(axis, Axis):
        raise Unknown("other arguments than its input depend on the samples")
    if call.name == "unfold" and getattr(call.func, "__module__", None) == "torch.nn.functional":
        return leading(call, x.ndim - 1)
    dim = call.arg("dim", -1 if call.name in _LAST else None)
    if call.name == "flip" and len(call.args) > 2:
        dim = call.args[1:]
    if call.name in _SHIFTS and axis.dim in dims_of(x, dim) and not ordered(call, axis):
        return moved(call)
    if call.name in _RANKS and axis.dim in dims_of(x, dim):
        return picked(call)
    out = _kept(x, axis, dims_of(x, dim), call.active, call.name)
    for y, other in call.samples:
        if y is not x and other != axis:
            raise Mixed("its arguments have their samples along different axes")
    return out


_LAST = {"glu", "sort", "argsort", "topk", "diff"}
"""Which take the last dimension if none is given."""
_RANKS = {"sort", "argsort", "topk"}
_SHIFTS = {"flip", "roll", "fft_fftshift", "fft_ifftshift"}


def msort(input: torch.Tensor) -> torch.Tensor:
    """`msort` as the values of `sort`, which has the indices too."""
    return input.sort(0)[0]


define("msort", composed=msort)
