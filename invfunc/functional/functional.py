"""From an `nn.Module` to a pure function and its parameters."""

from __future__ import annotations

import threading
import types
import warnings
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import nn

from invfunc._torch.functorch import transforming
from invfunc._torch.parametrized import parametrized_anew
from invfunc._torch.scripted import Interpreted
from invfunc._torch.sharded import divided, sharded, why_not_whole
from invfunc._torch.weak import WeakIdSet
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncError, InvFuncWarning
from invfunc.functional.cached import cached, computed_anew
from invfunc.functional.left_behind import left, put_back
from invfunc.functional.method import Calls, signature_of
from invfunc.functional.module_copy import EntangledError, ModuleCopy, Reach, modules_of
from invfunc.functional.remade import Remade
from invfunc.functional.strays import RecomputedError, StaleError, StrayError, Strays, kept
from invfunc.transform import shown


def functional(model: Any) -> tuple[Callable[..., Any], dict[str, torch.Tensor]]:
    """Make a pure function of a module: `f(params, *inputs, **kwargs) == model(*inputs, **kwargs)`.

    Args:
        model: any module (of a DistributedDataParallel, the one in it), or a method of one (`model.encode`). It is
            never changed: `f` computes on a copy that shares all but the parameters, so that threads may call both. Of
            one that `fully_shard` divides, `f` runs without its hooks on whole parameters, as `distributed` gives it.

    Returns:
        `(f, params)`. `params` maps the name of each parameter that requires grad to a detached alias of it; a tied
        parameter stands there once. Buffers and frozen parameters are closed over, as is a parameter that `f` is called
        without (or with None); train or eval mode and hooks are those of the module when `f` is called. What a module
        in train mode writes into its buffers (running statistics) is dropped. Attributes that its forward sets are set
        on the module by calls in the main thread, but a `functools.cached_property` is computed by each call; hooks get
        the copy, and what they set in the backward pass is set there. A tensor in an attribute that the module itself
        has computed from its parameters without a graph is taken for a constant. `f` has the signature of forward,
        copies and pickles as the module does.

    Raises:
        ArgumentTypeError: `model` is not an `nn.Module`; of `f`, its `params` are not a dict.
        ArgumentError: of `f`, `params` names what the module does not have, or gives a tied parameter two values; the
            module keeps a parameter where it cannot be replaced; it is checkpointed and cannot be copied; forward reads
            from an attribute what an earlier call has computed from parameters; or fully_shard changes the precision.

    Example:
        >>> import torch, invfunc
        >>> f, params = invfunc.functional(torch.nn.Linear(3, 2))
        >>> sorted(params), f(params, torch.zeros(5, 3)).shape
        (['bias', 'weight'], torch.Size([5, 2]))

    Composes with: everything that takes a function of parameters, such as `torch.func.grad(f)`.

    Cost: none beyond the call of the module. A module that cannot be copied for a call (it is compiled or scripted, or
    something outside of it keeps it: a global name, an object with slots) gets the parameters while `f` runs, one call
    at a time; in another thread than the main one a warning says so. The first call sees whether a way leads past the
    copy, and is begun again if one does.

    Source: `torch.func.functional_call`, without its change of the module.
    """
    is_method = isinstance(model, types.MethodType) and isinstance(model.__self__, nn.Module)
    model, method = (model.__self__, model.__name__) if is_method else (model, "__call__")
    model = model.module if isinstance(model, nn.parallel.DistributedDataParallel) else model
    if not isinstance(model, nn.Module):
        kind = model.__name__ if isinstance(model, type) else type(model).__name__
        is_class = isinstance(model, type) and issubclass(model, nn.Module)
        hint = f" {kind} is a class of modules: functional({kind}(...))." if is_class else ""
        what = f"the class {kind}" if isinstance(model, type) else f"a {kind}"
        raise ArgumentTypeError(f"functional(model): model is {what}, but an nn.Module is needed.{hint}")
    if why := next(filter(None, map(why_not_whole, model.modules())), ""):
        raise ArgumentError(f"functional(model): {why}.")
    params = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    first = {id(p): name for name, p in model.named_parameters()}
    places = {
        f"{prefix}.{name}" if prefix else name: first[id(p)]
        for prefix, module in model.named_modules()
        for name, p in module.named_parameters(recurse=False, remove_duplicate=False)
    }
    return Functional(model, method, places), params


_NO_COPY = (StrayError, AttributeError, LookupError, ReferenceError, TypeError)
"""What is raised where something outside of the modules knows them, and does not know a copy."""
_SWAPPING = threading.RLock()
"""Held while parameters are in a module itself, and while a copy of one is made."""


@shown
class Functional(Remade):
    """A module as a function of its parameters."""

    def __init__(self, model: nn.Module, method: str, places: dict[str, str]) -> None:
        """`places` are the names of the places of all parameters, with the name that each has among them."""
        self._model, self._method, self._places = model, method, places
        own = method if method != "__call__" else "forward"
        self.__name__ = self.__qualname__ = type(model).__name__ + ("" if method == "__call__" else f".{method}")
        self.__signature__ = signature_of(getattr(model, own))
        self._reach = Reach()
        self._parts = [name for name, p in model.named_parameters() if sharded(p)]  # of parts, here
        self._warned: set[str] = set()
        self._proven: set[Any] = set()
        """The modes of the modules and the parameters with which f has run on a copy and read nothing else."""
        self._computed: dict[Any, WeakIdSet] = {}
        """What a first call has computed from its parameters, where it has left some of it on the module."""
        self._entangled: dict[Any, str] = {}
        """The modes and parameters with which f cannot run on a copy, and why."""

    def remade(self, of: Callable[[Any], Any]) -> Functional:
        made = object.__new__(Functional)
        new = {"_model": of(self._model), "_reach": Reach(), "_proven": set(), "_computed": {}, "_entangled": {}}
        vars(made).update(vars(self) | new)
        return made

    def __reduce__(self) -> tuple:
        return Functional, (self._model, self._method, self._places)

    def __repr__(self) -> str:
        return f"functional({self.__name__})"

    def __call__(self, params: Any, /, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(params, Mapping):
            raise ArgumentTypeError(_no_params(self, params))
        if torch.compiler.is_compiling():  # which traces what is put into the module, and leaves the module alone
            if not self._parts:
                return self._swapped(self._given(params))(args, kwargs)
            from invfunc._torch.eager import eagerly  # imports the compiler, which takes a second

            return eagerly(lambda args, kwargs: self(params, *args, **kwargs), args, kwargs)
        given = self._given(params)
        with parametrized_anew():
            return self._called(given, args, kwargs)

    def _called(self, given: Mapping[str, Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result on a copy, or in place where something leads past every copy."""
        mode, names = None, dict[int, str]()
        with _SWAPPING:
            try:
                parts = modules_of(self._model)
                replaced, names = self._replaced(given, parts)
                mode = tuple([m.training for m in parts]), frozenset(names.values())
                if why := self._entangled.get(mode):
                    raise EntangledError(why)
                module_copy = ModuleCopy(self._model, parts, replaced, self._reach)
            except EntangledError as error:
                return self._in_place(partial(self._swapped(given), args, kwargs), names, mode, str(error))
        call, why = partial(getattr(module_copy.root, self._method), *args, **kwargs), ""
        if mode in self._proven:
            result = call()
            self._leave(module_copy)
            return result
        strays = Strays(names, given=given.values(), kept=kept(parts, self._computed.get(mode)))
        try:
            result = strays.run(call)
        except StaleError as error:
            raise ArgumentError(
                f"{self!r}: {error} was computed from parameters by an earlier call, and is read in this one, "
                "which may have others. Take it off the module, and let forward compute it in each call, or make "
                "it a functools.cached_property, which each call computes once."
            ) from None
        except InvFuncError:
            raise
        except _NO_COPY as error:
            said = f"keeps {strays.met!r} or its module" if strays.met else f"raises {error!r}"
            why = f"something that {said}"
        if why:
            strays.rewind()
            with _SWAPPING:
                result = self._in_place(partial(self._swapped(given), args, kwargs), names, mode, why)
            self._entangled[mode] = why
            return result
        self._leave(module_copy)
        put_back(module_copy, repr(self))
        if mode not in self._computed and kept(parts, strays.computed):  # which the next call is not to read
            self._computed[mode] = strays.computed
        else:
            self._proven.add(mode)
        return result

    def _in_place(self, swapped: Callable[[], Any], names: dict[int, str], mode: Any, why: str) -> Any:
        """The result where the parameters are put into the module itself."""
        if threading.current_thread() is not threading.main_thread():
            what = f"{why} leads to the module and cannot be copied, so that f puts its parameters into the"
            self._warn_once("entangled", f"{what} module while it runs; other threads must not call the module.")
        if ("in place", mode) in self._proven or not names:
            return swapped()
        strays = Strays(names, in_place=True)
        try:
            result = strays.run(swapped)
        except RecomputedError:
            raise ArgumentError(
                f"{self!r}: a part of the module is checkpointed, and {why} leads to the module and cannot be copied: "
                "what is computed again in the backward pass would have the parameters of the module. Switch "
                "checkpointing off in it, or checkpoint f as a whole."
            ) from None
        except StrayError:
            raise ArgumentError(
                f"{self!r}: {strays.met!r} cannot be replaced, as the module also reads it by {why}, which keeps the "
                "tensor itself. Keep the module that has it there, and read it as an attribute of that."
            ) from None
        self._proven.add(("in place", mode))
        return result

    def _given(self, params: Mapping[str, Any]) -> dict[str, Any]:
        """What every place gets, the further places of a tied parameter included."""
        given: dict[str, Any] = {}
        for place, x in params.items():
            first = self._places.get(place, place)
            if x is not None and given.setdefault(first, x) is not x:
                raise ArgumentError(
                    f"{self!r}: params has two tensors, of which one is {place!r}, for one parameter of the module, "
                    f"{first!r}; give one of them."
                )
        if missing := [name for name in self._parts if name not in given]:
            raise ArgumentError(
                f"{self!r}: params has no {missing[0]!r}, of which the module has a part only in each process. Give it "
                "as a whole, p.full_tensor(), also where it is frozen."
            )
        return {**given, **{place: given[first] for place, first in self._places.items() if first in given}}

    def _replaced(self, given: Mapping[str, Any], parts: list[nn.Module]) -> tuple[dict[int, Any], dict[int, str]]:
        """What comes in place of tensors, by their ids: what is given, and copies of buffers that may be written.

        With the names of those that are given and of another value.
        """
        training = [m._buffers for m in parts if m.training]
        replaced = {id(b): b.clone() for buffers in training for b in buffers.values() if b is not None}
        names: dict[int, str] = {}
        owner, own = None, self._model
        for place, value in given.items():
            path, _, name = place.rpartition(".")
            if path != owner:
                owner, own = path, self._part(path, place)
            tensor = own._parameters.get(name)
            if tensor is None:
                tensor = own._buffers.get(name)
            if tensor is None:
                raise self._unknown(place)
            replaced[id(tensor)] = value
            if value is not tensor:
                names[id(tensor)] = place
        return replaced, names

    def _part(self, path: str, place: str) -> nn.Module:
        """The module at a path, which has the tensor at a place."""
        module: Any = self._model
        for name in path.split(".") if path else ():
            module = module._modules.get(name)
            if module is None:
                raise self._unknown(place)
        return module

    def _unknown(self, place: str) -> ArgumentError:
        return ArgumentError(f"{self!r}: params has {place!r}, which is not a parameter or buffer of the module.")

    def _swapped(self, given: Mapping[str, Any]) -> Callable[[tuple, dict[str, Any]], Any]:
        """The call for whose time the module itself has the parameters."""
        if self._parts and any(divided(type(m)) for m in self._model.modules()):
            raise ArgumentError(
                f"{self!r}: something outside of the module keeps it (a global name, compiled code), so that f cannot "
                "run on a copy, and in it the hooks of fully_shard put its own parameters in place of those given. "
                "Make f of the module before fully_shard, and pass it the parameters of this one."
            )
        buffers = {
            f"{prefix}.{name}" if prefix else name: buffer.clone()
            for prefix, module in self._model.named_modules()
            if getattr(module, "training", False)  # a frozen one has neither
            for name, buffer in module.named_buffers(recurse=False)
        }
        model, state = self._model, {**buffers, **given}
        if self._method != "__call__" or isinstance(model, torch.jit.ScriptModule):  # which functional_call refuses
            model, state = Calls(model, self._method), {f"model.{name}": x for name, x in state.items()}
        call = partial(torch.func.functional_call, model, state, tie_weights=False)
        contexts, modules = [], list(self._model.modules())
        if any(cached(type(m)) for m in modules):
            contexts.append(partial(computed_anew, modules))
        if any(isinstance(m, torch.jit.ScriptModule) for m in modules) and not torch.compiler.is_compiling():
            contexts += [Interpreted] * transforming()
        if not contexts:
            return call

        def within(args: tuple, kwargs: dict[str, Any]) -> Any:
            with ExitStack() as stack:
                for context in contexts:
                    stack.enter_context(context())
                return call(args, kwargs)

        return within

    def _leave(self, module_copy: ModuleCopy) -> None:
        """Attributes that forward has set are set on the module, unless other threads may be at work there."""
        if not (found := left(module_copy)):
            return
        if threading.current_thread() is not threading.main_thread():
            name, kind = found[0][1], type(found[0][0]).__name__
            self._warn_once("left", f"the call of {kind} sets its attribute {name!r}, which is not kept")
            return
        for module, name, part, value in found:
            (vars(module) if part is None else vars(module)[part])[name] = value

    def _warn_once(self, key: str, text: str) -> None:
        if key not in self._warned:
            self._warned.add(key)
            warnings.warn(f"{self!r}: {text}", InvFuncWarning, stacklevel=4)


def _no_params(f: Functional, params: Any) -> str:
    kind = type(params).__name__
    text = f"{f!r}(params, ...): params is of type {kind}, but has to be the dict of names that functional returns"
    if isinstance(params, (list, tuple, types.GeneratorType)):
        return f"{text}, such as dict(model.named_parameters()), and not model.parameters()."
    return f"{text}: f, params = functional(model)."
