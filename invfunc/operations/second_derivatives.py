"""A mode under which operations whose second derivative is missing or wrong (torch 2.13) run in a form in which it is
right."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import Any

import torch

from invfunc._torch.functorch import checkpointing, forward_mode
from invfunc._torch.opened import opened
from invfunc.errors import ArgumentError
from invfunc.operations.heard import Function, Listener, function_of

_OPENED = {"multi_head_attention_forward", "grad"}
"""What happens in there is to be seen too."""


class TwiceDifferentiable(Listener):
    """A mode under which operations run in a form that can be differentiated twice, also under vmap."""

    used = False
    """Whether an operation was replaced."""

    def __init__(self) -> None:
        super().__init__()
        self._pushed = forward_mode()

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
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
