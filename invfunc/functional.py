"""From an `nn.Module` to a pure function and its parameters."""

from __future__ import annotations

import inspect
import threading
import types
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncWarning
from invfunc.skeleton import EntangledError, Reach, Skeleton, modules_of


def functional(model: Any) -> tuple[Callable[..., Any], dict[str, torch.Tensor]]:
    """Make a pure function of a module: `f(params, *inputs, **kwargs) == model(*inputs, **kwargs)`.

    Args:
        model: any module, or a method of one (`model.encode`). It is never changed: `f` computes on a copy that shares
            everything with it but the parameters, so that threads may call `f` and the module at once.

    Returns:
        `(f, params)`. `params` maps the name of each parameter that requires grad to a detached alias of it; a tied
        parameter stands there once. Buffers and frozen parameters are closed over, as is a parameter that `f` is called
        without (or with None); train or eval mode and hooks are those of the module when `f` is called. What a module
        in train mode writes into its buffers (running statistics) is dropped. Attributes that its forward sets are set
        on the module by calls in the main thread. `f` has the signature of forward, copies and pickles as the module
        does.

    Raises:
        ArgumentTypeError: `model` is not an `nn.Module`; of `f`, its `params` are no dict.
        ArgumentError: of `f`, `params` names what the module does not have.

    Example:
        >>> import torch, invfunc
        >>> f, params = invfunc.functional(torch.nn.Linear(3, 2))
        >>> sorted(params), f(params, torch.zeros(5, 3)).shape
        (['bias', 'weight'], torch.Size([5, 2]))

    Composes with: everything that takes a function of parameters, such as `torch.func.grad(f)`.

    Cost: none beyond the call of the module. A module that cannot be copied for a call (it is compiled or scripted, or
    something outside of it calls it by a global name) gets the parameters while `f` runs, one call at a time; in
    another thread than the main one a warning says so.

    Source: `torch.func.functional_call`, without its change of the module.
    """
    method = "__call__"
    if isinstance(model, types.MethodType) and isinstance(model.__self__, nn.Module):
        model, method = model.__self__, model.__name__
    if not isinstance(model, nn.Module):
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        is_class = isinstance(model, type) and issubclass(model, nn.Module)
        hint = f" {kind} is a class of modules: functional({kind}(...))." if is_class else ""
        what = f"the class {kind}" if isinstance(model, type) else f"a {kind}"
        raise ArgumentTypeError(f"functional(model): model is {what}, but an nn.Module is needed.{hint}")
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    first = {id(p): name for name, p in model.named_parameters() if p.requires_grad}
    places = {
        f"{prefix}.{name}" if prefix else name: first[id(p)]
        for prefix, module in model.named_modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
        if id(p) in first
    }
    return Functional(model, method, places), params


_SWAPPING = threading.RLock()
"""Held while parameters are in a module itself, and while a copy of one is made."""


class Functional:
    """A module as a function of its parameters."""

    def __init__(self, model: nn.Module, method: str, places: dict[str, str]) -> None:
        """`places` are the names of the places of all parameters, with the name that each has among them."""
        self._model, self._method, self._places = model, method, places
        own = method if method != "__call__" else "forward"
        self.__name__ = self.__qualname__ = type(model).__name__ + ("" if method == "__call__" else f".{method}")
        self.__signature__ = _signature(getattr(model, own))
        self._reach = Reach()
        self._paths: dict[str, tuple[list[str], str]] = {}
        self._warned: set[str] = set()

    def __reduce__(self) -> tuple:
        return Functional, (self._model, self._method, self._places)

    def __repr__(self) -> str:
        return f"functional({self.__name__})"

    def __call__(self, params: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(params, Mapping):
            raise ArgumentTypeError(_no_params(self, params))
        if torch.compiler.is_compiling():  # which traces what is put into the module, and leaves the module alone
            return self._swapped(params, args, kwargs)
        try:
            with _SWAPPING:
                parts = modules_of(self._model)
                skeleton = Skeleton(self._model, parts, self._replaced(params, parts), self._reach)
        except EntangledError as error:
            if threading.current_thread() is not threading.main_thread():
                what = f"{error} leads to the module and cannot be copied, so that f puts its parameters into the"
                self._warn_once("entangled", f"{what} module while it runs; other threads must not call the module.")
            with _SWAPPING:
                return self._swapped(params, args, kwargs)
        result = getattr(skeleton.root, self._method)(*args, **kwargs)
        self._leave(skeleton)
        return result

    def _given(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What every place gets, the further places of a tied parameter included."""
        given = {name: x for name, x in params.items() if x is not None}
        return {**given, **{place: given[name] for place, name in self._places.items() if name in given}}

    def _replaced(self, params: Mapping[str, Any], parts: list[nn.Module]) -> dict[int, Any]:
        """What comes in place of tensors, by their ids: what is given, and copies of buffers that may be written."""
        training = [vars(m)["_buffers"] for m in parts if m.training]
        replaced = {id(b): b.clone() for buffers in training for b in buffers.values() if b is not None}
        for place, value in self._given(params).items():
            path, name = self._paths.get(place) or self._paths.setdefault(place, _split(place))
            own: dict[str, Any] = vars(self._model)
            for part in path:
                module = own["_modules"].get(part)
                if module is None:
                    raise self._unknown(place)
                own = vars(module)
            tensor = own["_parameters"].get(name)
            if tensor is None:
                tensor = own["_buffers"].get(name)
            if tensor is None:
                raise self._unknown(place)
            replaced[id(tensor)] = value
        return replaced

    def _unknown(self, place: str) -> ArgumentError:
        return ArgumentError(f"{self!r}: params has {place!r}, which is no parameter or buffer of the module.")

    def _swapped(self, params: Mapping[str, Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result where the module itself has the parameters for the time of the call."""
        buffers = {
            f"{prefix}.{name}" if prefix else name: buffer.clone()
            for prefix, module in self._model.named_modules()
            if module.training
            for name, buffer in module.named_buffers(recurse=False)
        }
        model, state = self._model, {**buffers, **self._given(params)}
        if self._method != "__call__":
            model, state = _Calls(model, self._method), {f"model.{name}": x for name, x in state.items()}
        return torch.func.functional_call(model, state, args, kwargs, tie_weights=False)

    def _leave(self, skeleton: Skeleton) -> None:
        """Attributes that forward has set are set on the module, unless other threads may be at work there."""
        left = skeleton.left()
        if not left:
            return
        if threading.current_thread() is not threading.main_thread():
            name, kind = left[0][1], type(left[0][0]).__name__
            self._warn_once("left", f"the call of {kind} sets its attribute {name!r}, which is not kept")
            return
        for module, name, part, value in left:
            (vars(module) if part is None else vars(module)[part])[name] = value

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"{self!r}: {text}", InvFuncWarning, stacklevel=4)


def _split(place: str) -> tuple[list[str], str]:
    *path, name = place.split(".")
    return path, name


class _Calls(nn.Module):
    """A module whose forward is a method of another."""

    def __init__(self, model: nn.Module, method: str) -> None:
        super().__init__()
        self.model, self.method = model, method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.model, self.method)(*args, **kwargs)


def _signature(forward: Callable) -> inspect.Signature:
    """That of forward, with the parameters of the module in front."""
    try:
        own = list(inspect.signature(forward).parameters.values())
    except (TypeError, ValueError):
        own = [inspect.Parameter("args", inspect.Parameter.VAR_POSITIONAL)]
    taken = {p.name for p in own}
    name = next(n for n in ("params", "module_params", "_params") if n not in taken)
    return inspect.Signature([inspect.Parameter(name, inspect.Parameter.POSITIONAL_ONLY), *own])


def _no_params(f: Functional, params: Any) -> str:
    kind = type(params).__name__
    text = f"{f!r}(params, ...): params is of type {kind}, but has to be the dict of names that functional returns"
    if isinstance(params, (list, tuple, types.GeneratorType)):
        return f"{text}, such as dict(model.named_parameters()), and not model.parameters()."
    return f"{text}: f, params = functional(model)."
