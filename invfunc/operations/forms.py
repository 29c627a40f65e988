"""Forms of operations that are composed of others, or that have a right second derivative; and what is only asked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from invfunc.errors import SampleAxisError
from invfunc.operations.operation import define, not_torchs


def _unfused(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention with torch's unfused kernel, as the fused ones have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return func(*args, **kwargs)


def _prelu(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`prelu` written out, as the derivative of torch's is wrong where torch.vmap batches both arguments."""
    if weight.numel() > 1 and input.ndim > 1:
        weight = weight.reshape(-1, *[1] * (input.ndim - 2))
    return torch.where(input > 0, input, weight * input)


def _bilinear(
    input1: torch.Tensor, input2: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None
) -> torch.Tensor:
    """`bilinear` as a linear layer of the outer product of its inputs."""
    outer = (input1.unsqueeze(-1) * input2.unsqueeze(-2)).flatten(-2)
    return torch.nn.functional.linear(outer, weight.flatten(1), bias)


def _abs(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The absolute value of a complex number, with derivatives of 0 at 0, where torch's become NaN."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, torch.Tensor) or not x.is_complex() or "out" in kwargs:
        return func(*args, **kwargs)
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).abs())


def cdist(x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str | None = None) -> torch.Tensor:
    """`cdist` written out, as torch's has a wrong derivative under vmap, and no second derivative."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


def _solve(func: Callable, A: torch.Tensor, B: torch.Tensor, **options: Any) -> torch.Tensor:
    """`linalg.solve` with A expanded to the leading dimensions of B: under vmap torch takes those that A lacks for the
    dimension of the vmap, and its result is wrong."""
    lead, own = B.shape[:-2], A.shape[:-2]
    vector = B.ndim == 1 or B.shape == A.shape[:-1]
    wide = A if vector or len(own) >= len(lead) else A.expand(*torch.broadcast_shapes(lead, own), *A.shape[-2:])
    return func(wide, B, **options)


def grouped_mm(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """The rows up to each of the ends `offs`, as the tokens of each expert are, times a matrix of their own."""
    if mat_a.ndim != 2 or mat_b.ndim != 3 or offs is None or bias is not None:
        raise SampleAxisError("`grouped_mm`: only groups of rows are followed, without a bias.")
    ends = offs.tolist()
    groups = [mat_a[start:end] @ own for start, end, own in zip([0, *ends], ends, mat_b.unbind(), strict=False)]
    rest = mat_a.new_zeros(len(mat_a) - ends[-1], mat_b.shape[-1])  # which torch leaves as they are
    found = torch.cat([*groups, rest] if len(rest) else groups)
    return found if out_dtype is None else found.to(out_dtype)


def hardsigmoid(input: torch.Tensor, inplace: bool = False) -> torch.Tensor:
    """`hardsigmoid` written out, as torch's has no second derivative."""
    found = F.relu6(input + 3) / 6
    return input.copy_(found) if inplace else found


def msort(input: torch.Tensor) -> torch.Tensor:
    """`msort` as the values of `sort`, which has the indices too."""
    return input.sort(0)[0]


def pad_sequence(
    sequences: Any, batch_first: bool = False, padding_value: float = 0.0, padding_side: str = "right"
) -> torch.Tensor:
    """`pad_sequence` as what pads each of the sequences to the length of the longest, and stacks them."""
    longest, side, dim = max(len(x) for x in sequences), padding_side == "right", 0 if batch_first else 1
    missing = [[0, 0] * (x.ndim - 1) + [0, longest - len(x)][:: 1 if side else -1] for x in sequences]
    return torch.stack(
        [F.pad(x, pad, value=padding_value) if any(pad) else x for x, pad in zip(sequences, missing, strict=True)], dim
    )


define("scaled_dot_product_attention", twice=_unfused)
define("abs absolute", twice=_abs)
define("__abs__", twice=_abs)
define("detach", keeps=True)
define("to type_as", reads="first")
define("log_sigmoid", predictive="bernoulli")
define("prelu", composed=_prelu)
define("bilinear", composed=_bilinear)
define("requires_grad", keeps=True)
define("linalg_solve", twice=_solve)
define("cdist", composed=cdist, twice=not_torchs(cdist))
define("_grouped_mm", composed=grouped_mm)
define("hardsigmoid", twice=not_torchs(hardsigmoid), only_nn=True)
define("msort", composed=msort)
define("expand_as", reads="first")
define("view_as reshape_as", reads="first")
define("pad_sequence", composed=pad_sequence)
define(
    "get:shape get:ndim get:dtype get:device get:is_cuda get:is_cpu get:is_nested get:is_sparse get:is_mkldnn "
    "get:is_quantized get:layout get:requires_grad get:is_leaf size dim ndimension numel nelement len stride "
    "is_contiguous is_floating_point is_complex get_device element_size is_same_size is_inference is_signed is_conj "
    "is_neg storage_offset result_type get:itemsize get:nbytes get:is_meta get:grad_fn",
    asks="form",
)
define("get:_version get:_cdata get:_base data_ptr untyped_storage", asks="memory")
define("grad backward", differentiates=True)
define("share_memory", keeps=True)
define(
    "empty_like zeros_like ones_like full_like rand_like randn_like randint_like new_empty new_empty_strided "
    "new_zeros new_ones new_full",
    reads="none",
)
