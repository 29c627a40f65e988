"""What functions read that is none of their arguments: names, cells and modules, to be compared with what they were.

Tensors among it may be others in each call (an optimiser writes them, `functional_call` puts others in); what is
computed again in a backward pass reads those of its call (`closed`). All else has to be the same object.
"""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from itertools import chain
from operator import contains, is_, itemgetter
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as _torchs
from torch.nn.modules import utils as _HELPERS

from invfunc.functional.module_copy import REGISTERED

TENSORS = frozenset((torch.Tensor, nn.Parameter))
"""The types of plain tensors."""
MISSING: Any = object()
CONTAINERS = (nn.Sequential, nn.ModuleList, nn.ModuleDict, nn.ParameterList)
"""Modules whose entries are read in their order."""
_OWN = itemgetter("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_GLOBAL = itemgetter(
    "_global_forward_hooks", "_global_forward_pre_hooks", "_global_backward_hooks", "_global_backward_pre_hooks"
)
"""The hooks that a call of a module asks for."""
_OF_MODULES = vars(nn.Module)
_CALL = "__call__", "_wrapped_call_impl", "_call_impl", "__getattr__"
_TELLING = frozenset(
    "__module__ __qualname__ __doc__ __init__ __annotations__ __dict__ __weakref__ __repr__ __constants__ "
    "__parameters__ __orig_bases__ __abstractmethods__ __class_getitem__ __init_subclass__ __slots__ __firstlineno__ "
    "__static_attributes__".split()
)
"""Special names of a class that say nothing of what its objects do."""


class Readings:
    """Values, with where they were found."""

    def __init__(self) -> None:
        self._names: dict[tuple[int, str], tuple[Mapping[str, Any], str, Any]] = {}
        self._functions: list[tuple[Any, types.CodeType, Any]] = []
        self._cells: list[tuple[types.CellType, Any]] = []
        self._places: dict[tuple[int, str], tuple[Mapping[str, Any], str]] = {}
        self._cells_of_tensors: list[types.CellType] = []
        self.modules: list[nn.Module] = []
        self._flat: _Flat
        self._whole: list[tuple[Mapping[str, Any], list[str], list[Any]]] = []
        self._kinds: set[type] = set()

    def name(self, held: Mapping[str, Any], name: str, value: Any) -> None:
        """A name in a namespace, which may be missing there."""
        self._names[id(held), name] = held, name, value

    def function(self, fn: Any) -> None:
        """A function with its code."""
        self._functions.append((fn, fn.__code__, fn.__defaults__))

    def cell(self, cell: types.CellType, value: Any) -> None:
        """What a function closes over."""
        self._cells.append((cell, value))

    def place(self, held: Mapping[str, Any] | types.CellType, name: str = "") -> None:
        """Where a tensor is."""
        if isinstance(held, types.CellType):
            self._cells_of_tensors.append(held)
        else:
            self._places[id(held), name] = held, name

    def module(self, module: nn.Module) -> None:
        """A module that is called: its type, without hooks, and where it has its own."""
        own = vars(module)
        self.modules.append(module)
        for kind in type(module).__mro__:
            if not _is_torchs(kind) and kind not in self._kinds:
                self._kinds.add(kind)
                self.whole(vars(kind))
        self.name(own, "_compiled_call_impl", own.get("_compiled_call_impl", MISSING))
        for name in REGISTERED:
            self.name(own, name, own[name])
        for name in _CALL:
            self.name(_OF_MODULES, name, _OF_MODULES[name])

    def whole(self, held: Mapping[str, Any]) -> None:
        """A namespace with all that is in it, and in which order."""
        self._whole.append((held, [*held], [*held.values()]))

    @property
    def has_tensors(self) -> bool:
        """Whether there are any."""
        return bool(self._places or self._cells_of_tensors)

    def lay_out(self) -> None:
        """All has been told."""
        self._flat = _Flat(self._names.values(), self.modules)
        del self._names, self._kinds

    def unchanged(self) -> bool:
        """Whether all but the tensors is there as it was."""
        if not self._flat.unchanged():
            return False
        for fn, code, defaults in self._functions:
            if not (fn.__code__ is code and fn.__defaults__ is defaults) or fn.__kwdefaults__ or fn.__dict__:
                return False
        for held, names, values in self._whole:
            if [*held] != names or not all(map(is_, held.values(), values)):
                return False
        return all(content(cell) is value for cell, value in self._cells)

    def tensors(self) -> list[torch.Tensor] | None:
        """The tensors that are there now; None if anything else is."""
        found: list[Any] = [held.get(name) for held, name in self._places.values()]
        found += map(content, self._cells_of_tensors)
        return found if TENSORS.issuperset(map(type, found)) else None


class _Flat:
    """Names and modules, laid out so that a comparison takes no time.

    Args:
        names: namespaces, names and values, which may be missing.
        modules: their hooks have to be empty.
    """

    def __init__(self, names: Iterable[tuple[Mapping[str, Any], str, Any]], modules: Iterable[nn.Module]) -> None:
        there: dict[int, tuple[Mapping[str, Any], dict[str, Any]]] = {}
        absent = [(held, name) for held, name, value in names if value is MISSING]
        for held, name, value in names:
            if value is not MISSING:
                there.setdefault(id(held), (held, {}))[1][name] = value
        self._absent = [held for held, _ in absent], [name for _, name in absent]
        self._there: list[tuple[Callable, Mapping[str, Any]]] = []
        values: list[Any] = []
        for held, found in there.values():
            asked = [*found] * (1 if len(found) > 1 else 2)  # as that of a single name is no tuple
            self._there.append((_getter(*asked), held))
            values += [found[name] for name in asked]
        self._values = tuple(values)
        self._modules = [*modules]
        self._types = [*map(type, self._modules)]
        self._own = [*map(vars, self._modules)]

    def unchanged(self) -> bool:
        """Whether all is as it was."""
        try:
            now = chain.from_iterable([get(held) for get, held in self._there])
            if not all(map(is_, now, self._values)) or any(map(contains, *self._absent)):
                return False
            if [*map(type, self._modules)] != self._types:
                return False
            hooks = [_OWN(own) for own in self._own]
        except KeyError:
            return False
        if self._modules:
            hooks.append(_GLOBAL(vars(_torchs)))
        return not any(chain.from_iterable(hooks))


@lru_cache(maxsize=256)
def _getter(*names: str) -> Callable:
    """What reads these names. Blocks of modules of one kind ask for the same, and keep one together."""
    return itemgetter(*names)


def content(cell: types.CellType) -> Any:
    """What is in a cell."""
    try:
        return cell.cell_contents
    except ValueError:  # nothing in it yet
        return MISSING


def is_helper(fn: Any) -> bool:
    """Whether a function is one by which torch's modules read their options."""
    return fn.__code__.co_filename == _HELPERS.__file__ and fn.__globals__ is vars(_HELPERS)


def strange_in(kind: type) -> str | None:
    """What a class of modules does by itself where torch's do something else, if anything."""
    own = [name for cls in kind.__mro__ if not _is_torchs(cls) for name in vars(cls)]
    return next((name for name in own if name.startswith("__") and name not in _TELLING), None)


def _is_torchs(kind: type) -> bool:
    """Whether a class is one of torch's own modules."""
    if not kind.__module__.startswith("torch.nn.modules."):
        return kind is object
    return vars(sys.modules[kind.__module__]).get(kind.__name__) is kind
