"""Methods of modules, as what torch and inspect know."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from torch import nn


class Calls(nn.Module):
    """A module whose forward is a method of another."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, self.method)(*args, **kwargs)


def signature_of(forward: Callable) -> inspect.Signature:
    """That of forward, with the parameters of the module in front."""
    try:
        own = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        own = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    name = next(n for n in ("params", "module_params", "_params") if n not in {p.name for p in own})
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY), *own])
