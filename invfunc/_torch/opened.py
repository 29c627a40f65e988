"""Python-level functions of torch, whose bodies can be seen."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable
from functools import cache
from typing import Any

_CHECKS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


@cache
def opened(func: Callable) -> Callable | None:
    """A Python function of torch whose body runs under the current function mode, instead of being one call to it.

    Such a function first asks whether it is overridden, which is always so under a mode; the copy does not ask.
    """
    if not isinstance(func, types.FunctionType):
        return None
    namespace: dict[str, Any] = dict(func.__globals__)
    if not any(name in func.__code__.co_names and name in namespace for name in _CHECKS):
        return None  # one that asks torch.overrides (nn.init) would ask again, and without end
    namespace.update({name: lambda *args: False for name in _CHECKS if name in namespace})
    copy = types.FunctionType(func.__code__, namespace, func.__name__, func.__defaults__, func.__closure__)
    copy.__kwdefaults__ = func.__kwdefaults__
    return copy


def raised_in(function: Any, error: BaseException) -> bool:
    """Whether it is this very function of torch that raised an error."""
    trace = error.__traceback__
    while trace is not None and trace.tb_next is not None:
        trace = trace.tb_next
    return trace is not None and trace.tb_frame.f_code is inspect.unwrap(function).__code__
