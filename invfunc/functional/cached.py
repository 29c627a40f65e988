"""Values that an object keeps once it has computed them (`functools.cached_property`): those of its own parameters."""

from __future__ import annotations

import types
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache, partialmethod
from typing import Any

_METHODS = (types.FunctionType, types.BuiltinFunctionType, staticmethod, classmethod, partialmethod)


@lru_cache(maxsize=1024)
def cached(kind: type) -> frozenset[str]:
    """The names of the attributes that instances of a type compute when they are read first, and then keep."""
    found = {name: x for base in reversed(kind.__mro__[:-1]) for name, x in vars(base).items()}
    return frozenset(
        name
        for name, x in found.items()
        if hasattr(type(x), "__get__") and not hasattr(type(x), "__set__") and not isinstance(x, _METHODS)
    )


def computed_apart(x: Any) -> dict[str, Any]:
    """The attributes of an object without those."""
    names, held = cached(type(x)), vars(x).copy()
    return {name: value for name, value in held.items() if name not in names} if names else held


@contextmanager
def computed_anew(objects: Iterable[Any]) -> Iterator[None]:
    """A context in which these objects are without what they have kept; they have it again afterwards."""
    kept = [(x, {name: vars(x).pop(name) for name in cached(type(x)) if name in vars(x)}) for x in objects]
    try:
        yield
    finally:
        for x, values in kept:
            for name in cached(type(x)):
                vars(x).pop(name, None)
            vars(x).update(values)
