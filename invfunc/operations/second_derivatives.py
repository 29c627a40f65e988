"""A mode under which operations whose second derivative is missing or wrong (torch 2.13) run in a form in which it is
right."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from invfunc._functorch import opened
from invfunc.operations.operation import known

_OPENED = {"multi_head_attention_forward", "grad"}
"""What happens in there is to be seen too."""


class TwiceDifferentiable(TorchFunctionMode):
    """A mode under which operations run in a form that can be differentiated twice, also under vmap."""

    used = False
    """Whether an operation was replaced."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs, name = kwargs or {}, getattr(func, "__name__", "")
        if name in _OPENED:
            with self:
                return (opened(func) or func)(*args, **kwargs)
        entry = known(name)
        if entry.twice is None or (entry.only_nn and getattr(func, "__module__", None) != "torch.nn.functional"):
            return func(*args, **kwargs)
        self.used = True
        return entry.twice(func, *args, **kwargs)

    @contextmanager
    def back(self, device: torch.device) -> Iterator[None]:
        """The context of a backward pass: autocast off, as the forward pass has chosen the precisions, and this mode on
        if it was used, as a checkpoint may run f again."""
        kind = device.type
        casts = torch.autocast(kind, enabled=False) if torch.is_autocast_enabled(kind) else nullcontext()
        with casts, self if self.used else nullcontext(), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # of vmap, about an operation in f
            yield
