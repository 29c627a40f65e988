"""Pairs and blocks are values: what they evaluate is copied with them."""

from __future__ import annotations

import copy
from contextlib import suppress
from functools import partial
from types import CellType, FunctionType
from typing import Any

import torch
from torch import nn

from invfunc.pairs.places import HOLD_NOTHING, places_in, read


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
    """Whether an object is copied: modules, tensors, other values, what has a copy already, and functions, collections
    and objects that hold such. Anything else is shared with the original, as ever."""
    if id(held) in memo or isinstance(held, (nn.Module, torch.Tensor, Value)):
        return True
    if id(held) in seen or isinstance(held, HOLD_NOTHING):
        return False
    seen.add(id(held))
    return any(_to_copy(read(place), memo, seen) for place in places_in(held))
