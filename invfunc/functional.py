"""From an `nn.Module` to a pure function and its parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from invfunc.errors import ArgumentTypeError


def functional(model: nn.Module) -> tuple[Callable[..., Any], dict[str, torch.Tensor]]:
    """Make a pure function of a module: `f(params, *inputs, **kwargs) == model(*inputs, **kwargs)`.

    Args:
        model: any module. It is never changed: `f` computes with `params` in place of its parameters.

    Returns:
        `(f, params)`. `params` maps the name of each parameter that requires grad to a detached alias of it; a tied
        parameter stands there once. Buffers and frozen parameters are closed over; train or eval mode is the
        module's. What a module in train mode writes into its buffers (running statistics) is dropped.

    Raises:
        ArgumentTypeError: `model` is not an `nn.Module`.

    Example:
        >>> import torch, invfunc
        >>> f, params = invfunc.functional(torch.nn.Linear(3, 2))
        >>> sorted(params), f(params, torch.zeros(5, 3)).shape
        (['bias', 'weight'], torch.Size([5, 2]))

    Composes with: everything that takes a function of parameters, such as `torch.func.grad(f)`.

    Cost: none beyond the call of the module.

    Source: `torch.func.functional_call`.
    """
    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(f"functional(model): model is a {type(model).__name__}, but an nn.Module is needed.")
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    first = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    # each place once: functional_call does not put back a module that it meets under two names (torch 2.13)
    places = {
        f"{prefix}.{name}" if prefix else name: first[id(p)]
        for prefix, module in model.named_modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in first
    }

    def f(params: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        given = {place: params[name] for place, name in places.items() if name in params}
        state = {**_written_buffers(model), **params, **given}  # params may name buffers too
        return torch.func.functional_call(model, state, args, kwargs, tie_weights=False)

    f.__name__ = f.__qualname__ = type(model).__name__
    return f, params


def _written_buffers(model: nn.Module) -> dict[str, torch.Tensor]:
    """Copies of the buffers that a forward pass may write: those of modules in train mode."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer.clone()
        for prefix, module in model.named_modules()
        if module.training
        for name, buffer in module.named_buffers(recurse=False)
    }
