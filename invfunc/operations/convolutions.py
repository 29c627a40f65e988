"""Convolutions: patches of what they read times the cotangent."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.grad import conv1d_weight, conv2d_weight, conv3d_weight

from invfunc import thresholds
from invfunc.linear_algebra.contract import Term
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import Call, leading
from invfunc.operations.factors.autocorrelation import patches_gram
from invfunc.operations.factors.patches import patches, same_padding, spread
from invfunc.operations.factors.recipe import Part, Recipe, Site, one_by_one
from invfunc.operations.receptive_fields.regions import blank
from invfunc.operations.receptive_fields.step import Rows, Step, joined, most
from invfunc.operations.receptive_fields.windows import each, padded, windows

_CONV = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
_WEIGHT: dict[int, Callable] = {1: conv1d_weight, 2: conv2d_weight, 3: conv3d_weight}

# Shares


def _channels(site: Site, x: torch.Tensor, axis: Axis, part: Part, d: int) -> torch.Tensor:
    """The exposed samples as `[b, batch, channels, *spatial]`; the batch is 1 if the input has no batch dimension."""
    x = site.exposed(x, axis, part)
    return x if x.ndim == d + 3 else x.unsqueeze(1)


def _whole(cotangent: torch.Tensor, d: int) -> torch.Tensor:
    """A cotangent as `[V, b, batch, channels, *spatial]`."""
    return cotangent if cotangent.ndim == d + 4 else cotangent.unsqueeze(2)


def _bias(d: int) -> Recipe:
    return Recipe("o", "bo" + "pqr"[:d], lambda cotangent, part: _whole(cotangent, d))


def _sent(cotangent: torch.Tensor, part: Part, d: int, groups: int) -> torch.Tensor:
    """A cotangent as `[V, b, batch, groups, channels, positions]`."""
    cotangent = _whole(cotangent, d)
    return cotangent.reshape(*cotangent.shape[:3], groups, -1, math.prod(cotangent.shape[4:]))


@dataclass(frozen=True)
class _WeightGradient:
    """The shares of a weight by the convolution's own backward pass."""

    read: Callable[[Part], torch.Tensor]
    """The input of some samples, one after the other."""
    shape: torch.Size
    options: tuple | None
    """The stride, padding, dilation and groups; None where the padding is none that the backward pass knows."""
    work: int
    """How many multiplications that of a sample takes."""

    def total(self, cotangent: torch.Tensor, part: Part) -> torch.Tensor | None:
        """The sum over samples; None where patches are the better way."""
        d = len(self.shape) - 2
        inputs, sent = self.read(part), _whole(cotangent[None], d)[0].flatten(0, 1)
        positions = len(sent) * math.prod(sent.shape[2:])
        kind = inputs.dtype if inputs.dtype == sent.dtype else None
        known = kind in thresholds.TOTAL_DTYPES and sent.device.type in thresholds.TOTAL_ON
        if not known or self.options is None or positions < thresholds.TOTAL_POSITIONS * self.shape[0]:
            return None
        return _WEIGHT[d](inputs, self.shape, sent, *self.options)

    def each(self, cotangent: torch.Tensor, part: Part) -> list[Term]:
        """Those of each sample, which are the only term; none where patches are the better way."""
        if len(cotangent) != 1 or self.work < thresholds.ALONE:
            return []
        pairs = zip(cotangent[0].split(1), one_by_one(part), strict=True)
        found = [share for share in (self.total(one, at) for one, at in pairs) if share is not None]
        if self.options is None or not found or len(found) < cotangent.shape[1]:
            return []
        groups, (rows, *columns) = self.options[-1], self.shape
        return [("VNgoi", torch.stack(found).reshape(1, len(found), groups, rows // groups, math.prod(columns)))]


def _options(call: Call, names: str) -> list[Any]:
    defaults = {"bias": None, "stride": 1, "padding": 0, "dilation": 1, "groups": 1, "output_padding": 0}
    return [call.arg(name, defaults[name]) for name in names.split()]


def convolution(site: Site, param: torch.Tensor) -> Recipe | None:
    """`G[o, i] = sum_p cotangent[o, p] * patches(x)[i, p]` for each group."""
    call, d = site.call, int(site.call.name[4])
    x, weight = call.arg("input"), call.arg("weight")
    bias, stride, padding, dilation, groups = _options(call, "bias stride padding dilation groups")
    if param is bias and param is not weight:
        return _bias(d)
    axis = call.place(x)
    if param is not weight or not isinstance(axis, Axis):
        return None
    kernel = tuple(weight.shape[2:])
    stride, dilation = spread(stride, d), spread(dilation, d)
    pads = same_padding(padding, kernel, dilation)

    def gram(part: Part) -> torch.Tensor | None:
        if groups != 1 or any(s != 1 for s in stride):
            return None
        return patches_gram(_channels(site, x, axis, part, d).flatten(0, 1), kernel, pads, dilation)

    def read(part: Part) -> list[Term]:
        inputs = _channels(site, x, axis, part, d)
        found = patches(inputs.flatten(0, 1), kernel, stride, pads, dilation)
        return [("Nbgip", found.reshape(*inputs.shape[:2], groups, -1, found.shape[-1]))]

    def projected(part: Part, matrix: torch.Tensor) -> list[Term]:
        inputs = _channels(site, x, axis, part, d)
        kind = torch.promote_types(inputs.dtype, matrix.dtype)
        kernels = matrix.T.to(kind).reshape(-1, *weight.shape[1:]).repeat(groups, *[1] * (d + 1))
        found = _CONV[d](inputs.flatten(0, 1).to(kind), kernels, None, stride, padding, dilation, groups)
        return [("NbgCp", found.reshape(*inputs.shape[:2], groups, matrix.shape[1], -1))]

    own = _WeightGradient(
        read=lambda part: _channels(site, x, axis, part, d).flatten(0, 1),
        shape=weight.shape,
        options=(stride, [a for a, _ in pads], dilation, groups) if all(a == b >= 0 for a, b in pads) else None,
        work=weight.numel() * math.prod(call.out.shape[-d:]),
    )
    sent = partial(_sent, d=d, groups=groups)
    work = math.prod(weight.shape[1:]) * groups * math.prod(call.out.shape[-d:])
    rest = {"build": own.each, "gram": gram, "total": own.total, "reads": (x,), "work": work}
    return Recipe("goi", "bgop", sent, read, projected, **rest)


# Receptive fields


def _convolution(step: Step, out: torch.Tensor) -> Rows:
    x, weight, bias = step["input"], step["weight"], step["bias"]
    rows, whole, added = step.rows(x), step.hull(weight), step.rows(bias)
    parts = [None if whole is None else whole.view(-1, *[1] * out.ndim)]
    if added is not None:
        parts.append(added.view(-1, 1, added.shape[1], *[1] * (out.ndim - 2)))
    if rows is not None:
        parts.append(_convolved(step, rows, weight.shape[2:], out))
    return joined(*parts)


def _convolved(step: Step, rows: torch.Tensor, kernel: Sequence[int], out: torch.Tensor) -> torch.Tensor:
    """What each position reads, over the channels of its group."""
    d, groups = len(kernel), step["groups"]
    stride, padding, dilation = (each(step[name], d) for name in ("stride", "padding", "dilation"))
    height, n, _, *sizes = rows.shape
    rows = rows.reshape(height * n, groups, -1, *sizes)
    rows = rows.squeeze(2) if rows.shape[2] == 1 else most(rows, (2,)).squeeze(2)
    if step["transposed"]:
        rows = _spaced(rows, stride)
        more, ones = each(step["output_padding"], d), [1] * d
        reach = [gap * (k - 1) for gap, k in zip(dilation, kernel, strict=True)]
        pairs = [(r - p, r - p + m) for r, p, m in zip(reach, padding, more, strict=True)]
        rows = windows(padded(rows, pairs), kernel, ones, [0] * d, dilation)
    else:
        rows = windows(rows, kernel, stride, padding, dilation)
    rows = rows.reshape(height, n, groups, 1, *rows.shape[2:])
    return rows.expand(-1, -1, -1, out.shape[1] // groups, *[-1] * d).reshape(height, *out.shape)


def _spaced(rows: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Labels with `stride - 1` entries that depend on nothing put between the positions of each dimension."""
    if all(s == 1 for s in stride):
        return rows
    sizes = rows.shape[rows.ndim - len(stride) :]
    wide = blank(rows, (*rows.shape[: -len(stride)], *((n - 1) * s + 1 for n, s in zip(sizes, stride, strict=True))))
    wide[(..., *(slice(None, None, s) for s in stride))] = rows
    return wide


for _d in (1, 2, 3):
    _axis = partial(leading, trailing=_d + 1)
    pass
    pass
