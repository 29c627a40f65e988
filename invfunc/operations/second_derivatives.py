"""Operations of torch whose second derivative is missing or wrong (torch 2.13), in a form in which it is right.

For some losses it is missing or wrong in forward mode only: they are replaced where jvp, jacfwd or hessian is active.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from invfunc._functorch import forward_mode, opened
from invfunc.errors import SampleAxisError
from invfunc.operations.compositions import cdist, embedding_bag, multi_margin_loss


def _attention(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Attention with torch's unfused kernel, as the fused ones have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return func(*args, **kwargs)


def _recurrent(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """A recurrent layer without cuDNN, whose kernels have no second derivative."""
    with torch.backends.cudnn.flags(enabled=False):
        return func(*args, **kwargs)


def _bag(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`embedding_bag` composed of other operations, as torch's has no second derivative; bags of different lengths are
    left to torch."""
    try:
        return embedding_bag(*args, **kwargs) if func is F.embedding_bag else func(*args, **kwargs)
    except SampleAxisError:
        return func(*args, **kwargs)


def _multi_margin(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`multi_margin_loss` composed of other operations, as torch's has no second derivative."""
    return (multi_margin_loss if func is F.multi_margin_loss else func)(*args, **kwargs)


def _weight_norm(func: Callable, v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Weight normalisation written out, as the second derivative of torch's is wrong."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _abs(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The absolute value of a complex number, with derivatives of 0 at 0, where torch's become NaN."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, torch.Tensor) or not x.is_complex() or "out" in kwargs:
        return func(*args, **kwargs)
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).abs())


def _solve(func: Callable, A: torch.Tensor, B: torch.Tensor, **options: Any) -> torch.Tensor:
    """`linalg.solve` with A expanded to the leading dimensions of B: under vmap torch takes those that A lacks for the
    dimension of the vmap, and its result is wrong."""
    lead, own = B.shape[:-2], A.shape[:-2]
    vector = B.ndim == 1 or B.shape == A.shape[:-1]
    wide = A if vector or len(own) >= len(lead) else A.expand(*torch.broadcast_shapes(lead, own), *A.shape[-2:])
    return func(wide, B, **options)


def _cdist(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    return cdist(*args, **kwargs)


# Norms: torch's fused backward passes have a wrong derivative under vmap.


def _layer_norm(
    func: Callable, input: torch.Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> torch.Tensor:
    dtype = input.dtype
    if torch.is_autocast_enabled(input.device.type):  # which has its own rule for each device
        with torch.no_grad():
            dtype = func(input.detach(), normalized_shape, weight, bias, eps).dtype
    return _standard(input, list(range(-len(normalized_shape), 0)), eps, weight, bias).to(dtype)


def _batch_norm(func: Callable, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`batch_norm` or `instance_norm` written out where it normalises by the statistics of its input; with running
    statistics torch's is right."""
    instances = func is F.instance_norm
    given = _SIGNATURES[func].bind(input, *args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    if not options["use_input_stats" if instances else "training"]:
        return func(input, *args, **kwargs)
    with torch.no_grad():  # checks, and writes the running statistics
        dtype = func(input.detach(), *args, **kwargs).dtype
    shape = [-1, *[1] * (input.ndim - 2)]
    weight, bias = (x if x is None else x.reshape(shape) for x in (options["weight"], options["bias"]))
    along = [d for d in range(input.ndim) if d != 1 and not (instances and d == 0)]
    return _standard(input, along, options["eps"], weight, bias).to(dtype)


_SIGNATURES = {
    func: inspect.signature(func)
    for func in (F.batch_norm, F.instance_norm, F.mse_loss, F.huber_loss, F.soft_margin_loss)
}


def _standard(x: torch.Tensor, along: list[int], eps: float, weight: Any, bias: Any) -> torch.Tensor:
    """x brought to mean 0 and variance 1, then scaled and shifted; computed in float32 at least."""
    x = x.float() if _low(x) else x
    x = x - x.mean(along, keepdim=True)
    x = x * (x.square().mean(along, keepdim=True) + eps).rsqrt()
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


# Losses in forward mode


def _mse(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`mse_loss` with its mean taken separately: in forward mode, the second derivative of torch's writes into a tensor
    of zeros that cannot be written."""
    given = _bound(func, *args, **kwargs)
    if given is None or given["reduction"] != "mean":
        return func(*args, **kwargs)
    return func(**{**given, "reduction": "none"}).mean()


def _huber(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`huber_loss` as a scaled `smooth_l1_loss`, as the backward pass of torch's has no derivative in forward mode."""
    given = _bound(func, *args, **kwargs)
    if given is None:
        return func(*args, **kwargs)
    delta = given.pop("delta")
    return delta * F.smooth_l1_loss(beta=delta, **given)


def _soft_margin(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """`soft_margin_loss` written out, as the backward pass of torch's has no derivative in forward mode."""
    given = _bound(func, *args, **kwargs)
    if given is None:
        return func(*args, **kwargs)
    losses = -F.logsigmoid(given["target"] * given["input"])
    return losses if given["reduction"] == "none" else getattr(losses, given["reduction"])()


def _bound(func: Callable, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
    """The arguments of a loss by their names; None outside of forward mode, or if a weight or an old flag is given."""
    if func not in _SIGNATURES or not forward_mode():
        return None
    given = _SIGNATURES[func].bind(*args, **kwargs)
    given.apply_defaults()
    old = ("size_average", "reduce", "weight")
    rest = {name: value for name, value in given.arguments.items() if name not in old}
    return rest if all(given.arguments.get(name) is None for name in old) else None


def _low(x: torch.Tensor) -> bool:
    return x.dtype in (torch.float16, torch.bfloat16)


_INSTEAD = {
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(("lstm", "gru", "rnn_tanh", "rnn_relu"), _recurrent),
    "embedding_bag": _bag,
    "_weight_norm": _weight_norm,
    **dict.fromkeys(("abs", "absolute", "__abs__"), _abs),
    "multi_margin_loss": _multi_margin,
    "linalg_solve": _solve,
    "cdist": _cdist,
    "mse_loss": _mse,
    "huber_loss": _huber,
    "soft_margin_loss": _soft_margin,
}
_NORMS = {"layer_norm": _layer_norm, "batch_norm": _batch_norm, "instance_norm": _batch_norm}
"""The norms of torch.nn.functional only: torch's own of the same name take their arguments in another order."""
_KNOWN = {"multi_head_attention_forward", "grad", *_INSTEAD, *_NORMS}


class TwiceDifferentiable(TorchFunctionMode):
    """A mode under which operations run in a form that can be differentiated twice, also under vmap."""

    used = False
    """Whether an operation was replaced."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name not in _KNOWN:
            return func(*args, **kwargs)
        if name in ("multi_head_attention_forward", "grad"):  # what happens in there is to be seen too
            with self:
                return (opened(func) or func)(*args, **kwargs)
        instead = _INSTEAD.get(name) or (_NORMS.get(name) if func is getattr(F, name, None) else None)
        if instead is None:
            return func(*args, **kwargs)
        self.used = True
        return instead(func, *args, **kwargs)

    @contextmanager
    def back(self, device: torch.device) -> Iterator[None]:
        """The context of a backward pass: autocast off, as the forward pass has chosen the precisions, and this mode on
        if it was used, as a checkpoint may run f again."""
        kind = device.type
        casts = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        with casts, self if self.used else nullcontext(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap, about an operation in f
            yield
