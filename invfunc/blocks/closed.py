"""Tensors and modules that functions close over: where they stand, what they were, and others in their place.

By the contract of f these are its only inputs beside its arguments and torch's random numbers. They are found by
structure, once for a block, and narrowed to those whose memory the first call reads: a lambda over `self` reaches the
whole network.
"""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from invfunc import tree
from invfunc._torch.functorch import TorchDispatchMode, storage_of

_DEEP = 8
"""How deep containers and objects are looked into."""
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
Place = tuple[Any, Any]
"""A container, and the key at which a tensor stands in it."""


_REGISTERED = [0]


@cache
def _watch() -> None:
    def count(*_: Any) -> None:
        _REGISTERED[0] += 1

    register_module_module_registration_hook(count)
    register_module_parameter_registration_hook(count)


def _registered() -> int:
    """How many submodules and parameters modules have been given, from the first call on."""
    _watch()
    return _REGISTERED[0]


class _Cell:
    """A cell of a closure as a container."""

    __slots__ = ("cell",)

    def __init__(self, cell: types.CellType) -> None:
        self.cell = cell

    def __getitem__(self, key: int) -> Any:
        return self.cell.cell_contents

    def __setitem__(self, key: int, value: Any) -> None:
        self.cell.cell_contents = value


class Closed:
    """What functions close over.

    Args:
        functions: the functions.
    """

    def __init__(self, functions: Sequence[Any]) -> None:
        self.places: list[Place] = []
        """Where tensors stand that a call reads."""
        self.modules: list[nn.Module] = []
        self.generators: list[torch.Generator] = []
        self._registered = _registered()
        self._functions = functions
        self._seen: set[Any] = set()
        for function in functions:
            self._look(function, _DEEP)
        self.places = [(c, k) for c, k in self.places if type(c[k]) in _PLAIN]
        with_buffers = [m for m in self.modules if any(b is not None for b in m._buffers.values())]
        self.norms = [m for m in with_buffers if type(m) in _BATCH_NORMS and m.track_running_stats]
        """Modules whose buffers do not influence what they compute in train mode."""
        self.stateful = [m for m in with_buffers if m not in self.norms]
        """Modules whose buffers may do so."""
        self.scratch: dict[int, dict[str, torch.Tensor | None]] = {}
        """Buffers for the norms to write to in another evaluation."""
        self.learned = not self.places
        self._found = {(id(c), k) for c, k in self.places}, {*map(id, self.modules)}
        del self._seen

    def renewed(self) -> Closed:
        """The same as long as modules have the same submodules and parameters; what is there instead otherwise."""
        if self._registered != _registered():
            now = Closed(self._functions)
            if now._found != self._found:
                return now
            self._registered = now._registered
        return self

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in their places."""
        return [container[key] for container, key in self.places]

    def learn(self, read: set[int]) -> None:
        """Keep the places of those tensors whose memory was read."""
        self.places = [(c, k) for c, k in self.places if storage_of(c[k]) in read]
        self.learned = True

    def written_by(self, module: nn.Module) -> dict[str, torch.Tensor | None]:
        """Buffers for a norm to write to."""
        found = self.scratch.get(id(module))
        if found is None or any(
            b is not None and (found[k] is None or found[k].device != b.device) for k, b in module._buffers.items()
        ):
            copies = {k: None if b is None else b.detach().clone() for k, b in module._buffers.items()}
            found = self.scratch[id(module)] = copies
        return found

    def _put(self, container: Any, key: Any, value: Any, deep: int) -> None:
        if isinstance(value, torch.Tensor):
            at = id(container.cell if isinstance(container, _Cell) else container), key
            if at not in self._seen:
                self._seen.add(at)
                self.places.append((container, key))
        elif value is not None and not isinstance(value, (int, float, str, type, types.ModuleType)):
            self._look(value, deep)

    def _look(self, held: Any, deep: int) -> None:
        if deep == 0 or id(held) in self._seen:
            return
        self._seen.add(id(held))
        down = deep - 1
        if isinstance(held, nn.Module):
            for module in held.modules():
                if module is held or id(module) not in self._seen:
                    self._seen.add(id(module))
                    self._of_module(module, down)
        elif isinstance(held, types.FunctionType):
            self._of_function(held, down)
        elif isinstance(held, types.MethodType):
            self._look(held.__self__, down)
            self._look(held.__func__, down)
        elif isinstance(held, torch.Generator):
            self.generators.append(held)
        elif isinstance(held, partial):
            for value in (held.func, *held.args):
                self._look(value, down)
            for key, value in held.keywords.items():
                self._put(held.keywords, key, value, down)
        elif isinstance(held, (list, dict)):
            for key, value in [*(enumerate(held) if isinstance(held, list) else held.items())]:
                self._put(held, key, value, down)
        elif isinstance(held, tuple):
            for value in held:
                self._look(value, down)
        elif hasattr(held, "__dict__"):
            for key, value in [*vars(held).items()]:
                self._put(vars(held), key, value, down)

    def _of_module(self, module: nn.Module, down: int) -> None:
        self.modules.append(module)
        for held in (module._parameters, module._buffers):
            for key, value in held.items():
                self._put(held, key, value, down)
        own = vars(module)
        for key, value in [*own.items()]:
            if isinstance(value, (torch.Tensor, types.FunctionType)):
                self._put(own, key, value, down)

    def _of_function(self, fn: types.FunctionType, down: int) -> None:
        for cell in fn.__closure__ or ():
            try:
                self._put(_Cell(cell), 0, cell.cell_contents, down)
            except ValueError:  # not filled yet
                pass
        for value in (*(fn.__defaults__ or ()), *(fn.__kwdefaults__ or {}).values()):
            self._look(value, down)
        if not (fn.__module__ or "").startswith(("torch", "invfunc.")):
            for name in _names(fn.__code__):
                value = fn.__globals__.get(name)
                if isinstance(
                    value, (torch.Tensor, nn.Module, types.FunctionType, list, dict, partial, torch.Generator)
                ):
                    self._put(fn.__globals__, name, value, down)


def _names(code: types.CodeType) -> Iterator[str]:
    """The global names of a code and of those within it."""
    yield from code.co_names
    for const in code.co_consts:
        if isinstance(const, types.CodeType):
            yield from _names(const)


class Reading(TorchDispatchMode):
    """Notes which memory is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for t in tree.tensors((args, kwargs)):
            self.read.add(storage_of(t))
        return func(*args, **(kwargs or {}))


@contextmanager
def swapped(places: Sequence[Place], tensors: Sequence[Any]) -> Iterator[None]:
    """A context with other tensors in some places."""
    before = [container[key] for container, key in places]
    try:
        for (container, key), t in zip(places, tensors, strict=True):
            container[key] = t
        yield
    finally:
        for (container, key), t in zip(places, before, strict=True):
            container[key] = t
