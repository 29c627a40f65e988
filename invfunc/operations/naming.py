"""The names of torch's functions and their arguments: one vocabulary for functions, methods and operators.

Functions of torch.nn.functional, torch's own of the same name and methods take the same arguments in different places;
their signatures and the schemas of aten say where.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Any

import torch

_ALSO = {"dim": ("dims", "axis", "dimension"), "keepdim": ("keepdims",), "input": ("self",)}
"""What else torch calls an argument."""
_UNKNOWN = object()


@lru_cache(maxsize=4096)
def function_name(func: Callable) -> str:
    """`relu` for F.relu, torch.relu_, aten.relu.default; `get:T` for the attribute T; `getitem` for the operator."""
    name = getattr(func, "__name__", "")
    if name == "__get__":
        return "get:" + getattr(getattr(func, "__self__", None), "__name__", "")
    base, _, overload = name.partition(".")
    if overload and torch.Tag.pointwise not in func.tags and base != "copy_":  # of aten, whose arguments are others
        return name
    return "and" if base == "__rand__" else base.strip("_")


def argument(func: Callable, args: tuple, kwargs: dict[str, Any], name: str, otherwise: Any = None) -> Any:
    """An argument of a call by its name."""
    at = _positions(func).get(name)
    if at is not None and at < len(args):
        return args[at]
    found = kwargs.get(name, _UNKNOWN)
    if found is _UNKNOWN:
        found = next((kwargs[other] for other in _ALSO.get(name, ()) if other in kwargs), otherwise)
    return found


def default(func: Callable, name: str) -> Any:
    """The default of an argument of a function of Python; None where it does not say."""
    try:
        given = inspect.signature(func).parameters.get(name)
    except (TypeError, ValueError):
        return None
    return None if given is None or given.default is given.empty else given.default


@lru_cache(maxsize=4096)
def _positions(func: Callable) -> dict[str, int]:
    """The positions of a function's arguments, by their names."""
    found: dict[str, int] = {}
    for names in _signatures(func):
        for i, name in enumerate(names):
            found.setdefault(name, i)
    for name, others in _ALSO.items():
        for other in others:
            if other in found:
                found.setdefault(name, found[other])
    return found


def _signatures(func: Callable) -> Iterator[list[str]]:
    """The names of the positional arguments of a function, or of its overloads; those on a tensor come first."""
    try:
        given = list(inspect.signature(func).parameters.values())
    except (TypeError, ValueError):
        given = []
    if given and all(p.kind is not p.VAR_POSITIONAL for p in given):
        yield [p.name for p in given]
        return
    name = getattr(func, "__name__", "")
    for called in (name, name.rstrip("_"), f"special_{name}"):
        packet = getattr(torch.ops.aten, called, None) if called else None
        if packet is not None and hasattr(packet, "overloads"):
            schemas = [getattr(packet, overload)._schema for overload in packet.overloads()]
            names = [[a.name for a in schema.arguments if not a.kwarg_only] for schema in schemas]
            yield from sorted(names, key=lambda each: each[:1] != ["self"])
            return
