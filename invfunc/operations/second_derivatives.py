"""A mode under which operations whose second derivative is missing or wrong (torch 2.13) run in a form in which it is
right."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch

from invfunc._torch.functorch import checkpointing, forward_mode
from invfunc._torch.opened import opened
from invfunc.errors import ArgumentError
from invfunc.operations.heard import Function, Listener

_OPENED = {"multi_head_attention_forward", "grad"}
"""What happens in there is to be seen too."""


class TwiceDifferentiable(Listener):
    """A mode under which operations run in a form that can be differentiated twice, also under vmap."""

    used = False
    """Whether an operation was replaced."""

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        if checkpointing() and forward_mode():
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

    @contextmanager
    def back(self, device: torch.device) -> Iterator[None]:
        """The context of a backward pass: autocast off, as the forward pass has chosen the precisions, and this mode on
        if it was used, as a checkpoint may run f again."""
        kind = device.type
        casts = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        with casts, self if self.used else nullcontext(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap, about an operation in f
            yield
