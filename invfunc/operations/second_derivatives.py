"""Operations of torch whose second derivative is missing or wrong (torch 2.13), in a form in which it is right.

So is that of some losses in forward mode only, where jvp, jacfwd or hessian is around us.
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
from invfunc.operations.compositions import embedding_bag, multi_margin_loss


def _attention(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Fused kernels have no second derivative."""
    with sdpa_kernel(SDPBackend.MATH):
        return func(*args, **kwargs)


def _recurrent(func: Callable, *args: Any, **kwargs: Any) -> Any:
    """Nor has cuDNN."""
    with torch.backends.cudnn.flags(enabled=False):
        return func(*args, **kwargs)


def _bag(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Nor has `embedding_bag`; bags of different lengths stay with torch."""
    try:
        return embedding_bag(*args, **kwargs) if func is F.embedding_bag else func(*args, **kwargs)
    except SampleAxisError:
        return func(*args, **kwargs)


def _multi_margin(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Nor has this."""
    return (multi_margin_loss if func is F.multi_margin_loss else func)(*args, **kwargs)


def _weight_norm(func: Callable, v: torch.Tensor, g: torch.Tensor, dim: int = 0) -> torch.Tensor:
    """Has a wrong one."""
    return v * (g / torch.norm_except_dim(v, 2, dim))


def _abs(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """That of a complex number has NaN in its derivatives at 0 where they are 0."""
    x = args[0] if args else kwargs.get("input")
    if not isinstance(x, torch.Tensor) or not x.is_complex() or "out" in kwargs:
        return func(*args, **kwargs)
    zero = x == 0
    return torch.where(zero, 0.0, torch.where(zero, 1.0, x).abs())


def _solve(func: Callable, A: torch.Tensor, B: torch.Tensor, **options: Any) -> torch.Tensor:
    """Is wrong under vmap where B has more dimensions in front than A: they are taken for those of the vmap."""
    lead, own = B.shape[:-2], A.shape[:-2]
    vector = B.ndim == 1 or B.shape == A.shape[:-1]
    wide = A if vector or len(own) >= len(lead) else A.expand(*torch.broadcast_shapes(lead, own), *A.shape[-2:])
    return func(wide, B, **options)


def _cdist(
    func: Callable, x1: torch.Tensor, x2: torch.Tensor, p: float = 2.0, compute_mode: str | None = None
) -> torch.Tensor:
    """Has a wrong derivative under vmap, and no second one."""
    return torch.linalg.vector_norm(x1.unsqueeze(-2) - x2.unsqueeze(-3), p, -1)


# Norms: their passes back, which are fused, have a wrong derivative under vmap


def _layer_norm(
    func: Callable, input: torch.Tensor, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5
) -> torch.Tensor:
    dtype = input.dtype
    if torch.is_autocast_enabled(input.device.type):  # which has its own rule for each device
        with torch.no_grad():
            dtype = func(input.detach(), normalized_shape, weight, bias, eps).dtype
    return _standard(input, list(range(-len(normalized_shape), 0)), eps, weight, bias).to(dtype)


def _batch_norm(func: Callable, input: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """And the one of instances, which takes the same; in eval mode both are right."""
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
    """With mean 0 and variance 1, then scaled and shifted; in float32 at least."""
    x = x.float() if _low(x) else x
    x = x - x.mean(along, keepdim=True)
    x = x * (x.square().mean(along, keepdim=True) + eps).rsqrt()
    x = x if weight is None else x * weight
    return x if bias is None else x + bias


# Losses, in forward mode


def _mse(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The derivative of a mean writes into what cannot be written."""
    given = _bound(func, *args, **kwargs)
    if given is None or given["reduction"] != "mean":
        return func(*args, **kwargs)
    return func(**{**given, "reduction": "none"}).mean()


def _huber(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Has none; the same with another scale has."""
    given = _bound(func, *args, **kwargs)
    if given is None:
        return func(*args, **kwargs)
    delta = given.pop("delta")
    return delta * F.smooth_l1_loss(beta=delta, **given)


def _soft_margin(func: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Has none."""
    given = _bound(func, *args, **kwargs)
    if given is None:
        return func(*args, **kwargs)
    losses = -F.logsigmoid(given["target"] * given["input"])
    return losses if given["reduction"] == "none" else getattr(losses, given["reduction"])()


def _bound(func: Callable, *args: Any, **kwargs: Any) -> dict[str, Any] | None:
    """The arguments of a loss by their names; None with those that are no longer used."""
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
"""Those of torch.nn.functional; torch's own take their arguments in another order."""
_KNOWN = {"multi_head_attention_forward", "grad", *_INSTEAD, *_NORMS}


class TwiceDifferentiable(TorchFunctionMode):
    """What runs in it can be differentiated twice, under vmap too."""

    used = False
    """Whether something had to be done about that."""

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
        """What a pass back runs in: autocast has chosen the precisions already, and a checkpoint runs f again."""
        kind = device.type
        casts = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        with casts, self if self.used else nullcontext(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap, about an operation in f
            yield
