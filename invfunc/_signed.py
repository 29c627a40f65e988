"""Functions that tell their signature without being looked at."""

from __future__ import annotations

import inspect
from collections.abc import Callable


def signed(forward: Callable) -> Callable:
    """The forward of a custom autograd.Function, whose signature torch asks for in every call."""
    forward.__signature__ = inspect.signature(forward)  # pyright: ignore[reportFunctionMemberAccess]
    return forward
