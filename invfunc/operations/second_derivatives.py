"""A mode under which operations whose second derivative is missing or wrong (torch 2.13) run in a form in which it is
right."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch
import torch.nn.functional as F

from invfunc import thresholds
from invfunc._torch.functorch import checkpointing, forward_mode, transforming
from invfunc._torch.opened import opened
from invfunc.errors import ArgumentError
from invfunc.operations.heard import Function, Listener, function_of

_OPENED = {"multi_head_attention_forward", "grad"}
"""What happens in there is to be seen too."""


class TwiceDifferentiable(Listener):
    """A mode under which operations run in a form that can be differentiated twice, also under vmap."""

    used = False
    """Whether an operation was replaced."""
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
