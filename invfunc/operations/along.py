"""Along dimensions that stay: softmax, cumulative sums, sorting, rolls and flips."""

from __future__ import annotations

import torch

from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import Call, Mixed, Place, Unknown, leading
from invfunc.operations.batch_axis.samples import moved, ordered
from invfunc.operations.operation import define
from invfunc.operations.receptive_fields.step import Rows, Step, behind, joined, most
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


def _flip(step: Step, out: torch.Tensor) -> Rows:
    return step.filled(step["self"]).flip([d % out.ndim + 1 for d in step["dims"]])


def _roll(step: Step, out: torch.Tensor) -> Rows:
    rows, shifts = step.filled(step["self"]), step["shifts"]
    if not step["dims"]:
        return rows.flatten(1).roll(shifts, 1).view(rows.shape)
    return rows.roll(shifts, behind(step["dims"], out.ndim))


def along_field(step: Step, out: torch.Tensor) -> Rows:
    x = step["self"]
    if not step.only(x):
        return None
    return most(step.filled(x), behind(step["dim"] if "dim" in step else 0, x.ndim))


def _cumulated(step: Step, out: torch.Tensor) -> Rows:
    x = step["self"]
    return step.filled(x).cummax(behind(step["dim"], x.ndim)[0]).values if x.ndim else step.filled(x)


def _glu(step: Step, out: torch.Tensor) -> Rows:
    return joined(*step.filled(step["self"]).chunk(2, behind(step["dim"], out.ndim)[0]))


define("softmax", batch_axis=along, receptive_field=along_field)
define("log_softmax", batch_axis=along, receptive_field=along_field, loss="logarithm", hessian="log_softmax")
define("_softmax _log_softmax _safe_softmax", receptive_field=along_field)
define("softmin", batch_axis=along)
define("cumsum", batch_axis=along, receptive_field=_cumulated, linear="all")
define("cumprod logcumsumexp", batch_axis=along, receptive_field=_cumulated)
define("cummax cummin", batch_axis=along, receptive_field=_cumulated, linear="all", piecewise=True)
define("flip", batch_axis=along, receptive_field=_flip, linear="all", picks="any", permutes=True)
define("roll", batch_axis=along, receptive_field=_roll, linear="all", picks="any", permutes=True)
define("fft_fftshift fft_ifftshift", batch_axis=along, linear="all", picks="any", permutes=True)
define("sort topk", batch_axis=along, receptive_field=along_field, linear="all", piecewise=True, permutes=True)
define("msort", composed=msort)
define("argsort", batch_axis=along, receptive_field=along_field)
define("glu", batch_axis=along, receptive_field=_glu)
define("diff unfold", batch_axis=along, linear="all")
