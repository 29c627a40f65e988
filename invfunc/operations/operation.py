"""One entry for each operation of torch, with all that is known of it; its names, its arguments, and who hears a call.

The files of families beside this one fill the entries in. Functions of torch.nn.functional, torch's own of the same
name and methods take the same arguments in different places; their signatures and the schemas of aten say where.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from types import FunctionType
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode

from invfunc import tree
from invfunc._torch.functorch import homes

Rule = Callable[..., Any]


@dataclass(frozen=True)
class OperationFacts:
    """Facts about an operation."""

    composed: Rule | None = None
    """The operations that it is composed of, where samples are followed in those: takes its arguments."""
    twice: Rule | None = None
    """A form whose second derivative is right, where torch's is missing or wrong: takes torch's function and its
    arguments. It is not used where only first derivatives are taken."""
    only_nn: bool = False
    """True if these take the arguments of the function of torch.nn.functional, and not of another one of that name."""
    predictive: Literal["signs", "normal", "bernoulli"] = "signs"
    """Distribution of targets if its second derivative is diagonal, and the variance of the slopes there: a normal
    distribution, 0 and 1 with its first argument as logits, or random signs, which serve all."""
    cornered: bool = False
    """True if its second derivative is the outcome of a comparison, so that torch's is 0 at NaN."""
    asks: Literal["no", "form", "memory"] = "no"
    """True if it only asks something about a tensor, other than its values: about its form, or its memory."""
    reads: Literal["all", "first", "none"] = "all"
    """Of which tensors among its arguments it reads the values, and not only the shape."""
    writes_if: tuple[str, Sequence[str]] | None = None
    """The name of an argument that says whether it writes to others, though its schema does not say so; and theirs."""
    keeps: bool = False
    """True if its form in place writes no values."""
    differentiates: bool = False
    """True if it takes derivatives of its first argument."""


OPERATIONS: dict[str, OperationFacts] = {}
_PLAIN = OperationFacts()


def define(names: str | Iterable[str], **facts: Any) -> None:
    """Add facts to the entries of operations, by the names of torch's functions or of aten's operations."""
    for name in names.split() if isinstance(names, str) else names:
        entry = OPERATIONS.get(name, _PLAIN)
        known = [fact for fact in facts if getattr(entry, fact) != getattr(_PLAIN, fact)]
        if known:
            raise ValueError(f"`{name}`: {known[0]} is stated twice.")
        OPERATIONS[name] = replace(entry, **facts)


def known(name: str) -> OperationFacts:
    """The facts about an operation, by its name."""
    return OPERATIONS.get(name, _PLAIN)


def not_torchs(form: Rule) -> Rule:
    """The entries of `twice` for a form that does not call torch's function."""
    return lambda func, *args, **kwargs: form(*args, **kwargs)


_T = torch.Tensor
_HOMES = (torch, _T, F, torch.special, torch.linalg, *homes())


def called(names: str) -> set[Any]:
    """All functions of torch with these names, also in place and as operators."""
    found = set()
    for name in names.split():
        for home in _HOMES:
            for form in (name, name + "_", f"__{name}__", f"__r{name}__", f"__i{name}__"):
                if callable(func := getattr(_T if form[:2] == "__" else home, form, None)):
                    found.add(func)
    return found


def getters(names: str) -> set[Any]:
    """The functions that read attributes of tensors."""
    return {getattr(_T, name).__get__ for name in names.split() if hasattr(_T, name)}


_ALSO = {"dim": ("dims", "axis", "dimension"), "keepdim": ("keepdims",), "input": ("self",)}
"""Other names of an argument in torch."""
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
    at = positions(func).get(name)
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
def positions(func: Callable) -> dict[str, int]:
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
        """True if it can write the values of tensors among its arguments, but for `out` and a flag of its own."""

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
"""Facts about a function that is called."""


class Listener(TorchFunctionMode):
    """Hears the calls of torch while it is on; such as only ask something about a tensor go by."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        function = function_of(func)
        if function.entry.asks == "form":
            return func(*args, **(kwargs or {}))
        return self.heard(function, args, kwargs or {})

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        """A call while the mode is off; gives its result."""
        raise NotImplementedError  # of those who hear
