"""Which operations are affine in their labelled arguments, all at once, with coefficients that have no label."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from invfunc.operations.receptive_fields.rule import Step

_LINEAR = set(
    "clone _to_copy contiguous positive neg add sub rsub copy fill zero cat concat concatenate stack flip roll "
    "constant_pad_nd reflection_pad1d reflection_pad2d reflection_pad3d replication_pad1d replication_pad2d "
    "replication_pad3d pixel_shuffle pixel_unshuffle channel_shuffle repeat im2col col2im slice_scatter select_scatter "
    "tril triu sum mean cumsum avg_pool1d avg_pool2d avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d "
    "adaptive_avg_pool1d upsample_nearest1d upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact2d _upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_trilinear3d "
    "upsample_bicubic2d _upsample_bilinear2d_aa _upsample_bicubic2d_aa lift_fresh_copy".split()
)
_FACTORS: dict[str, tuple[str, ...]] = {
    "mul": ("self", "other"),
    "mm": ("self", "mat2"),
    "bmm": ("self", "mat2"),
    "addmm": ("mat1", "mat2"),
    "baddbmm": ("batch1", "batch2"),
    "mv": ("self", "vec"),
    "dot": ("self", "tensor"),
    "addmv": ("mat", "vec"),
    "linear": ("input", "weight"),
    "convolution": ("input", "weight"),
}
"""Arguments of which one at most may have labels; the operation is linear in the others."""
_ALONE: dict[str, tuple[str, ...]] = {
    "div": ("self",),
    "index": ("self",),
    "index_select": ("self",),
    "gather": ("self",),
    "index_put": ("self", "values"),
    "embedding": ("weight",),
    "masked_fill": ("self", "value"),
    "where": ("self", "other"),
    "lerp": ("self", "end"),
    "native_batch_norm": ("input",),
    "cudnn_batch_norm": ("input",),
}
"""Arguments in which the operation is linear while the others have no labels."""


def affine(step: Step, name: str, written: Iterable[torch.Tensor]) -> bool:
    """Whether what a call gives is affine in its labelled arguments."""
    if not all(x.is_floating_point() or x.is_complex() for x in written):
        return False
    if name in _LINEAR:
        return True
    if name in _FACTORS:
        return _labelled(step, _FACTORS[name]) <= 1
    if name not in _ALONE or ("rounding_mode" in step and step["rounding_mode"]):
        return False
    if "training" in step and step["training"]:
        return False
    return _labelled(step, _ALONE[name]) == len(step.labelled)


def _labelled(step: Step, names: Iterable[str]) -> int:
    """How many of these arguments have labels, also if only in frames that are closed."""
    arguments = [step[name] for name in names if name in step]
    return sum(any(x is other for other in step.labelled) for x in arguments)
