"""What a function reads beside its arguments: in closures, defaults, globals, attributes and containers."""

from __future__ import annotations

import builtins
import dis
import enum
import logging
import os
import random
import re
import sys
import threading
import types
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import cache, cached_property, partial
from typing import Any

import torch

from invfunc import thresholds
from invfunc._torch.functorch import FakeTensor, same_generator
from invfunc.functional.functional import Functional

_PLAIN = (int, float, complex, bool, str, bytes, type(None), range, slice, type(...), enum.Enum, torch.Size)
_SETTLED = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, types.CodeType),
    *(types.MethodDescriptorType, types.WrapperDescriptorType, types.GetSetDescriptorType, types.MemberDescriptorType),
    *(types.ClassMethodDescriptorType, re.Pattern, logging.Logger),
    *(type(threading.Lock()), type(threading.RLock()), type(torch.ops.aten), type(torch.ops.aten.add)),
    *(type(torch.ops.aten.add.Tensor), type(NotImplemented)),
)
"""What has nothing in it that changes what is computed."""
_PARTS: dict[type, Callable[[Any], list[Any]]] = {
    types.MethodType: lambda x: [x.__self__, x.__func__],
    types.BuiltinFunctionType: lambda x: [x.__self__],
    types.MethodWrapperType: lambda x: [x.__self__],
    partial: lambda x: [x.func, x.args, x.keywords],
    staticmethod: lambda x: [x.__func__],
    classmethod: lambda x: [x.__func__],
    property: lambda x: [x.fget],
    cached_property: lambda x: [x.func],
}
"""What is made of other things that do not change."""
_UNSEEN = (random.Random, threading.local)
"""What has more in it than can be looked at."""
_BY_NAME = frozenset({"globals", "locals", "vars", "eval", "exec", "__import__"})
"""Built-in functions that read what no name in the code tells."""
_ENVIRONMENT = frozenset({"environ", "getenv"})
_CONTAINERS = (list, tuple, set, frozenset, deque)
_NOTHING = object()

Ids = list[int]


class Watch:
    """What some functions read beside their arguments, as it is now.

    Objects are told apart by their identity. All but tensors and generators are kept alive, as the functions do, so
    that none of them can be at the place of another; of those it is known whether they are alive.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self.unseen = ""
        """What cannot be watched, if there is something."""
        self.tensors: dict[int, weakref.ref[torch.Tensor]] = {}
        self.generators: dict[int, weakref.ref[torch.Generator]] = {}
        self._dicts: list[tuple[Mapping[Any, Any], Ids, str]] = []
        self._empty: list[Any] = []
        self._instances: list[Any] = []
        self._own: list[tuple[type, Mapping[str, Any]]] = []
        """Of which types they are, and where their attributes are."""
        self._looks: list[tuple[Callable[[], Ids], Ids, str]] = []
        self._alive: list[Any] = []
        self._seen: set[int] = set()
        self._todo: list[tuple[Any, tuple[str, ...], str]] = [(x, (), "") for x in roots]
        while self._todo and not self.unseen:
            self._visit(*self._todo.pop())
        del self._seen, self._todo

    def changed(self, exporting: bool = False) -> str:
        """What is another thing now; empty if nothing is. While it is `exporting`, torch.export has put tensors without
        numbers in the place of those of a module."""
        if any(self._empty):
            return "a container that was empty"
        for x, (kind, held) in zip(self._instances, self._own, strict=True):
            if type(x) is not kind or x.__dict__ is not held:
                return f"what an object of {kind.__name__} is"
        for held, ids, name in self._dicts:
            if [*map(id, held), *map(id, held.values())] != ids and not (exporting and _without_numbers(held, ids)):
                return name or "an argument"
        for look, ids, name in self._looks:
            if look() != ids:
                return name or "an argument"
        if not all(known() is not None for known in (*self.tensors.values(), *self.generators.values())):
            return "a tensor that is gone"
        return ""

    def tensor(self, x: torch.Tensor) -> weakref.ref[torch.Tensor] | None:
        """How a tensor is held, if it is one of those that were found."""
        known = self.tensors.get(id(x))
        return known if known is not None and known() is x else None

    def generator(self, x: torch.Generator) -> weakref.ref[torch.Generator] | None:
        """How a generator is held, if it is one of those that were found."""
        return self.generators.get(same_generator(x))

    def _visit(self, x: Any, names: tuple[str, ...], path: str) -> None:
        """Look at one object; `names` are those by which the code that has it reads attributes."""
        if isinstance(x, _PLAIN) or type(x) is object or (id(x) in self._seen and not isinstance(x, types.ModuleType)):
            return
        self._seen.add(id(x))
        if len(self._seen) > thresholds.WATCHED:
            self.unseen = f"more than {thresholds.WATCHED} objects"
        elif isinstance(x, torch.Tensor):
            self.tensors[id(x)] = weakref.ref(x)
            if attributes := vars(x):
                self._dict(attributes, names, path)
        elif isinstance(x, torch.Generator):
            self.generators[same_generator(x)] = weakref.ref(x)
        elif isinstance(x, Functional):
            self._push([x.model, x.method], names, f"{path}.{x.__name__}")
        elif isinstance(x, types.ModuleType):
            self._module(x, names, path)
        elif isinstance(x, types.FunctionType):
            self._function(x, path)
        elif isinstance(x, type):
            self._class(x, path)
        elif isinstance(x, _UNSEEN):
            self.unseen = f"{path.strip('.') or 'an argument'}, an object of {type(x).__name__}"
        elif not isinstance(x, _SETTLED):
            self._object(x, names, path)

    def _object(self, x: Any, names: tuple[str, ...], path: str) -> None:
        kind = type(x)
        if isinstance(x, dict):
            self._dict(x, names, path)
            if hasattr(x, "__dict__"):
                self._instance(x, names, path)
        elif isinstance(x, _CONTAINERS):
            if len(x) == 0:
                self._empty.append(x)
            elif kind is not tuple:
                self._look(lambda: [*map(id, x)], x, path)
            self._push(x, names, path)
            if hasattr(x, "__dict__"):
                self._instance(x, names, path)
        elif parts := next((of for made, of in _PARTS.items() if isinstance(x, made)), None):
            self._push(parts(x), names, path)
        elif isinstance(x, torch.nn.Module) and "_orig_mod" in x._modules:  # made by torch.compile
            self._push([x._modules], names, path)
        elif isinstance(x, ContextVar):
            self._look(lambda: [id(_value(x))], [_value(x)], path)
            self._push([_value(x)], names, path)
        elif isinstance(x, weakref.ref):
            self._look(lambda: [id(x())], [x()], path)
            self._push([x()], names, path)
        elif kind.__module__ == "numpy" and hasattr(x, "tobytes"):
            self._array(x, path)
        else:
            self._instance(x, names, path)

    def _push(self, parts: Iterable[Any], names: tuple[str, ...], path: str) -> None:
        parts = list(parts)
        self._alive += [part for part in parts if not isinstance(part, (torch.Tensor, torch.Generator))]
        self._todo += [(part, names, path) for part in parts]

    def _look(self, look: Callable[[], Ids], parts: Iterable[Any], path: str) -> None:
        """Note how to look at something again, and what is there now."""
        self._alive += [part for part in parts if not isinstance(part, (torch.Tensor, torch.Generator))]
        self._looks.append((look, look(), path))

    def _dict(self, held: Mapping[Any, Any], names: tuple[str, ...], path: str) -> None:
        if not held:
            self._empty.append(held)
            return
        self._alive += held
        self._dicts.append((held, [*map(id, held), *map(id, held.values())], path))
        self._push([], names, path)
        for key, value in list(held.items()):
            self._push([value], names, f"{path}.{key}" if isinstance(key, str) else f"{path}[{key!r}]")

    def _function(self, fn: types.FunctionType, path: str) -> None:
        fn = getattr(fn, "_torchdynamo_orig_callable", fn)
        path = f"{path}.{fn.__name__}" if path else fn.__name__
        cells, names = fn.__closure__ or (), _names(fn.__code__)

        def own() -> list[Any]:
            return [fn.__code__, fn.__defaults__, fn.__kwdefaults__, *map(_content, cells)]

        self._look(lambda: [*map(id, own())], own(), path)
        for name, part in zip(("", "", "", *fn.__code__.co_freevars), own(), strict=True):
            self._push([part], names, f"{path}.{name}" if name else path)
        self._dict(vars(fn), names, path)
        if _library(fn.__module__ or ""):
            return
        self._named(fn.__globals__, _globals(fn.__code__), names, path)
        if found := _BY_NAME.intersection(_globals(fn.__code__)) - fn.__globals__.keys():
            self.unseen = f"{path}, which finds what it reads by `{min(found)}`"
        if _ENVIRONMENT.intersection(names):
            self._look(lambda: [hash(frozenset(os.environ.items()))], [], path)
        for module in (sys.modules[name] for name in names if name in sys.modules):  # imported where it is used
            self._module(module, names, path)

    def _named(self, given: Mapping[str, Any], wanted: Iterable[str], names: tuple[str, ...], path: str) -> None:
        """Look at what has one of the names that are wanted."""
        here = [name for name in wanted if name in given]
        if not here:
            return
        found = [given[name] for name in here]
        self._look(lambda: [id(given.get(name, _NOTHING)) for name in here], found, path)
        for name, part in zip(here, found, strict=True):
            self._push([part], names, f"{path}.{name}" if path else name)

    def _module(self, module: types.ModuleType, names: tuple[str, ...], path: str) -> None:
        if module is not builtins and not _library(module.__name__):
            self._named(vars(module), names, names, path)

    def _class(self, kind: type, path: str) -> None:
        """A class of the user's: its methods, and the values that it has."""
        if _library(kind.__module__):
            return
        held = vars(kind)
        self._dicts.append((held, [*map(id, held), *map(id, held.values())], kind.__name__))
        self._alive += [part for part in held.values() if not isinstance(part, torch.Tensor)]
        own = {name: part for name, part in held.items() if not name.startswith(("__", "_abc_")) or callable(part)}
        for name, part in own.items():
            self._push([part], (), f"{kind.__name__}.{name}")
        self._push(kind.__bases__, (), path)

    def _instance(self, x: Any, names: tuple[str, ...], path: str) -> None:
        kind = type(x)
        slots = [name for base in kind.__mro__ for name in _slots(base)]
        if not hasattr(x, "__dict__") and not slots:
            self.unseen = f"{path.strip('.') or 'what it is made of'}, an object of {kind.__name__}"
            return
        if hasattr(x, "__dict__"):
            self._instances.append(x)
            self._own.append((kind, vars(x)))
            self._dict(vars(x), names, path)
        if slots:

            def own() -> list[Any]:
                return [getattr(x, name, _NOTHING) for name in slots]

            self._look(lambda: [*map(id, own())], own(), path)
            self._push(own(), names, path)
        self._push([kind], names, path)

    def _array(self, x: Any, path: str) -> None:
        if x.nbytes > thresholds.WATCHED_BYTES or x.dtype.hasobject:
            self.unseen = f"{path.strip('.')}, an array of numpy of {x.nbytes} bytes; make it a tensor"
            return
        self._look(lambda: [hash((x.shape, str(x.dtype), x.tobytes()))], [x], path)


def _without_numbers(held: Mapping[Any, Any], ids: Ids) -> bool:
    """Whether all that differs is tensors without numbers."""
    now = [*held, *held.values()]
    return len(now) == len(ids) and all(id(x) == i or isinstance(x, FakeTensor) for x, i in zip(now, ids, strict=True))


def _slots(base: type) -> Iterable[str]:
    found = vars(base).get("__slots__", ())
    return [found] if isinstance(found, str) else [n for n in found if n not in ("__dict__", "__weakref__")]


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing in it yet
        return _NOTHING


@cache
def _globals(code: types.CodeType) -> tuple[str, ...]:
    """The global names that code reads, and the code in it."""
    own = [i.argval for i in dis.get_instructions(code) if i.opname in ("LOAD_GLOBAL", "LOAD_NAME")]
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _globals(part)]
    return tuple(dict.fromkeys([*own, *inner]))


def _value(x: ContextVar) -> Any:
    try:
        return x.get()
    except LookupError:
        return _NOTHING


@cache
def _names(code: types.CodeType) -> tuple[str, ...]:
    """All names that code has, and the code in it: global ones, and attributes."""
    inner = [name for part in code.co_consts if isinstance(part, types.CodeType) for name in _names(part)]
    return tuple(dict.fromkeys([*code.co_names, *inner]))


@cache
def _library(module: str) -> bool:
    """Whether a module is of Python, of torch or installed: what it has does not change."""
    root = module.partition(".")[0]
    if root in {"torch", "invfunc", "builtins"} | set(sys.stdlib_module_names):
        return True
    file = getattr(sys.modules.get(root), "__file__", None) or ""
    return "site-packages" in file or "dist-packages" in file
