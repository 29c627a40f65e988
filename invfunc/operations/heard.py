"""The one door by which calls of torch come in: the function that is called, with all that is known of it."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache
from types import FunctionType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from invfunc import tree
from invfunc.operations.naming import argument, default, function_name
from invfunc.operations.operation import OperationFacts, known

_PLAIN = OperationFacts()
_IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()}
_IN_PLACE.add("__setitem__")


@lru_cache(maxsize=4096)
def in_place(func: Callable) -> bool:
    """Tells whether a function works in place on its first argument."""
    name = getattr(func, "__name__", "").partition(".")[0]
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


@lru_cache(maxsize=4096)
def inplace_flag(func: Callable) -> int | None:
    """The position of the argument that makes a function of torch.nn.functional write into its input."""
    if getattr(func, "__module__", None) != "torch.nn.functional" or not isinstance(func, FunctionType):
        return None
    names = list(inspect.signature(func).parameters)
    return names.index("inplace") if "inplace" in names else None


class Function:
    """A function, method or operator of torch as it is called, with what is known of it."""

    __slots__ = ("_writes_if", "called", "entry", "forms", "func", "in_place", "inplace_at", "name", "renews")

    def __init__(self, func: Callable) -> None:
        self.func, self.called = func, getattr(func, "__name__", repr(func))
        self.name = function_name(func)
        self.entry = known(self.name)
        forms = known(self.called)  # none of what writes in place, which has an underscore
        nn = getattr(func, "__module__", None) == "torch.nn.functional"
        self.forms = forms if nn or not forms.only_nn else _PLAIN
        """The entry whose `composed` and `twice` take the arguments of this very function."""
        self.in_place, self.inplace_at = in_place(func), inplace_flag(func)
        self._writes_if = None
        if self.entry.writes_if is not None:
            flag, others = self.entry.writes_if
            self._writes_if = flag, default(func, flag), others
        renews = (self.in_place or self.called == "__set__") and not self.entry.keeps  # the latter of t.data = ...
        self.renews = renews or self._writes_if is not None
        """Whether it can write the values of tensors among its arguments, but for `out` and a flag of its own."""

    def argument(self, args: tuple, kwargs: dict[str, Any], name: str, default: Any = None) -> Any:
        """An argument of a call by its name."""
        return argument(self.func, args, kwargs, name, default)

    def written(self, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors among its arguments whose values a call says that it writes."""
        if self._writes_if is not None:
            flag, otherwise, others = self._writes_if
            flag = self.argument(args, kwargs, flag, otherwise)
            names = others if flag is not None and flag is not False else ()
            return tree.tensors([self.argument(args, kwargs, name) for name in names])
        if self.renews:
            return tree.tensors(args[:1])
        return tree.tensors(kwargs["out"]) if kwargs.get("out") is not None else []

    def writes(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Tells whether a call writes into its first argument."""
        at = self.inplace_at
        return self.in_place or (at is not None and bool(args[at] if len(args) > at else kwargs.get("inplace", False)))


function_of = lru_cache(maxsize=4096)(Function)
"""What is known of a function that is called."""


class Listener(TorchFunctionMode):
    """Hears the calls of torch while it is on; such as only ask something about a tensor go by."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        function = function_of(func)
        if function.entry.asks == "form":
            return func(*args, **(kwargs or {}))
        if not args and kwargs and "tensor" in kwargs:  # of torch.nn.init, which names what it writes
            args, kwargs = (kwargs["tensor"],), {name: value for name, value in kwargs.items() if name != "tensor"}
        return self.heard(function, args, kwargs or {})

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call while the mode is off; gives its result."""
        raise NotImplementedError  # of those who hear
