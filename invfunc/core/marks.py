"""Marks of a tensor in a run: the axis of its samples, or the parameters it is computed from."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from types import BuiltinFunctionType, FunctionType
from typing import Any

import torch

from invfunc.operations.operation import positions

Run = Any
"""A run of f (`run.Run`), for those who are asked while it runs."""
SUMMED = "summed"
"""The axis of what the samples were summed to, which is used linearly from there on."""


class Unsupported(Exception):
    """Something that the core does not follow; the message says what, and where it is in the user's f."""

    op = ""
    """The operation."""
    params = False
    """True if it is that parameters meet a sum over the samples."""

    def __init__(self, why: str) -> None:
        super().__init__(why)
        self.place = place()


def place() -> str:
    """The line of f that runs, in the user's own code; empty outside of it."""
    frame = sys._getframe(2)
    while frame is not None and not (name := frame.f_code.co_filename).endswith(_CALLER):
        if not name.startswith(_LIBRARIES):
            return f"{Path(name).name}:{frame.f_lineno}, in {frame.f_code.co_qualname.rpartition('.')[2]}"
        frame = frame.f_back
    return ""


_LIBRARIES = str(Path(__file__).parents[1]), str(Path(torch.__file__).parent)
_CALLER = str(Path("core", "evaluate.py"))
"""The file that calls f."""


class Final(Unsupported):
    """Something that no other way of calling f mends."""


class Mark:
    """The batch axis of a tensor, SUMMED, or the `Unsupported` that it is an error to use.

    Marks and nodes hold no tensors, so that a run leaves no reference cycles behind.
    """

    __slots__ = ("run", "axis", "graph")

    def __init__(self, run: object, axis: Any, graph: bool) -> None:
        """`graph` is whether the tensor had one: a graph that comes later is that of a custom autograd.Function."""
        self.run, self.axis, self.graph = run, axis, graph


class Filled(Mark):
    """The mark of a tensor that f filled itself, as the first state of a recurrent net: its dim may be of samples."""

    __slots__ = ()


LEAF, SWAP, VIEW, DERIVED = "leaf", "swap", "view", "derived"


class Node:
    """The origin of a tensor that is a parameter, or is computed from parameters alone.

    `leaf` is the number of the parameter that it is, or is a view of; `kind` is LEAF, SWAP (its transpose), VIEW, or
    DERIVED, of which leaf is None; `alone` is whether it is of parameters and numbers, and of no other tensor.
    """

    __slots__ = ("run", "leaf", "kind", "alone")

    def __init__(self, run: object, leaf: int | None, kind: str, alone: bool = True) -> None:
        self.run, self.leaf, self.kind, self.alone = run, leaf, kind, alone


Known = tuple[torch.Tensor, Any]
"""A tensor of a call with its axis, or with its node."""


def know(x: torch.Tensor, what: Mark | Node) -> None:
    """Note what is known of a tensor."""
    vars(x)["_known"] = what


def tensors(out: Any) -> Sequence[torch.Tensor]:
    """The tensors of the result of an operation, or among its arguments, also in lists."""
    if isinstance(out, torch.Tensor):
        return (out,)
    return [y for x in out for y in tensors(x)] if isinstance(out, (tuple, list)) else ()


def replaced(x: Any, by: dict[int, torch.Tensor]) -> Any:
    """Arguments with some tensors replaced."""
    if isinstance(x, torch.Tensor):
        return by.get(id(x), x)
    return type(x)([replaced(y, by) for y in x]) if type(x) in (list, tuple) else x


def option(args: tuple, kwargs: dict[str, Any], place: int, name: str, default: Any = None) -> Any:
    """An argument by its place or name."""
    return args[place] if len(args) > place else kwargs.get(name, default)


def by_place(func: Any, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
    """The arguments of a function of torch that was called by names alone, the first of them by its place."""
    if not isinstance(func, (FunctionType, BuiltinFunctionType)):  # an operation of a user has its own names
        return (), kwargs
    places = positions(func)
    first = next((name for name in kwargs if places.get(name) == 0), None)
    if first is None:
        return (), kwargs
    return (kwargs[first],), {name: x for name, x in kwargs.items() if name != first}


def named(func: Any) -> str:
    """The name of an operation in a message."""
    return getattr(func, "__name__", str(func))


def spelled(func: Any) -> str:
    """The name of an operation as people write it."""
    return named(func).removeprefix("_VF.").strip("_")
