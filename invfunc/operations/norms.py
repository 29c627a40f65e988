"""Normalisations: over trailing dimensions, over channels, or by running statistics."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from invfunc._torch.values import wide
from invfunc.operations.operation import define, not_torchs

# Second derivatives: torch's fused backward passes have a wrong derivative under vmap


_SIGNATURES = {func: inspect.signature(func) for func in (F.batch_norm, F.instance_norm)}


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
