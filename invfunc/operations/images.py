"""What reads windows of images: pools, resizing, patches, and channels that become pixels."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from typing import Any

import torch
import torch.nn.functional as F

from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.propagation import Call, Mixed, Place, Unknown, leading
from invfunc.operations.naming import argument
from invfunc.operations.operation import define
from invfunc.operations.pointwise import entry_by_entry
from invfunc.operations.receptive_fields.regions import blank
from invfunc.operations.receptive_fields.step import Rows, Step, flattened, most
from invfunc.operations.receptive_fields.windows import POOLS, each, padded

# The batch axis


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


def batch_first(call: Call) -> Place:
    if any(axis != Axis(0) for _, axis in call.samples):
        raise Unknown("its samples do not all lie along axis 0")
    return Axis(0)


# Receptive fields of pools, patches and shuffles


_ADAPTIVE = {1: F.adaptive_max_pool1d, 2: F.adaptive_max_pool2d, 3: F.adaptive_max_pool3d}


def _max_pool(step: Step, out: torch.Tensor) -> Rows:
    return _pooled(step, out, step["dilation"])


def _avg_pool(step: Step, out: torch.Tensor) -> Rows:
    return _pooled(step, out, [1])


def _pooled(step: Step, out: torch.Tensor, dilation: Sequence[int]) -> Rows:
    d = int(str(step.func).split("pool")[1][0])
    kernel, padding, dilation = (tuple(each(v, d)) for v in (step["kernel_size"], step["padding"], dilation))
    rows, stride, ceil = step.filled(step["self"]), tuple(each(step["stride"] or kernel, d)), step["ceil_mode"]
    return flattened(rows, d, lambda maps: POOLS[d](maps, kernel, stride, padding, dilation, ceil))


def _adaptive(step: Step, out: torch.Tensor) -> Rows:
    d = int(str(step.func).split("pool")[1][0])
    rows, size = step.filled(step["self"]), tuple(step["output_size"])
    return flattened(rows, d, lambda maps: _ADAPTIVE[d](maps, size))


def _im2col(step: Step, out: torch.Tensor) -> Rows:
    x = step["self"]
    rows = step.filled(x).reshape(-1, *x.shape[-3:])
    rows = padded(rows, [(p, p) for p in step["padding"]])
    return F.unfold(rows, step["kernel_size"], step["dilation"], 0, step["stride"]).view(-1, *out.shape)


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


def _shuffle(step: Step, out: torch.Tensor) -> Rows:
    rows = step.filled(step["self"])
    batched = rows.reshape(-1, *rows.shape[-3:]) if "channel" not in str(step.func) else rows.flatten(0, 1)
    return step.func(batched, *step.args[1:], **step.kwargs).reshape(-1, *out.shape)


# Resizing: what an entry reads is seen with one input position at a time, since the weights depend on shapes only


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


def _drawn_places(func: Callable, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether the places of the pools are drawn, as they are not given."""
    return argument(func, args, kwargs, "_random_samples") is None


def _spatial(d: int) -> Callable[..., Any]:
    """The samples are where they were, before the last d dimensions."""
    return partial(leading, trailing=d)


for _d in (1, 2, 3):
    _inside = {"batch_axis": _spatial(_d), "linear": "all"}
    define(f"max_pool{_d}d", **_inside, receptive_field=_max_pool, piecewise=True)
    define(f"max_pool{_d}d_with_indices", **_inside, receptive_field=_max_pool if _d > 1 else None, piecewise=True)
    define(f"adaptive_max_pool{_d}d", **_inside, receptive_field=_adaptive, piecewise=True)
    define(f"adaptive_max_pool{_d}d_with_indices", batch_axis=_spatial(_d))
    define(f"avg_pool{_d}d", **_inside, receptive_field=_avg_pool)
    define(f"adaptive_avg_pool{_d}d", **_inside, receptive_field=_adaptive)
    define(f"lp_pool{_d}d", batch_axis=_spatial(_d))
for _d in (2, 3):
    define(f"_adaptive_avg_pool{_d}d", receptive_field=_adaptive, linear="all")
    define(f"fractional_max_pool{_d}d", batch_axis=_spatial(_d), draws=_drawn_places)
    define(f"fractional_max_pool{_d}d_with_indices", batch_axis=_spatial(_d), draws=_drawn_places)
    define(f"max_unpool{_d}d", batch_axis=unpooled, linear="all")
define("interpolate", batch_axis=batch_first, linear="all")
define("grid_sample", batch_axis=batch_first, linear=1, paired=entry_by_entry)
define("affine_grid", batch_axis=batch_first)
define("pixel_shuffle pixel_unshuffle channel_shuffle", batch_axis=_spatial(3), receptive_field=_shuffle, linear="all")
define("im2col", receptive_field=_im2col, linear="all")
define("col2im", batch_axis=_spatial(2), receptive_field=_col2im, linear="all")
define(
    "upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
    "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d upsample_bicubic2d "
    "_upsample_bilinear2d_aa _upsample_bicubic2d_aa _upsample_lanczos2d_aa",
    receptive_field=_resized,
    linear="all",
)
