"""What an operation takes beside its operands and results while it runs: the buffers of its kernel on a CPU.

oneDNN and MKL copy what they multiply into an order of their own, which can be as large as what is copied; that
shows in no tensor. The rules are upper bounds of what was measured, with sizes of 64 KiB to 100 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

PRODUCT = 8 * 2**20
"""Bytes that a library keeps for each thread to multiply matrices, at most; it does not give them back."""
BLOCK = 16
"""Channels that oneDNN puts side by side: their number is rounded up to it."""
ROUNDED = 1.1
"""How much more than that was measured at most, in parts that oneDNN aligns."""

_PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "addr"}
_IN_PLACE = set(
    """
    cat stack copy clone sum mean amax amin any all eq gather scatter scatter_add index_select select_backward
    slice_backward slice_scatter select_scatter constant_pad_nd im2col col2im fill zero flip roll tril triu arange
    scalar_tensor eye full ones zeros empty empty_strided new_empty new_zeros new_ones rand randn full_like
    zeros_like ones_like empty_like new_empty_strided new_full one_hot diag_embed diagonal_copy _softmax
    _log_softmax _softmax_backward_data _log_softmax_backward_data nll_loss_forward nll_loss_backward
    nll_loss2d_forward nll_loss2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward avg_pool2d
    avg_pool2d_backward _adaptive_avg_pool2d _adaptive_avg_pool2d_backward embedding native_layer_norm
    native_group_norm native_batch_norm upsample_nearest2d upsample_nearest2d_backward _to_copy lift_fresh_copy
    lift_fresh detach alias threshold_backward var_mean var argmax argmin
    """.split()
)
"""Operations that write their results entry by entry, beside those that torch tags as pointwise."""


def scratch(func: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], args: Any) -> tuple[int, int]:
    """The bytes that a call takes until it ends, and those that its library keeps from then on."""
    name = func.overloadpacket.__name__
    if name in _PRODUCTS:
        taken, several = _bytes([*given, *made]), PRODUCT * torch.get_num_threads()
        copied = _bytes(x for x in given if not _multiplied_as_it_is(x))
        return copied + (2 * taken if _narrow(given) else 0), min(taken, several)
    if name in ("convolution", "convolution_backward", "_convolution"):
        return _convolved(name, given, made, args), 0
    return (0 if not given or not made or _plain(func) else _bytes([*given, *made])), 0


@cache
def _plain(func: Any) -> bool:
    name = func.overloadpacket.__name__.removesuffix("_")
    returned = func._schema.returns
    view = bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)
    return view or torch.Tag.pointwise in func.tags or name in _IN_PLACE or func.overloadpacket.__name__ in _IN_PLACE


def _bytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _narrow(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether numbers are so narrow that they are multiplied in a wider format."""
    return any(x.is_floating_point() and x.element_size() < 4 for x in tensors)


def _multiplied_as_it_is(x: torch.Tensor) -> bool:
    return x.ndim < 2 or 1 in x.stride()[-2:] or 1 in x.shape[-2:]


def _convolved(name: str, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], args: Any) -> int:
    """The operands and results in blocks of channels, copies of those that are in another order, and the columns of
    patches: those of all samples, or of one, if they do not fit oneDNN."""
    x, weight = (args[1], args[2]) if name == "convolution_backward" else (args[0], args[1])
    out = args[0] if name == "convolution_backward" else made[0]
    images = [t for t in [*given, *made] if t.ndim > 2]
    blocked = sum(_blocked(t) for t in images)
    copied = 0 if all(t.is_contiguous() for t in given) else blocked
    positions = max(math.prod(x.shape[2:]), math.prod(out.shape[2:]))
    channels = max(x.shape[1], out.shape[1])
    columns = channels * math.prod(weight.shape[2:]) * positions * x.element_size()
    fits = x.dtype == torch.float32 and torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
    if not fits:
        columns *= x.shape[0]
        blocked *= 2 if _narrow(given) else 1
    else:
        columns *= 1 if x.shape[0] == 1 else 0
    return int(ROUNDED * blocked) + copied + columns


def _blocked(x: torch.Tensor) -> int:
    return x.numel() // max(1, x.shape[1]) * (-(-x.shape[1] // BLOCK) * BLOCK) * x.element_size()
