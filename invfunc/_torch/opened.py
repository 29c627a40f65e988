"""Python-level functions of torch as they were written: opened, uncompiled, with weights that are computed anew."""

from __future__ import annotations

import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

from invfunc._torch.doors import door, holder

_compiler = door("torch._dynamo.eval_frame")
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


class Uncompiled:
    """A context in which what `torch.compile` made runs as it was written, in all threads; others go on meanwhile."""

    _lock = threading.Lock()
    _number = 0
    _before: Any = None

    def __enter__(self) -> None:
        compiled = "torch._dynamo.eval_frame" in sys.modules  # without it nothing has been
        self._dynamo = dynamo = holder("torch._dynamo.eval_frame", "_stance") if compiled else None
        if dynamo is not None:
            with self._lock:
                if Uncompiled._number == 0:
                    Uncompiled._before, dynamo._stance = dynamo._stance, _compiler.DynamoStance("force_eager")
                Uncompiled._number += 1

    def __exit__(self, *error: Any) -> None:
        if self._dynamo is not None:
            with self._lock:
                Uncompiled._number -= 1
                if Uncompiled._number == 0:
                    self._dynamo._stance, Uncompiled._before = Uncompiled._before, None


def parametrized_anew() -> AbstractContextManager:
    """A context in which weights are computed that `torch.nn.utils.parametrize.cached()` kept before."""
    state = holder("torch.nn.utils.parametrize", "_cache_enabled")
    return _parametrized_anew(state) if state._cache_enabled else nullcontext()


@contextmanager
def _parametrized_anew(state: Any) -> Iterator[None]:
    before, state._cache = state._cache, {}
    try:
        yield
    finally:
        state._cache = before
