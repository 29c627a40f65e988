"""What an operation takes beside its operands and results while it runs: the buffers of its kernel on a CPU.

oneDNN and MKL copy what they multiply into an order of their own, which can be as large as what is copied; that
shows in no tensor. The rules are upper bounds of what was measured, with sizes of 64 KiB to 100 MiB.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

PRODUCT = 11 * 2**20
"""Bytes that a library keeps for each thread to multiply matrices, at most; it does not give them back. Those for
float32 are taken before the call (`footprint.warmed`)."""
LITTLE, FEW = 3 * 2**18, 6 * 2**20
"""What it keeps at most of products whose operands and result have no more bytes than that."""
BLOCK = 16
"""Channels that oneDNN puts side by side: their number is rounded up to it."""
COLOURS = 3
"""Channels of an image up to which oneDNN reads it as it is."""
SMALL = 20480
"""Numbers of one sample up to which torch multiplies the columns of its patches."""
ROUNDED = 1.1
"""How much more than that was measured at most, in parts that oneDNN aligns."""
KERNEL = 2**17
"""What oneDNN keeps at most, on average, of each convolution of other sizes: code that it writes for them."""

PRODUCTS = {"mm", "bmm", "addmm", "baddbmm", "addbmm", "addmv", "mv", "dot", "addr"}
CONVOLUTIONS = {"convolution", "convolution_backward", "_convolution"}
_TIMES = {"linalg_matrix_exp": 12, "linalg_pinv": 5, "kthvalue": 5}
"""Operations that call others unseen, and how many times what they are given they take beside the result, at most."""
_WORKED = {"_linalg_svd", "linalg_eig", "_linalg_eigh", "_linalg_eigvals", "linalg_qr"}
"""Operations that LAPACK does one matrix after the other, in room for two more of them."""
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
    lift_fresh detach alias threshold_backward var_mean var argmax argmin _unsafe_view
    """.split()
)
"""Operations that write their results entry by entry, beside those that torch tags as pointwise."""


@dataclass(frozen=True)
class Scratch:
    """The bytes that an operation takes beside its operands and results."""

    working: int = 0
    """Until it ends."""
    kept: int = 0
    """From then on: what its library keeps, once for all that are of the same."""
    of: Hashable = None


def scratch(func: Any, given: Sequence[torch.Tensor], made: Sequence[torch.Tensor], args: Any) -> Scratch:
    """What an operation takes beside its operands and results."""
    name = func.overloadpacket.__name__
    if name in PRODUCTS:
        taken = _bytes([*given, *made])
        copied = _bytes(x for x in given if not _multiplied_as_it_is(x))
        kept = min(taken, torch.get_num_threads() * (LITTLE if taken <= FEW else PRODUCT))
        warm = all(x.dtype == torch.float32 for x in given)
        return Scratch(copied + (2 * taken if _narrow(given) else 0), 0 if warm else kept, "products")
    if name in CONVOLUTIONS:
        c = Convolution.of(name, made, args)
        return Scratch(_convolved(c), c.code, c.kernel)
    if not given or not made or _plain(func):
        return Scratch()
    if name in _TIMES:
        return Scratch(_TIMES[name] * _bytes(given))
    one = 2 * _bytes(given[:1]) // max(1, math.prod(given[0].shape[:-2])) if name in _WORKED else 0
    return Scratch(one + _bytes([*given, *made]))


@cache
def is_view(func: Any) -> bool:
    """Whether what an operation returns has the memory of what it is given, and nothing is written."""
    returned = func._schema.returns
    return bool(returned) and all(r.alias_info is not None and not r.alias_info.is_write for r in returned)


@cache
def _plain(func: Any) -> bool:
    name = func.overloadpacket.__name__.removesuffix("_")
    return (
        is_view(func)
        or torch.Tag.pointwise in func.tags
        or name in _IN_PLACE
        or func.overloadpacket.__name__ in _IN_PLACE
    )


def _bytes(tensors: Any) -> int:
    return sum(x.numel() * x.element_size() for x in tensors)


def _narrow(tensors: Sequence[torch.Tensor]) -> bool:
    """Whether numbers are so narrow that they are multiplied in a wider format."""
    return any(x.is_floating_point() and x.element_size() < 4 for x in tensors)


def _multiplied_as_it_is(x: torch.Tensor) -> bool:
    return x.ndim < 2 or 1 in x.stride()[-2:] or 1 in x.shape[-2:]


@dataclass
class Convolution:
    """A convolution: what it is of, and which derivatives of it are wanted."""

    x: torch.Tensor
    weight: torch.Tensor
    out: torch.Tensor
    stride: Sequence[int]
    dilation: Sequence[int]
    transposed: bool
    groups: int
    of_x: bool = False
    of_weight: bool = False

    @classmethod
    def of(cls, name: str, made: Sequence[torch.Tensor], args: Any) -> Convolution:
        if name == "convolution_backward":
            out, x, weight, _, stride, _, dilation, transposed, _, groups, wanted = args
            return cls(x, weight, out, stride, dilation, transposed, groups, wanted[0], wanted[1])
        x, weight, _, stride, _, dilation, transposed, _, groups, *_ = args
        return cls(x, weight, made[0], stride, dilation, transposed, groups)

    @property
    def kernel(self) -> Hashable:
        """What tells it from convolutions for which another kernel is written."""
        shapes = tuple(tuple(t.shape) for t in (self.x, self.weight, self.out))
        how = tuple(self.stride), tuple(self.dilation), self.transposed, self.groups
        return self.x.dtype, shapes, how, self.of_x, self.of_weight

    @property
    def code(self) -> int:
        """The bytes of the code that oneDNN writes for it; it has kernels for narrow numbers, too."""
        wide = KERNEL if self.by_onednn else 2 * KERNEL if _narrow([self.x]) else 0
        return wide * max(1, self.of_x + self.of_weight)

    @property
    def direct(self) -> bool:
        """Whether the kernel reads patches in place."""
        step = max(*self.stride, *self.dilation)
        return step == 1 and self.groups == 1 and not self.transposed and self.x.ndim == 4 and bool(vectors())

    @property
    def by_onednn(self) -> bool:
        """As torch chooses: not what is so small that the product of the columns of its patches is faster."""
        allowed = torch.backends.mkldnn.is_available() and torch.backends.mkldnn.enabled
        n, sizes = self.x.shape[0], self.weight.shape[2:]
        large = n > 1 or self.groups > 1 or min(sizes) > 3 or self.x.numel() > SMALL
        thin = max(*sizes, *self.stride, *self.dilation) == 1 and n < BLOCK and torch.get_num_threads() == 1
        return self.x.dtype == torch.float32 and allowed and large and not thin

    @property
    def multiplications(self) -> int:
        """How many numbers are multiplied, in the convolution or in both of its derivatives."""
        each = self.weight.numel() // max(1, self.weight.shape[0])
        return max(1, self.of_x + self.of_weight) * each * (self.x if self.transposed else self.out).numel()

    @property
    def columns(self) -> int:
        """The bytes of the patches of one sample."""
        wide, narrow = (self.out, self.x) if self.transposed else (self.x, self.out)
        return wide.shape[1] * math.prod((*self.weight.shape[2:], *narrow.shape[2:])) * wide.element_size()


def _convolved(c: Convolution) -> int:
    """Copies of operands and results in blocks of channels and of what is in another order, and columns of patches."""
    x, out, weight = _blocked(c.x), _blocked(c.out), torch.get_num_threads() * _blocked(c.weight)
    reordered = c.x.ndim > 3 and not (c.x.is_contiguous() and c.weight.is_contiguous())  # all, if to channels last
    copied = sum(size for t, size in ((c.x, x), (c.out, out), (c.weight, weight)) if reordered or not t.is_contiguous())
    if not c.by_onednn:
        wide = 0 if c.x.dtype == torch.float32 else (1 + _narrow([c.x])) * (x + out + weight)
        simple = max(c.weight.shape[2:]) == 1 and c.out.shape[2:] == c.x.shape[2:]  # the patches are the image itself
        return copied + wide + (1 if simple else c.x.shape[0]) * c.columns
    if c.direct:
        return copied + int(ROUNDED * (_blocks(c, x, out) + weight))
    copied += max(x, out) if c.of_x or c.transposed or c.groups > 1 else 0
    patches = max(c.dilation) > 1 or c.transposed or c.groups > 1 or c.x.ndim != 4 or not vectors()
    return copied + int(ROUNDED * (x + out + weight)) + (torch.get_num_threads() * c.columns if patches else 0)


def _blocks(c: Convolution, x: int, out: int) -> int:
    """The copies of the image and the result for a kernel that reads patches in place."""
    one = torch.get_num_threads() * max(x, out) // max(1, c.x.shape[0])  # which some kernels pad
    if c.x.shape[1] <= COLOURS and not c.of_x and (not c.of_weight or vectors() == "AVX512"):
        return out + one
    even = c.x.shape[1] % BLOCK == c.out.shape[1] % BLOCK == 0
    return one + (max(x, out) if even and not c.of_weight else x + out)


def vectors() -> str:
    """The vectors for which oneDNN has kernels on this CPU, as torch calls them; without any it copies patches."""
    found = torch.backends.cpu.get_cpu_capability()
    return found if found in ("AVX512", "AVX2") else ""


def _blocked(x: torch.Tensor) -> int:
    return x.numel() // max(1, x.shape[1]) * (-(-x.shape[1] // BLOCK) * BLOCK) * x.element_size()
