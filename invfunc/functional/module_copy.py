"""A copy of a tree of modules for one call, which shares everything with them but the tensors that are replaced.

By whatever a module reaches its tensors and other modules, it reaches those of the copy: registered modules,
attributes, containers, bound methods, partial functions, closures, hooks. What leads to none of them is shared. Where
something leads to them that cannot be copied (a global name, an object of the caller's, compiled code), there is no
copy of the module tree.
"""

from __future__ import annotations

import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping
from copy import copy
from dataclasses import is_dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from invfunc import thresholds
from invfunc._torch.sharded import undivided
from invfunc.functional.cached import cached, computed_apart
from invfunc.functional.remade import Remade

PLAIN = {
    *(int, float, complex, bool, str, bytes, type(None), range, slice, torch.dtype, torch.device, torch.Size),
    *(torch.Generator, types.ModuleType, types.BuiltinFunctionType, types.CodeType),
}
_CONTAINERS = (list, tuple, set, frozenset, deque, dict)
STANDARD = vars(nn.Module()).keys()
"""The attributes that every module has, and which of them hold what is registered."""
REGISTERED = ("_parameters", "_buffers", "_modules")
_COMPILED = ("_compiled_call_impl", "dynamo_ctx")
_HOOKS = ("_forward_hooks", "_backward_hooks", "_backward_pre_hooks")


class EntangledError(Exception):
    """Something that cannot be copied leads to the modules; the error names it."""


class Reach:
    """Whether something leads to the modules, or to one of the tensors that are replaced."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref, dict, bool]] = {}  # with what the object held then
        self._targets: frozenset[int] = frozenset()

    def __call__(self, x: Any, targets: Mapping[int, Any]) -> bool:
        if id(x) in targets or isinstance(x, (type, torch.Tensor)):
            return id(x) in targets
        if isinstance(x, _CONTAINERS):  # they may be filled later
            return not set(map(type, references(x))) <= PLAIN and self._search(x, targets)
        known, holds = self._known.get(id(x)), _held(x)
        if known is None or known[0]() is not x or not _same(known[1], holds):
            verdict = self._search(x, targets)
            try:
                here = weakref.ref(x, partial(self._forget, id(x)))
            except TypeError:
                return verdict
            known = self._known[id(x)] = (here, holds, verdict)
        return known[2]

    def of(self, targets: Mapping[int, Any]) -> Reach:
        """This object, for these targets; what is known of other ones is forgotten."""
        if targets.keys() != self._targets:
            self._known, self._targets = {}, frozenset(targets)
        return self

    def _forget(self, key: int, _ref: weakref.ref) -> None:
        self._known.pop(key, None)

    @staticmethod
    def _search(x: Any, targets: Mapping[int, Any]) -> bool:
        def onward(one: Any) -> Iterable[Any]:
            named = _named(one, targets) if isinstance(one, types.FunctionType) else ()
            return (*references(one), *named)

        return leads(x, targets, onward)


def leads(x: Any, targets: Mapping[int, Any], onward: Callable[[Any], Iterable[Any]]) -> bool:
    """Whether something leads to an object of these ids, on from each to what `onward` says."""
    waiting, seen = [x], set[int]()
    while waiting:
        one = waiting.pop()
        if type(one) in PLAIN or id(one) in seen:
            continue
        if id(one) in targets:
            return True
        if len(seen) > thresholds.SEARCHED:
            return False
        seen.add(id(one))
        waiting.extend(onward(one))
    return False


def references(x: Any) -> Iterable[Any]:
    """What an object keeps by itself; what a function has by name is told by `_named`."""
    if isinstance(x, _CONTAINERS) and len(x) > thresholds.SEARCHED:
        return ()
    if isinstance(x, dict):
        return [*x.keys(), *x.values()]
    if isinstance(x, _CONTAINERS):
        return list(x)
    if isinstance(x, types.MethodType):
        return (x.__self__, x.__func__)
    if isinstance(x, partial):
        return (x.func, x.args, x.keywords)
    if isinstance(x, types.FunctionType):
        return (*map(_content, x.__closure__ or ()), x.__defaults__, x.__kwdefaults__)
    if isinstance(x, weakref.ref):
        return (x(),)
    if isinstance(x, (type, torch.Tensor)) or type(x) in weakref.ProxyTypes:
        return ()
    return list(vars(x).values()) if hasattr(x, "__dict__") else ()


def _held(x: Any) -> dict[Any, Any]:
    """What it has now of what may become another thing."""
    if type(x) in weakref.ProxyTypes:
        return {}
    cells = getattr(x, "__closure__", None) or ()
    return {**getattr(x, "__dict__", {}), **{i: _content(cell) for i, cell in enumerate(cells)}}


def _same(a: dict[Any, Any], b: dict[Any, Any]) -> bool:
    return len(a) == len(b) and all(b.get(key, b) is value for key, value in a.items())


def _content(cell: types.CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # nothing in it yet
        return None


def _named(fn: types.FunctionType, targets: Mapping[int, Any]) -> list[Any]:
    """The targets that a function calls by a global name, and the functions beside it."""
    found, codes = [], [fn.__code__]
    while codes:
        code = codes.pop()
        codes += [c for c in code.co_consts if isinstance(c, types.CodeType)]
        for name in code.co_names:
            value = fn.__globals__.get(name)
            constants_met = isinstance(value, types.FunctionType) and value.__globals__ is fn.__globals__
            if constants_met or id(value) in targets:
                found.append(value)
    return found


class Rewiring:
    """What things are where some of what they lead to is another; what leads to none of that stays the same object."""

    def __init__(self, known: Mapping[int, Any], targets: Mapping[int, Any], reach: Reach) -> None:
        """`known` has what is put in place of the objects of these ids, `targets` all that is to be replaced."""
        self.known, self.targets, self.reach = dict(known), targets, reach
        self.made: list[tuple[Any, Any, dict[str, Any], set[str]]] = []
        """What was copied, the copies, the attributes that these began with, and the names of those not to be left."""

    def of(self, x: Any) -> Any:
        kind = type(x)
        if kind in PLAIN or (kind in (tuple, list) and PLAIN.issuperset(map(type, x))):
            return x
        if id(x) in self.known:
            return self.known[id(x)]
        if not self.reach(x, self.targets):
            return x
        return self.module(x) if issubclass(type(x), nn.Module) else self._rebuilt(x)

    def module(self, module: nn.Module) -> nn.Module:
        raise EntangledError(type(module).__name__)

    def _rebuilt(self, x: Any) -> Any:
        kind: Any = type(x)
        if issubclass(kind, (list, dict, set, deque)):
            rebuilt = self.known[id(x)] = copy(x)
            rebuilt.clear()
            if issubclass(kind, dict):
                rebuilt.update({self.of(key): self.of(value) for key, value in x.copy().items()})
            elif issubclass(kind, set):
                rebuilt.update(map(self.of, x.copy()))
            else:
                rebuilt.extend(map(self.of, x.copy()))
        elif kind in (tuple, frozenset):
            rebuilt = kind(map(self.of, x))
        elif issubclass(kind, tuple) and (make := getattr(kind, "_make", None)):  # a named one
            rebuilt = make(map(self.of, x))
        elif kind is types.MethodType:
            rebuilt = types.MethodType(self.of(x.__func__), self.of(x.__self__))
        elif kind is partial:
            rebuilt = partial(self.of(x.func), *self.of(x.args), **self.of(x.keywords))
        elif kind is weakref.ref:
            rebuilt = weakref.ref(self.of(x()))
        elif isinstance(x, Remade):
            rebuilt = x.remade(self.of)
        else:
            return self._function(x) if kind is types.FunctionType else self._object(x)
        return self.known.setdefault(id(x), rebuilt)

    def _function(self, fn: types.FunctionType) -> types.FunctionType:
        if any(self.reach(x, self.targets) for x in _named(fn, self.targets)):
            raise EntangledError(f"{fn.__qualname__}, by a global name")
        waiting, cells = [], []
        for cell in fn.__closure__ or ():
            if id(cell) not in self.known:
                moves = self.reach(_content(cell), self.targets)
                self.known[id(cell)] = types.CellType() if moves else cell
                waiting += [cell] * moves
            cells.append(self.known[id(cell)])
        defaults = None if fn.__defaults__ is None else self.of(fn.__defaults__)
        rebuilt = types.FunctionType(fn.__code__, fn.__globals__, fn.__name__, defaults, tuple(cells) or None)
        self.known[id(fn)] = rebuilt
        rebuilt.__kwdefaults__ = self.of(fn.__kwdefaults__)
        rebuilt.__dict__.update(fn.__dict__)
        for cell in waiting:
            self.known[id(cell)].cell_contents = self.of(cell.cell_contents)
        return rebuilt

    def _object(self, x: Any) -> Any:
        """One of the caller's. What holds further objects that lead to the modules is more than a part of them."""
        kind, parts = type(x), computed_apart(x) if hasattr(x, "__dict__") else {}
        slots = [name for base in kind.__mro__ for name in getattr(base, "__slots__", ())]
        known = (*_CONTAINERS, types.FunctionType, types.MethodType, partial, weakref.ref, nn.Module, torch.Tensor)
        far = [v for v in parts.values() if not isinstance(v, (*known, Remade)) and self.reach(v, self.targets)]
        if slots or kind.__module__.startswith("torch.") or (far and not is_dataclass(x)):
            raise EntangledError(f"an object of {kind.__name__}")
        try:
            rebuilt = kind() if kind is types.SimpleNamespace else object.__new__(kind)
        except TypeError:  # made by a language other than Python
            raise EntangledError(f"an object of {kind.__name__}") from None
        self.known[id(x)] = rebuilt
        vars(rebuilt).update({name: self.of(value) for name, value in parts.items()})
        self.made.append((x, rebuilt, vars(rebuilt).copy(), set(cached(kind))))
        return rebuilt


class ModuleCopy(Rewiring):
    """The copy, whose tensors at some places are replaced."""

    def __init__(self, root: nn.Module, parts: list[nn.Module], replaced: Mapping[int, Any], reach: Reach) -> None:
        """`parts` are the modules of the tree; `replaced` has what comes in place of the tensors of these ids."""
        targets = {**replaced, **{id(m): m for m in parts}}
        super().__init__(replaced, targets, reach.of(targets))
        self._checked = set[type]()
        self.root = self.module(root)

    def module(self, module: nn.Module) -> nn.Module:
        old, kind = undivided(module, computed_apart(module)), type(module)
        _check_compiled(module)
        self._check_methods(kind)
        copied = self.known[id(module)] = object.__new__(kind)
        attributes, own, known = copied.__dict__, set(cached(kind)), self.known
        attributes.update(old)
        for part in ("_parameters", "_buffers"):
            attributes[part] = {name: known.get(id(x), x) for name, x in old[part].items()} if old[part] else {}
        attributes["_modules"] = {name: self.of(m) for name, m in old["_modules"].items()} if old["_modules"] else {}
        for part in _HOOKS:
            if old[part]:
                attributes[part] = self.of(old[part])
        if old["_forward_pre_hooks"]:
            hooks = self.of(old["_forward_pre_hooks"])
            attributes["_forward_pre_hooks"] = OrderedDict((key, _noted(hook, own)) for key, hook in hooks.items())
        for name in old.keys() - STANDARD:
            if type(old[name]) not in PLAIN and (rewired := self.of(old[name])) is not old[name]:
                attributes[name] = rewired
                own.add(name)
        self.made.append((module, copied, attributes.copy(), own))
        return copied

    def _check_methods(self, kind: type) -> None:
        """That they do not name the modules."""
        if kind in self._checked:
            return
        self._checked.add(kind)
        for base in kind.__mro__[: kind.__mro__.index(nn.Module)]:
            for fn in vars(base).values() if not base.__module__.startswith("torch.") else ():
                if isinstance(fn, types.FunctionType) and self.reach(fn, self.targets):
                    raise EntangledError(f"{fn.__qualname__}, by a name from outside of the module,")


def modules_of(root: nn.Module) -> list[nn.Module]:
    """The modules of a tree, each once."""
    waiting, found = [root], {id(root): root}
    while waiting:
        module = waiting.pop()
        _check_compiled(module)
        for m in module.__dict__["_modules"].values():
            if m is not None and id(m) not in found:
                found[id(m)] = m
                waiting.append(m)
    return list(found.values())


def _check_compiled(module: nn.Module) -> None:
    if not module.__dict__.keys().isdisjoint(_COMPILED) or isinstance(module, torch.jit.ScriptModule):
        raise EntangledError(f"the compiled code of {type(module).__name__}")


def _noted(hook: Callable, names: set[str]) -> Callable:
    """A hook that notes the names of the attributes that it sets."""

    def noted(module: nn.Module, *args: Any) -> Any:
        before = vars(module).copy()
        result = hook(module, *args)
        names.update(name for name, value in vars(module).items() if before.get(name, before) is not value)
        return result

    return noted
