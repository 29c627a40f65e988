"""Rules of operations with windows (convolution, pools, resizing) and of normalisations."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F

from invfunc.operations.receptive_fields.regions import NONE, blank
from invfunc.operations.receptive_fields.rule import Rows, Step, flattened, joined, most, raised, rule

_POOLS = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}
_ADAPTIVE = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}


def _each(sizes: Sequence[int], d: int) -> list[int]:
    return [*sizes] if len(sizes) == d else [*sizes] * d


def _padded(rows: torch.Tensor, pairs: Sequence[tuple[int, int]]) -> torch.Tensor:
    if not any(p for pair in pairs for p in pair):
        return rows
    return F.pad(rows, [p for pair in reversed(pairs) for p in pair], value=NONE)


def _windows(
    rows: torch.Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int]
) -> torch.Tensor:
    """The maximum of each window over the last dimensions."""
    d = len(kernel)
    if any(2 * p > k for p, k in zip(padding, kernel, strict=True)):
        rows, padding = _padded(rows, [(p, p) for p in padding]), [0] * d
    if all(k == 1 for k in kernel) and not any(padding):
        return rows if all(s == 1 for s in stride) else rows[(..., *(slice(None, None, s) for s in stride))]
    pooled = _POOLS[d](flattened(rows, d), tuple(kernel), tuple(stride), tuple(padding), tuple(dilation))
    return pooled.view(*rows.shape[: rows.ndim - d], *pooled.shape[1:])


@rule("convolution")
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
    stride, padding, dilation = (_each(step[name], d) for name in ("stride", "padding", "dilation"))
    height, n, _, *sizes = rows.shape
    rows = rows.reshape(height * n, groups, -1, *sizes)
    rows = rows.squeeze(2) if rows.shape[2] == 1 else most(rows, (2,)).squeeze(2)
    if step["transposed"]:
        rows = _stuffed(rows, stride)
        more, ones = _each(step["output_padding"], d), [1] * d
        reach = [gap * (k - 1) for gap, k in zip(dilation, kernel, strict=True)]
        pairs = [(r - p, r - p + m) for r, p, m in zip(reach, padding, more, strict=True)]
        rows = _windows(_padded(rows, pairs), kernel, ones, [0] * d, dilation)
    else:
        rows = _windows(rows, kernel, stride, padding, dilation)
    rows = rows.view(height, n, groups, 1, *rows.shape[2:])
    return rows.expand(-1, -1, -1, out.shape[1] // groups, *[-1] * d).reshape(height, *out.shape)


def _stuffed(rows: torch.Tensor, stride: Sequence[int]) -> torch.Tensor:
    """Labels with `stride - 1` entries that depend on nothing put between the positions of each dimension."""
    if all(s == 1 for s in stride):
        return rows
    sizes = rows.shape[rows.ndim - len(stride) :]
    wide = blank(rows, (*rows.shape[: -len(stride)], *((n - 1) * s + 1 for n, s in zip(sizes, stride, strict=True))))
    wide[(..., *(slice(None, None, s) for s in stride))] = rows
    return wide


# Pools


@rule("max_pool2d_with_indices", "max_pool3d_with_indices", "max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(step: Step, out: torch.Tensor) -> Rows:
    return _pooled(step, out, step["dilation"])


@rule("avg_pool1d", "avg_pool2d", "avg_pool3d")
def _avg_pool(step: Step, out: torch.Tensor) -> Rows:
    return _pooled(step, out, [1])


def _pooled(step: Step, out: torch.Tensor, dilation: Sequence[int]) -> Rows:
    d = int(str(step.func).split("pool")[1][0])
    kernel, padding, dilation = (tuple(_each(v, d)) for v in (step["kernel_size"], step["padding"], dilation))
    rows, stride = flattened(step.filled(step["self"]), d), tuple(_each(step["stride"] or kernel, d))
    return _POOLS[d](rows, kernel, stride, padding, dilation, step["ceil_mode"]).view(-1, *out.shape)


@rule(
    *(f"adaptive_{kind}_pool{d}d" for kind in ("avg", "max") for d in (1, 2, 3)),
    *(f"_adaptive_avg_pool{d}d" for d in (2, 3)),
)
def _adaptive(step: Step, out: torch.Tensor) -> Rows:
    d = int(str(step.func).split("pool")[1][0])
    return _ADAPTIVE[d](flattened(step.filled(step["self"]), d), tuple(step["output_size"])).view(-1, *out.shape)


@rule("im2col")
def _im2col(step: Step, out: torch.Tensor) -> Rows:
    x = step["self"]
    rows = step.filled(x).reshape(-1, *x.shape[-3:])
    rows = _padded(rows, [(p, p) for p in step["padding"]])
    return F.unfold(rows, step["kernel_size"], step["dilation"], 0, step["stride"]).view(-1, *out.shape)


@rule("col2im")
def _col2im(step: Step, out: torch.Tensor) -> Rows:
    (kh, kw), (h, w), (ph, pw) = step["kernel_size"], step["output_size"], step["padding"]
    (dh, dw), (sh, sw) = step["dilation"], step["stride"]
    rows = step.filled(step["self"])
    nh, nw = (h + 2 * ph - dh * (kh - 1) - 1) // sh + 1, (w + 2 * pw - dw * (kw - 1) - 1) // sw + 1
    rows = rows.reshape(-1, kh, kw, nh, nw)
    wide = blank(rows, (rows.shape[0], h + 2 * ph, w + 2 * pw))
    for i in range(kh):
        for j in range(kw):
            at = wide[:, i * dh :: sh, j * dw :: sw][:, :nh, :nw]
            torch.maximum(at, rows[:, i, j], out=at)
    return wide[:, ph : ph + h, pw : pw + w].reshape(-1, *out.shape)


# Resizing: what an entry reads is seen with one input position at a time, since the weights depend on shapes only


@rule(
    *(f"upsample_nearest{d}d" for d in (1, 2, 3)),
    *(f"_upsample_nearest_exact{d}d" for d in (1, 2, 3)),
    *"upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d".split(),
    *"_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa".split(),
)
def _resized(step: Step, out: torch.Tensor) -> Rows:
    x = step["self"]
    d = x.ndim - 2
    align = step["align_corners"] if "align_corners" in step else None
    scales = [a.name for a in step.func._schema.arguments if a.name.startswith("scales")]
    dtype = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
    rows = step.filled(x)
    if "_aa" in str(step.func) and 1 in (*x.shape[2:], *out.shape[2:]):
        return most(rows, range(3, 3 + d))  # torch then reads other positions than along longer axes
    for axis in range(d):
        sizes = [(min(n, 3), min(n, 3)) for n in x.shape[2:]]
        sizes[axis] = x.shape[2 + axis], out.shape[2 + axis]
        index = _reads(step.func, axis, tuple(sizes), align, step[scales[axis]], dtype, x.device)
        if index is None:
            continue
        at = 3 + axis
        rows = rows.index_select(at, index.flatten()).unflatten(at, index.shape)
        rows = most(rows, (at + 1,)).squeeze(at + 1)
    return rows


@lru_cache(maxsize=512)
def _reads(
    func: Any,
    axis: int,
    sizes: tuple[tuple[int, int], ...],
    align: bool | None,
    scale: float | None,
    dtype: torch.dtype,
    device: torch.device,
) -> torch.Tensor | None:
    """The input positions `[output positions, window]` that are read along an axis; None where it stays as it is.

    `sizes` are those of input and output; all other axes are given as short ones, of length one only if they are so.
    """
    size, wanted = sizes[axis]
    shape = [1, size, *(n for n, _ in sizes)]
    scales: list[float | None] = [None] * len(sizes)
    scales[axis] = scale
    one_hot = torch.eye(size, dtype=dtype, device=device)
    one_hot = one_hot.view([1, size, *(size if a == axis else 1 for a in range(len(sizes)))]).expand(shape).contiguous()
    result = func(one_hot, [m for _, m in sizes], *([] if align is None else [align]), *scales)
    hit = (result[0] != 0).movedim(1 + axis, 1).flatten(2).any(2) if len(sizes) > 1 else result[0] != 0
    first, last = hit.int().argmax(0), size - 1 - hit.flip(0).int().argmax(0)
    if not hit.any(0).all():
        first, last = torch.zeros_like(first), torch.full_like(last, size - 1)
    width = int((last - first).max()) + 1
    index = torch.minimum(first[:, None] + torch.arange(width, device=device), last[:, None])
    same = width == 1 and size == wanted and torch.equal(first, torch.arange(size, device=device))
    return None if same else index


# Normalisations


def _scaled(step: Step, rows: Rows, shape: Sequence[int], ndim: int) -> Rows:
    """The labels of a normalised tensor joined with those of its scale and shift."""
    parts = [step.rows(step[name]) for name in ("weight", "bias") if name in step]
    return joined(rows, *(raised(r.reshape(-1, *shape), ndim) for r in parts if r is not None))


@rule("native_layer_norm", "_fused_rms_norm")
def _layer_norm(step: Step, out: torch.Tensor) -> list[Rows]:
    rows, last = step.filled(step["input"]), len(step["normalized_shape"])
    over = most(rows, range(rows.ndim - last, rows.ndim))
    return [_scaled(step, over, step["normalized_shape"], out.ndim), over, over]


@rule("native_group_norm")
def _group_norm(step: Step, out: torch.Tensor) -> list[Rows]:
    n, c, groups = step["N"], step["C"], step["group"]
    over = most(step.filled(step["input"]).reshape(-1, n, groups, c // groups * step["HxW"]), (3,))
    of_channels = over.expand(-1, -1, -1, c // groups).reshape(-1, n, c, *[1] * (out.ndim - 2))
    return [_scaled(step, of_channels, (c, *[1] * (out.ndim - 2)), out.ndim), over.squeeze(3), over.squeeze(3)]


BATCH_NORMS = "native_batch_norm _native_batch_norm_legit cudnn_batch_norm miopen_batch_norm".split()


@rule(*BATCH_NORMS)
def _batch_norm(step: Step, out: torch.Tensor) -> Rows | list[Rows]:
    rows, channels = step.filled(step["input"]), (out.shape[1], *[1] * (out.ndim - 2))
    if step["training"]:
        rows = most(rows, (1, *range(3, rows.ndim)))
    names = ("weight", "bias", "running_mean", "running_var")
    parts = [step.rows(step[name]) for name in names if name in step]
    return [joined(rows, *(raised(r.reshape(-1, *channels), out.ndim) for r in parts if r is not None))]
