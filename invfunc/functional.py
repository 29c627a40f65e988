"""From an `nn.Module` to a pure function and its parameters."""

from __future__ import annotations

import inspect
import threading
import traceback
import types
import warnings
from collections.abc import Callable, Mapping
from copy import deepcopy
from functools import cached_property, lru_cache
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from invfunc import tree
from invfunc._torch.generators import set_states, state_of, torchs_own
from invfunc._torch.opened import parametrized_anew
from invfunc._torch.sharded import divided, sharded, undivided, why_not_whole
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncWarning
from invfunc.transform import shown


def functional(model: Any, *, train: bool | None = None) -> tuple[Callable[..., Any], dict[str, torch.Tensor]]:
    """Make a pure function of a module: `f(params, *inputs, **kwargs) == model(*inputs, **kwargs)`.

    Args:
        model: any module, or a method of one (`model.encode`). Of a DistributedDataParallel it takes the module inside.
            Of a module under `fully_shard`, `f` runs without its hooks on whole parameters, as `distributed`
            gathers them.
        train: the mode in which `f` runs; None is the mode of the module when `f` is called. With `train=False`, a
            model with batch norm has statistics while it trains: `f` reads the running statistics, which the module
            itself goes on updating, and no sample depends on another.

    Returns:
        `(f, params)`. `params` maps the name of each parameter that requires grad to a detached alias of it; a tied
        parameter is there once. Buffers and frozen parameters are closed over, and so is a parameter that is missing
        (or None) in a call of `f`. Train or eval mode and hooks are those of the module when `f` is called. Parameters
        of the module are never changed; updates of its buffers in train mode (running statistics) are dropped. A
        `functools.cached_property` is computed by each call. Other attributes that forward sets stay on the module, so
        a later call may read a tensor computed from an earlier call's parameters: a call that does not read the
        parameter because of that warns. `f` has the signature of forward, copies and pickles as the module does.

    Raises:
        ArgumentTypeError: `model` is not an `nn.Module`; of `f`, its `params` are not a dict.
        ArgumentError: a submodule was made by torch.jit, or computes in another precision by `fully_shard`; of `f`,
            `params` has a name that the module does not have, or two tensors for a tied parameter; or forward reads a
            parameter where it cannot be replaced, as in a list of tensors.

    Example:
        >>> import torch, invfunc
        >>> f, params = invfunc.functional(torch.nn.Linear(3, 2))
        >>> sorted(params), f(params, torch.zeros(5, 3)).shape
        (['bias', 'weight'], torch.Size([5, 2]))

    Composes with: everything that takes a function of parameters, such as `torch.func.grad(f)`.

    Cost: that of calling the module. While `f` runs, the given parameters are in the module: calls in several threads
    wait for each other, and no other thread may call the module itself meanwhile. The first call looks for parameters
    that cannot be replaced, and for `torch.utils.checkpoint`; with the latter, later calls run on a shallow copy.

    Source: `torch.func.functional_call`.
    """
    is_method = isinstance(model, types.MethodType) and isinstance(model.__self__, nn.Module)
    model, method = (model.__self__, model.__name__) if is_method else (model, "__call__")
    if not isinstance(model, nn.Module):
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        what, hint = ("the class ", f": functional({kind}(...))") if isinstance(model, type) else ("a ", "")
        raise ArgumentTypeError(f"functional(model): model is {what}{kind}, but an nn.Module is needed{hint}.")
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            why = "model, or a part of it, was made by torch.jit, whose derivatives inside of torch.func are wrong"
            raise ArgumentError(f"functional(model): {why}. Give the module as it was before.")
        if why := why_not_whole(module):
            raise ArgumentError(f"functional(model): {why}.")
    if train is not None:  # a shallow copy has a mode of its own, and the module's parameters and buffers
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        model = _copy(model, {id(x): x for x in (*model.parameters(), *model.buffers())}).train(train)
    f = Functional(model, method)
    return f, {name: p.detach() for name, p in f.model.named_parameters() if p.requires_grad}


_SWAPPING = threading.RLock()
"""Held while a module has the parameters of a call."""


@shown
class Functional:
    """A module as a function of its parameters."""

    def __init__(self, model: nn.Module, method: str) -> None:
        model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
        self.model, self.method = model, method
        self.__name__ = self.__qualname__ = type(model).__name__ + ("" if method == "__call__" else f".{method}")
        self.__signature__ = _signature(getattr(model, "forward" if method == "__call__" else method))
        self._root, self._prefix = (model, "") if method == "__call__" else (_Method(model, method), "model.")
        self._shards = [name for name, p in model.named_parameters() if sharded(p)]
        self._special = bool(self._shards) or any(divided(type(m)) or _cached(type(m)) for m in model.modules())
        self._on_copy = self._special
        """True if f runs on a copy of the module: with cached properties, fully_shard or checkpointed parts."""
        self._known = set[Any]()
        """Modes of the module in which f has run, and the names of what was given."""

    def __reduce__(self) -> tuple:
        return Functional, (self.model, self.method)

    def __repr__(self) -> str:
        return f"functional({self.__name__})"

    def __call__(self, params: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(params, Mapping):
            raise ArgumentTypeError(
                f"{self!r}(params, ...): params is of type {type(params).__name__}, but has to be the dict of names "
                "that functional returns (f, params = functional(model)), or dict(model.named_parameters())."
            )
        if torch.compiler.is_compiling():
            if not self._special:
                return self._run(*self._state(params)[:2], args, kwargs)
            from invfunc._torch.eager import eagerly  # imports the compiler, which takes a second

            return eagerly(lambda args, kwargs: self(params, *args, **kwargs), args, kwargs)
        with _SWAPPING, parametrized_anew():
            values, state, training = self._state(params)
            mode = self._on_copy, torch.is_grad_enabled(), tuple(training), tuple(state)
            if mode in self._known:
                return self._run(values, state, args, kwargs)
            random, kept = {g: state_of(g) for g in torchs_own()}, [*map(_kept, self.model.modules())]
            try:
                with _FirstRun(self, values, args, kwargs) as first:
                    result = self._run(values, state, args, kwargs)
            except _CheckpointedError:
                set_states(random.items())
                self._on_copy = True
                return self(params, *args, **kwargs)
            first.check_kept(params)
            again = (*mode, "again")  # a call that leaves tensors on the module says what the next one reads
            left = kept != [*map(_kept, self.model.modules())]
            self._known.add(again if left and again not in self._known else mode)
            return result

    def _run(self, values: dict, state: dict, args: tuple, kwargs: dict) -> Any:
        if torch.compiler.is_compiling():
            given = {name: value for name, (value, *_) in state.items()}
            return torch.func.functional_call(self._root, given, args, kwargs, tie_weights=False)
        if self._on_copy:
            known = {id(p): p for p in self.model.parameters()} | values
            return getattr(_copy(self.model, known), self.method)(*args, **kwargs)
        try:
            for value, table, last, _ in state.values():
                table[last] = value
            return self._root(*args, **kwargs)
        finally:
            for _, table, last, x in state.values():
                table[last] = x

    def _state(self, params: Mapping[str, Any]) -> tuple[dict[int, Any], dict[str, tuple], list[bool]]:
        """The tensors that come in place of others, by the ids of these and by their names, with the dict of a module
        and the key at which the other one is; and modes of modules."""
        own, places, values, first, tables, training = {}, {}, {}, {}, {}, []
        for path, module in self._root.named_modules(remove_duplicate=False):
            training.append(module.training)
            for last, x in (*module._parameters.items(), *module._buffers.items()):
                if x is not None:
                    name = f"{path}.{last}" if path else last
                    own[name] = x
                    tables[name] = module._parameters if last in module._parameters else module._buffers, last, x
                    places.setdefault(id(x), {}).setdefault((id(module), last), name)
                    if module.training and last in module._buffers:
                        values[id(x)] = x.clone()
        for name, value in params.items():
            if (x := own.get(self._prefix + name)) is None:
                raise ArgumentError(f"{self!r}: params has {name!r}, which is not a parameter or buffer of the module.")
            if value is not None:
                if first.setdefault(id(x), name) != name and values[id(x)] is not value:
                    raise ArgumentError(f"{self!r}: {first[id(x)]!r} and {name!r} are one parameter; give one tensor.")
                values[id(x)] = value
        for name in self._shards:
            if id(own[self._prefix + name]) not in values:
                raise ArgumentError(f"{self!r}: params has no {name!r}, which is sharded: give it p.full_tensor().")
        new = [(n, value) for i, value in values.items() for n in places[i].values() if value is not own[n]]
        return values, {n: (value, *tables[n]) for n, value in new}, training


class _Method(nn.Module):
    """A module whose forward is a method of another."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model, self._method = model, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, self._method)(*args, **kwargs)


class _CheckpointedError(Exception):
    """A part of f is evaluated again when f is over, and the module has its own parameters."""


class _FirstRun(TorchFunctionMode):
    """A mode that sees parameters which are read although others are given, and calls of `checkpoint`."""

    def __init__(self, f: Functional, values: dict[int, Any], *inputs: Any) -> None:
        super().__init__()
        self.f, self.which = f, "a copy of the module" if f._on_copy else "the module"
        replaced = values.keys() - {id(x) for x in tree.tensors((values, inputs))}
        self.names = {id(x): name for name, x in f.model.named_parameters() if id(x) in replaced}
        self.values, self.read = values, set[int]()
        self.around = _checkpoints() if self.names and torch.is_grad_enabled() and not f._on_copy else float("inf")

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if _checkpoints() > self.around:
            raise _CheckpointedError
        result = func(*args, **(kwargs or {}))
        for x in tree.tensors((args, kwargs)) if tree.tensors(result) else ():
            self.read.add(id(x))
            if id(x) in self.names:
                raise ArgumentError(
                    f"{self.f!r}: {self.names[id(x)]!r} cannot be replaced, as {self.which} reads it, or its module, "
                    "from a list or a closure. Read it as an attribute of a submodule, as of an nn.ModuleList."
                )
        return result

    def check_kept(self, params: Mapping[str, Any]) -> None:
        """Warns of parameters that are not read, where their module reads a tensor that it has kept."""
        unread, where = [], ""
        for path, module in self.f.model.named_modules():
            own = {f"{path}.{name}" if path else name: id(p) for name, p in module._parameters.items()}
            read = [name for name, i in _kept(module) if i in self.read]
            if read:
                given = [name for name, i in own.items() if name in params and id(self.values.get(i)) not in self.read]
                unread, where = unread + given, read[0]
        if unread:
            others = f" (and {len(unread) - 1} more)" if unread[1:] else ""
            text = f"{self.f!r}: forward does not read {unread[0]!r}{others}, but a tensor that the module has kept in "
            text += f"its {where!r}: results do not depend on the parameter, and its gradient is zero. Empty "
            warnings.warn(text + f"{where!r} before each call.", InvFuncWarning, stacklevel=3)


def _kept(module: nn.Module) -> list[tuple[str, int]]:
    """Names of plain attributes of a module that are floating-point tensors, or lists and dicts of them, and ids."""
    plain = {name: x for name, x in vars(module).items() if name not in ("_parameters", "_buffers", "_modules")}
    containers = {name: x for name, x in plain.items() if isinstance(x, (torch.Tensor, dict, list, tuple))}
    return [(name, id(t)) for name, x in containers.items() for t in tree.tensors(x) if t.is_floating_point()]


def _checkpoints() -> int:
    """The number of calls of torch.utils.checkpoint that are running."""
    frames = (frame.f_globals for frame, _ in traceback.walk_stack(None))
    return sum(found.get("__name__") == "torch.utils.checkpoint" for found in frames)


def _copy(module: nn.Module, known: dict[int, Any]) -> Any:
    """A shallow copy of a tree of modules, with its own methods and blocks as attributes, and nothing cached."""
    if id(module) not in known:
        known[id(module)] = made = object.__new__(type(module))
        own = undivided(module, {n: x for n, x in vars(module).items() if n not in _cached(type(module))})
        for kind in ("_parameters", "_buffers"):
            own[kind] = {name: known.get(id(x), x) for name, x in own[kind].items()}
        own["_modules"] = {name: None if m is None else _copy(m, known) for name, m in own["_modules"].items()}
        for name, x in own.items():
            deep = isinstance(x, types.MethodType) or type(x).__module__.startswith("invfunc.")
            vars(made)[name] = deepcopy(x, known) if deep else x
    return known[id(module)]


@lru_cache(maxsize=1024)
def _cached(kind: type) -> set[str]:
    """The names of attributes that are computed when they are read first, and kept then."""
    return {name for base in kind.__mro__ for name, x in vars(base).items() if isinstance(x, cached_property)}


def _signature(forward: Callable) -> inspect.Signature:
    """The signature of forward, with the parameters of the module in front."""
    try:
        own = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        own = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    name = next(n for n in ("params", "module_params", "_params") if n not in {p.name for p in own})
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY), *own])
