"""The tensors that a function holds before it runs: in its closure, defaults and globals, and in what is there."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from types import FunctionType, MethodType
from typing import Any, TypeVar

import torch

from invfunc import thresholds

T = TypeVar("T")
_PLAIN = {int, float, str, bool, complex, type(None), type, type(torch), type(len), torch.dtype, torch.device}


def held_by(f: Callable, wanted: type[T] = torch.Tensor) -> list[T]:
    """The tensors that can be reached from f through closures, defaults, globals, containers and modules, or whatever
    else is wanted."""
    found, seen, todo = list[T](), set[int](), list[Any]([f])
    home = getattr(f, "__module__", None)
    while todo and len(seen) < thresholds.HELD:
        x = todo.pop()
        kind = type(x)
        if kind in _PLAIN or id(x) in seen:
            continue
        seen.add(id(x))
        if isinstance(x, wanted):
            found.append(x)
        elif kind is FunctionType:
            if x is f or x.__globals__ is getattr(f, "__globals__", None) or x.__closure__:
                todo += _of_function(x)
        elif kind in (list, tuple):
            todo += x
        elif kind is dict:
            todo += x.values()
        elif kind is MethodType:
            todo += (x.__func__, x.__self__)
        elif kind is partial:
            todo += (x.func, *x.args, *x.keywords.values())
        elif isinstance(x, torch.nn.Module):
            todo += (x._buffers, x._parameters)  # of its own: there may be many below
        elif kind.__module__ == home:
            todo += getattr(x, "__dict__", {}).values()
    return found


def _of_function(f: FunctionType) -> Iterable[Any]:
    given, names = f.__globals__, f.__code__.co_names
    found = [given[name] for name in names if name in given]
    found += f.__defaults__ or ()
    found += (f.__kwdefaults__ or {}).values()
    for cell in f.__closure__ or ():
        try:
            found.append(cell.cell_contents)
        except ValueError:  # it is empty yet
            continue
    return found
