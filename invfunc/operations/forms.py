"""Other forms of operations: composed of those that can be followed, or with a right second derivative (torch 2.13)."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, ExitStack, nullcontext
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from invfunc import thresholds
from invfunc._torch.functorch import checkpointing, forward_mode, transforming
from invfunc._torch.opened import opened
from invfunc._torch.values import wide
from invfunc.errors import ArgumentError, SampleAxisError
from invfunc.operations.operation import Function, Listener, Rule, argument, define, function_of, not_torchs


def _unfused(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention with torch's unfused kernel, as the fused ones have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return func(*args, **kwargs)


def masked_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """Scaled dot-product attention whose mask is a parameter, as the relative bias of T5 or Swin."""
    if is_causal or enable_gqa or attn_mask is None:
        raise SampleAxisError(
            "`scaled_dot_product_attention`, a mask of parameters: repeat keys for enable_gqa, add -inf for is_causal."
        )
    products = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    return F.dropout((products + attn_mask).softmax(-1), dropout_p, dropout_p > 0) @ value


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


define("scaled_dot_product_attention", composed=masked_attention, twice=_unfused)
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
    "get:shape get:ndim get:dtype get:device get:is_cuda get:is_cpu get:is_mps get:is_xla get:is_nested get:is_sparse "
    "get:is_mkldnn get:is_quantized get:layout get:requires_grad get:is_leaf get:itemsize get:nbytes get:is_meta "
    "get:grad_fn get:output_nr size dim ndimension numel nelement len stride is_contiguous is_floating_point "
    "is_complex get_device element_size is_same_size is_inference is_signed is_conj is_neg storage_offset result_type",
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


def embedding_bag(
    input: torch.Tensor,
    weight: torch.Tensor,
    offsets: torch.Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: torch.Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> torch.Tensor:
    if offsets is not None or input.ndim != 2 or input.is_nested:
        raise SampleAxisError(
            "`embedding_bag`: bags of different lengths lie one behind the other, where they cannot be followed. Give "
            "[N, L] indices, padded with padding_idx"
        )
    if max_norm is not None or scale_grad_by_freq:
        raise SampleAxisError(
            "`embedding_bag`: max_norm and scale_grad_by_freq depend on which indices the whole batch has. Leave them "
            "out."
        )
    if mode not in ("sum", "mean", "max") or (per_sample_weights is not None and mode != "sum"):
        raise ValueError(f"embedding_bag: mode is {mode!r}; it is one of sum, mean, max, with per_sample_weights sum.")
    return _reduced(input, weight, mode, per_sample_weights, padding_idx, None)


def _reduced(
    input: torch.Tensor,
    weight: torch.Tensor,
    mode: str,
    scales: torch.Tensor | None,
    padding_idx: int | None,
    there: torch.Tensor | None,
) -> torch.Tensor:
    """Bags of indices `[N, L]`, without those that are padding, or not `there`."""
    entries = F.embedding(input, weight, padding_idx)
    if scales is not None:
        entries = entries * scales.unsqueeze(-1)
    if padding_idx is not None:
        own = input != padding_idx % len(weight)
        there = own if there is None else own & there
    if there is None:
        return entries.max(1).values if mode == "max" else entries.mean(1) if mode == "mean" else entries.sum(1)
    there = there.unsqueeze(-1)
    if mode == "max":
        largest = entries.masked_fill(~there, -math.inf).max(1).values
        return largest.masked_fill(~there.any(1), 0)
    total = entries.masked_fill(~there, 0).sum(1)
    return total if mode == "sum" else total / there.sum(1).clamp(min=1)


def _bag(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`embedding_bag` composed of other operations, as torch's has no second derivative; bags of different lengths are
    padded, and what counts in the whole batch is left to torch."""
    given = partial(argument, func, args, kwargs)
    input, offsets = given("input"), given("offsets")
    misread = input.is_nested or (offsets is None) == (input.ndim == 1)
    if misread or given("max_norm") is not None or given("scale_grad_by_freq"):
        return func(*args, **kwargs)
    if offsets is None:
        return embedding_bag(*args, **kwargs)
    starts = offsets[:-1] if given("include_last_offset") else offsets
    lengths = torch.cat([starts[1:], starts.new_full((1,), len(input))]) - starts
    step = torch.arange(int(lengths.max()), device=input.device)
    at, scales = (starts[:, None] + step).clamp(max=len(input) - 1), given("per_sample_weights")
    scales = scales if scales is None else scales[at]
    there = step < lengths[:, None]
    return _reduced(input[at], given("weight"), given("mode", "mean"), scales, given("padding_idx"), there)


define("embedding", writes_if=("max_norm", ("weight",)))
define("embedding_bag", composed=embedding_bag, twice=_bag, only_nn=True, writes_if=("max_norm", ("weight",)))


def reduction(call: Any) -> str:
    """The reduction of a loss, also if it is given by the deprecated flags."""
    average, reduced = call.kwargs.get("size_average"), call.kwargs.get("reduce")
    if average is not None or reduced is not None:
        return "none" if reduced is False else "sum" if average is False else "mean"
    said = [a for a in call.args if isinstance(a, str)]
    return said[0] if said else call.kwargs.get("reduction", "mean")


# Losses in forward mode: the backward pass of torch's has no derivative there, or writes zeros that cannot be written

_IN_FORWARD_MODE = (F.mse_loss, F.huber_loss, F.soft_margin_loss)
_SIGNATURES = {func: inspect.signature(func) for func in (*_IN_FORWARD_MODE, F.batch_norm, F.instance_norm)}
_OLD = ("size_average", "reduce", "weight")


def _reduced_apart(losses: Rule) -> Rule:
    """A form of a loss in forward mode, given the losses of its entries."""

    def form(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
        if func not in _IN_FORWARD_MODE or not forward_mode():
            return func(*args, **kwargs)
        given = _SIGNATURES[func].bind(*args, **kwargs)
        given.apply_defaults()
        options = given.arguments
        if any([options.pop(name, None) is not None for name in _OLD]):
            return func(*args, **kwargs)
        how = options.pop("reduction")
        found = losses(**options)
        return found if how == "none" else getattr(found, how)()

    return form


def _huber(input: torch.Tensor, target: torch.Tensor, delta: float) -> torch.Tensor:
    return delta * F.smooth_l1_loss(input, target, reduction="none", beta=delta)


define("mse_loss", twice=_reduced_apart(partial(F.mse_loss, reduction="none")), predictive="normal")
define("huber_loss", twice=_reduced_apart(_huber), cornered=True)
define("soft_margin_loss", twice=_reduced_apart(lambda input, target: -F.logsigmoid(target * input)))
define("smooth_l1_loss", cornered=True)
define("binary_cross_entropy_with_logits", predictive="bernoulli")


# Second derivatives: torch's fused backward passes have a wrong derivative under vmap


def _layer_norm(
    func: Callable, input: torch.Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> torch.Tensor:
    dtype = input.dtype
    if torch.is_autocast_enabled(input.device.type):  # which has its own rule for each device
        with torch.no_grad():
            dtype = func(input.detach(), normalized_shape, weight, bias, eps).dtype
    return _standard(input, list(range(-len(normalized_shape), 0)), eps, weight, bias).to(dtype)


def _group_norm_twice(
    func: Callable,
    input: torch.Tensor,
    num_groups: int,
    weight: Any = None,
    bias: Any = None,
    *args: Any,
    **kwargs: Any,
) -> torch.Tensor:
    eps, shape = kwargs.get("eps", args[0] if args else 1e-5), [-1, *[1] * (input.ndim - 2)]
    with torch.no_grad():  # checks, and autocast has its own rule for each device
        dtype = func(input.detach(), num_groups, weight, bias, *args, **kwargs).dtype
    found = _standard(input.reshape(len(input), num_groups, -1), [2], eps, None, None).reshape(input.shape)
    found = found if weight is None else found * weight.reshape(shape)
    return (found if bias is None else found + bias.reshape(shape)).to(dtype)


def _batch_norm(func: Callable, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`batch_norm` or `instance_norm` written out where it normalises by the statistics of its input, and where
    torch's first derivative is wrong, too."""
    instances = func is F.instance_norm
    given = _SIGNATURES[func].bind(input, *args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    running = not options["use_input_stats" if instances else "training"]
    if running and not _misread(func, input):
        return func(input, *args, **kwargs)
    with torch.no_grad():  # checks, and writes the running statistics
        dtype = func(input.detach(), *args, **kwargs).dtype
    shape = [-1, *[1] * (input.ndim - 2)]
    names = ("weight", "bias", "running_mean", "running_var")
    weight, bias, *moments = (x if x is None else x.reshape(shape) for x in map(options.get, names))
    along = [d for d in range(input.ndim) if d != 1 and not (instances and d == 0)]
    return _standard(input, along, options["eps"], weight, bias, moments if running else None).to(dtype)


def _misread(func: Callable, input: torch.Tensor) -> bool:
    """Tells whether torch's first derivative is wrong where the input and what is sent back lie in memory in different
    orders: where there is one sample, or a size of one beside the channels (torch 2.13)."""
    return func is F.instance_norm or 1 in (input.shape[0], *input.shape[2:])


def _standard(
    x: torch.Tensor, along: list[int], eps: float, weight: Any, bias: Any, moments: Any = None
) -> torch.Tensor:
    """x brought to mean 0 and variance 1, its own or those given, then scaled and shifted; computed in float32 at
    least."""
    x = wide(x)
    mean, variance = moments or (x.mean(along, keepdim=True), None)
    x = x - mean
    x = x * ((x.square().mean(along, keepdim=True) if variance is None else variance) + eps).rsqrt()
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


def weight_norm(v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Weight normalisation written out, as the second derivative of torch's is wrong (torch 2.13)."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


_RUNNING = ("running_mean", "running_var")
define("layer_norm", twice=_layer_norm, only_nn=True)
define("batch_norm", twice=_batch_norm, only_nn=True, writes_if=("training", ("running_mean", "running_var")))
define("instance_norm", twice=_batch_norm, only_nn=True, writes_if=("use_input_stats", _RUNNING))
define("group_norm", twice=_group_norm_twice)
define("native_batch_norm", writes_if=("training", ("running_mean", "running_var")))
define(
    "cudnn_batch_norm miopen_batch_norm _native_batch_norm_legit",
    writes_if=("training", ("running_mean", "running_var")),
)
define("_weight_norm", composed=weight_norm, twice=not_torchs(weight_norm))


_OPENED = {"multi_head_attention_forward", "grad"}
"""Functions whose operations are to be seen, too."""


class TwiceDifferentiable(Listener):
    """A mode under which operations run in a form that can be differentiated twice, also under vmap."""

    used = False
    """True if an operation was replaced."""
    scope: Any = None
    """The scope of a product in which `J^T u` is differentiated in u, so that large linear layers may run as one."""

    def __init__(self) -> None:
        super().__init__()
        self._pushed = forward_mode()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if self.scope is not None and func is F.linear and args[2:] in ((), (None,)) and _large(*args[:2]):
            return WideLinear.apply(*args[:2], self.scope)
        function = function_of(func)
        if function.forms.twice is None and function.name not in _OPENED and not self._pushed:  # most of them
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs)

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        if self._pushed and checkpointing():
            raise ArgumentError(
                f"f computes `{function.name}` under hooks on saved tensors (torch.utils.checkpoint), which lose the "
                "tangents of a torch.func.jvp around it. Call the part without a checkpoint there, or write "
                "`invertible_checkpoint(part, None)`, a plain checkpoint that works in torch.func."
            )
        if function.name in _OPENED:
            with self:
                return (opened(function.func) or function.func)(*args, **kwargs)
        twice = function.forms.twice
        if twice is None:
            return function.func(*args, **kwargs)
        self.used = True
        return twice(function.func, *args, **kwargs)

    def back(self, device: torch.device) -> AbstractContextManager:
        """The context of a backward pass: autocast off, as the forward pass has chosen the precisions, and this mode on
        if it was used, as a checkpoint may run f again."""
        kind = device.type
        if not self.used and not torch.is_autocast_enabled(kind):
            return nullcontext()
        stack = ExitStack()
        stack.enter_context(torch.autocast(kind, enabled=False))
        if self.used:
            stack.enter_context(self)
        return stack


def _large(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Tells whether the outputs of a linear layer are so many that they are not to be there several times."""
    if w.ndim < 2 or x.numel() // max(1, x.shape[-1]) * len(w) < thresholds.LOGITS:
        return False
    return not (transforming() or torch.is_autocast_enabled(x.device.type))


def _along(dx: Any, dw: Any, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """`dx w^T + x dw^T`, either of which may be missing, in one tensor where nobody differentiates it."""
    if dx is None:
        return F.linear(x, dw)
    if dw is None:
        return F.linear(dx, w)
    found = F.linear(dx, w)
    if torch.is_grad_enabled() and any([t.requires_grad for t in (dx, dw, x, w)]):
        return found + F.linear(x, dw)
    found.view(-1, len(w)).addmm_(x.reshape(-1, x.shape[-1]), dw.T)
    return found


class WideLinear(torch.autograd.Function):
    """A linear layer without a bias, whose tangents are one tensor, in forward mode and as derivatives of `J^T u`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor, scope: Any) -> torch.Tensor:
        return F.linear(x, w)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs[:2])
        ctx.save_for_forward(*inputs[:2])
        ctx.scope = inputs[2]

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> Any:
        read = ctx.saved_tensors if ctx.scope.create_graph else [t.detach() for t in ctx.saved_tensors]
        return *_Transposed.apply(*slopes, *read), None

    @staticmethod
    def jvp(ctx: Any, *tangents: torch.Tensor) -> torch.Tensor:
        return _along(*tangents[:2], *ctx.saved_tensors)


class _Transposed(torch.autograd.Function):
    """The cotangents `(g w, g^T x)` of a linear layer."""

    generate_vmap_rule = True

    @staticmethod
    def forward(g: torch.Tensor, x: torch.Tensor, w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        rows, flat = x.reshape(-1, x.shape[-1]), g.reshape(-1, len(w))
        return (flat @ w).view(x.shape), flat.T @ rows

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple, output: Any) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Any, *slopes: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        g, x, w = ctx.saved_tensors
        (dx, dw), (_, of_x, of_w) = slopes, ctx.needs_input_grad
        found = g @ dw if of_x else None, g.reshape(-1, len(w)).T @ dx.reshape(-1, x.shape[-1]) if of_w else None
        return _along(dx, dw, x, w), *found
