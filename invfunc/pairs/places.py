"""Places of the tensors and numbers that a function closes over: modules, closures, objects, collections, globals."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import nn

Place = tuple[Any, Any]
"""A container and a key in it."""
HOLD_NOTHING = bool, int, float, str, type(None), type, ModuleType, torch.Tensor, torch.dtype, torch.device, torch.Size
_MOST = 1000
"""The length from which on a collection is data, and not looked into."""
_OF_ANY_MODULE = {*vars(nn.Module())} - {"training"}


def read(place: Place) -> Any:
    """The value that is there now, if any."""
    container, key = place
    try:
        return container.cell_contents if isinstance(container, CellType) else container[key]
    except (ValueError, KeyError, IndexError):
        return None


def read_all(places: Sequence[Place]) -> list[Any]:
    """The values that are in some places."""
    try:
        return [c.cell_contents if type(c) is CellType else c[key] for c, key in places]
    except (ValueError, KeyError, IndexError):
        return [*map(read, places)]


def put(place: Place, value: Any) -> None:
    """Put a value there."""
    container, key = place
    if isinstance(container, CellType):
        container.cell_contents = value
    else:
        container[key] = value


def reached(roots: Iterable[Any]) -> Iterator[tuple[Any, Place, Any]]:
    """Every place that can be reached from some functions: what holds it, the place and what is there now."""
    waiting = [*roots]
    seen = {id(root): root for root in waiting}
    for holder in waiting:  # which grows
        for place in (*places_in(holder), *_globals(holder)):
            inner = read(place)
            yield holder, place, inner
            if id(inner) not in seen and not isinstance(inner, HOLD_NOTHING):
                seen[id(inner)] = inner
                waiting.append(inner)


class ClosedOver:
    """Places that can be reached from a function."""

    def __init__(self, f: Any) -> None:
        self._others: list[Place] = []
        self._modules: list[nn.Module] = []
        self.tensors: dict[int, list[Place]] = {}
        """Places of tensors, by the ids of what was there."""
        for holder, place, inner in reached([f]):
            if isinstance(inner, torch.Tensor):
                self.tensors.setdefault(id(inner), []).append(place)
            elif not isinstance(holder, (list, tuple, dict)):
                self._others.append(place)
            if isinstance(inner, nn.Module):
                self._modules.append(inner)

    def others(self) -> tuple:
        """Numbers, flags and objects that are there now, such as those that tell whether a module trains; the names of
        its submodules and the numbers of its hooks."""
        values = [x if isinstance(x, (bool, int, float, str)) else id(x) for x in map(read, self._others)]
        held = ((*m._modules, *m._forward_hooks, *m._forward_pre_hooks) for m in self._modules)
        return *values, *held


def places_in(value: Any) -> Iterator[Place]:
    """The places in a value itself, but for what a function names as a global."""
    if isinstance(value, FunctionType):
        yield from ((cell, 0) for cell in value.__closure__ or ())
        value = value.__defaults__, value.__kwdefaults__
    elif isinstance(value, MethodType):
        value = value.__self__, value.__func__
    elif isinstance(value, partial):
        value = value.func, value.args, value.keywords
    elif isinstance(value, nn.Module):
        held = value._parameters, value._buffers, value._modules
        yield from ((container, key) for container in held for key in container)
    if isinstance(value, (dict, list, tuple)) and len(value) <= _MOST:
        yield from ((value, key) for key in (value if isinstance(value, dict) else range(len(value))))
    elif hasattr(value, "__dict__"):
        own = vars(value)
        yield from ((own, name) for name in own if name not in _OF_ANY_MODULE)


def _globals(value: Any) -> Iterator[Place]:
    """The places of the globals that a function names; what torch and this package name holds nothing of the user's."""
    if isinstance(value, FunctionType) and not (value.__module__ or "").startswith(("torch.", "invfunc.")):
        codes = [value.__code__]
        for code in codes:  # which grows
            yield from ((value.__globals__, name) for name in code.co_names)
            codes += [inner for inner in code.co_consts if isinstance(inner, CodeType)]
