"""Calls of torch functions as a function mode sees them: what they ask, read, write and produce."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType


_IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()}
_IN_PLACE.add("__setitem__")


def spelled(name: str | None) -> str:
    """The name of a call in an error."""
    if not name or name.startswith(("get:_", "reduce")):
        return "a copy (by copy, pickle or torch.save)"  # which read such attributes
    return f"`.{name[4:]}`" if name.startswith("get:") else f"`{name}`"


@lru_cache(maxsize=4096)
def in_place(func: Callable) -> bool:
    """Whether a function works in place on its first argument."""
    name = getattr(func, "__name__", "").partition(".")[0]
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


@lru_cache(maxsize=4096)
def inplace_flag(func: Callable) -> int | None:
    """The position of the argument that makes a function of torch.nn.functional write into its input."""
    if getattr(func, "__module__", None) != "torch.nn.functional" or not isinstance(func, FunctionType):
        return None
    names = list(inspect.signature(func).parameters)
    return names.index("inplace") if "inplace" in names else None
