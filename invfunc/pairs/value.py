"""Pairs and blocks are values: what they evaluate is copied with them, and found where functions close over it."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from functools import partial
from itertools import starmap
from operator import getitem
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
        return [*starmap(getitem, places)]
    except (TypeError, KeyError, IndexError):  # of a cell, or where nothing is
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
        yield from ((container, key) for container in held for key in container.keys())  # of scripted ones no dicts
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


class Value:
    """A dataclass whose deep copy evaluates copies of the modules and tensors that its functions close over.

    Python takes a function for indivisible: a copy of `self.block = additive_coupling(lambda b: self.F(b), ...)` would
    go on evaluating the F of the original.
    """

    def __new__(cls, *_args: Any, **_kwargs: Any) -> Any:
        made = super().__new__(cls)
        vars(made)  # Python 3.11 makes it when it is first asked for, and crashes where two threads ask at once
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        memo[id(self)] = made = Value.__new__(type(self))
        for name, value in vars(self).items():
            object.__setattr__(made, name, copied(value, memo))
        return made


def copied(value: Any, memo: dict[int, Any]) -> Any:
    """A deep copy, of functions too where they hold something that is copied."""
    if id(value) in memo:
        return memo[id(value)]
    if isinstance(value, FunctionType):
        return _function(value, memo)
    if type(value) is partial:
        given = {name: copied(v, memo) for name, v in value.keywords.items()}
        made: Any = partial(copied(value.func, memo), *(copied(v, memo) for v in value.args), **given)
    elif type(value) in (tuple, list):
        made = type(value)(copied(v, memo) for v in value)
    elif type(value) is dict:
        made = {key: copied(v, memo) for key, v in value.items()}
    else:
        return copy.deepcopy(value, memo)
    return memo.setdefault(id(value), made)


def _function(fn: FunctionType, memo: dict[int, Any]) -> FunctionType:
    """The function, or one with the same code if something that it closes over or has as a default was copied."""
    if not _to_copy(fn, memo, set()):
        return fn
    closure = tuple(CellType() for _ in fn.__closure__ or ())
    memo[id(fn)] = made = FunctionType(fn.__code__, fn.__globals__, fn.__name__, None, closure or None)

    def again(held: Any) -> Any:
        return copied(held, memo) if _to_copy(held, memo, set()) else held

    for cell, new in zip(fn.__closure__ or (), closure, strict=True):
        with suppress(ValueError):  # of a cell that is empty yet
            new.cell_contents = again(cell.cell_contents)
    made.__defaults__ = fn.__defaults__ and tuple(map(again, fn.__defaults__))
    made.__kwdefaults__ = fn.__kwdefaults__ and {name: again(held) for name, held in fn.__kwdefaults__.items()}
    made.__dict__.update(fn.__dict__)
    made.__doc__, made.__qualname__, made.__module__ = fn.__doc__, fn.__qualname__, fn.__module__
    return made


def _to_copy(held: Any, memo: dict[int, Any], seen: set[int]) -> bool:
    """Tells whether an object is copied: modules, tensors, other values, what has a copy already, and functions,
    collections and objects that hold such. Anything else is shared with the original, as ever."""
    if id(held) in memo or isinstance(held, (nn.Module, torch.Tensor, Value)):
        return True
    if id(held) in seen or isinstance(held, HOLD_NOTHING):
        return False
    seen.add(id(held))
    return any(_to_copy(read(place), memo, seen) for place in places_in(held))
