"""What a pair evaluates to change its state: functions, or modules with parameters of their own."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from types import EllipsisType
from typing import Any

import torch
from torch import nn

from invfunc import tree
from invfunc._torch.functorch import unwatched, version
from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError, ModifiedError
from invfunc.functional.functional import Functional
from invfunc.pairs.exact import Grid
from invfunc.pairs.value import Value


class Part(Value, ABC):
    """A function `F(b, params, *args)` that knows where its parameters stand, also where none are given (...)."""

    @property
    @abstractmethod
    def __name__(self) -> str: ...

    @abstractmethod
    def __call__(self, b: torch.Tensor, params: Any = ..., *args: Any, **kwargs: Any) -> Any: ...

    @abstractmethod
    def dtype(self, params: Any) -> torch.dtype | None:
        """The dtype of the parameters; None if there are none, or of several."""


class OfModule(Part):
    """A module with its own parameters, or with those of `functional(module)`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.f = Functional(module, "__call__")

    @property
    def __name__(self) -> str:
        return describe(self.f)

    def __call__(self, b: torch.Tensor, params: Any = ..., *args: Any, **kwargs: Any) -> Any:
        if params is None or isinstance(params, EllipsisType):
            return self.module(b, *args, **kwargs)
        if not isinstance(params, dict):
            raise ArgumentTypeError(
                f"the parameters of the module {self.__name__} are of type {type(params).__name__}, but have to be a "
                "dict as functional(module) gives it, or None for its own. Further inputs stand behind them."
            )
        return self.f(params, b, *args, **kwargs)

    def dtype(self, params: Any) -> torch.dtype | None:
        return _dtype(params.values() if isinstance(params, dict) else self.module.parameters())


class OfFunction(Part):
    """A function that gets its parameters behind b, or nothing in their place."""

    def __init__(self, fn: Callable) -> None:
        self.fn = fn

    @property
    def __name__(self) -> str:
        return describe(self.fn)

    def __call__(self, b: torch.Tensor, params: Any = ..., *args: Any, **kwargs: Any) -> Any:
        return self.fn(b, *(() if isinstance(params, EllipsisType) else (params,)), *args, **kwargs)

    def dtype(self, params: Any) -> torch.dtype | None:
        return _dtype(tree.tensors(params))


@dataclass(eq=False, repr=False)
class Rounded(Part):
    """A part whose results are put on a grid. It gets the state in the dtype of its parameters."""

    grid: Grid
    part: Part

    @property
    def __name__(self) -> str:
        return self.part.__name__

    def __call__(self, b: torch.Tensor, params: Any = ..., *args: Any, **kwargs: Any) -> torch.Tensor:
        dtype = self.dtype(params)
        try:
            state = b if dtype in (None, b.dtype) else b.to(dtype)
            return self.grid.round(self.part(state, params, *args, **kwargs))
        except RuntimeError as error:
            if dtype is None and not torch.compiler.is_compiling():
                error.add_note(
                    f"{self.__name__} gets the state in {b.dtype}, as it is on a grid, since it has no parameters that "
                    f"tell another dtype. Weights of another one: lambda b: F(b.to(torch.bfloat16))."
                )
            raise

    def dtype(self, params: Any) -> torch.dtype | None:
        return self.part.dtype(params)


def _dtype(tensors: Any) -> torch.dtype | None:
    found = {dtype for t in tensors if (dtype := t.dtype).is_floating_point}
    return found.pop() if len(found) == 1 else None


def as_part(call: str, which: str, fn: Any) -> Callable:
    """A function, or a module as one."""
    if isinstance(fn, nn.Module):
        return OfModule(fn)
    if not callable(fn):
        raise ArgumentTypeError(f"{call}: {which} is of type {type(fn).__name__}, but has to be a function.")
    return fn


def of_part(fn: Callable) -> Part:
    """A function as a part."""
    return fn if isinstance(fn, Part) else OfFunction(fn)


def no_parameters(part: Callable) -> tuple:
    """What stands in their place."""
    return (...,) if isinstance(part, Part) else ()


@dataclass(frozen=True, repr=False)
class Unwritten(Value):
    """A part that may not write the state, which the pair needs again, and so does the caller."""

    call: str
    """The pair, as it was written."""
    which: str
    """What it calls the part."""
    fn: Callable

    @property
    def __name__(self) -> str:
        return describe(self.fn)

    def __call__(self, state: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            return self.fn(state, *args, **kwargs)
        with unwatched():  # it is no call of the part
            if state.is_inference():  # of which nobody counts the writes
                state = state.clone()
            before = version(state)
        result = self.fn(state, *args, **kwargs)
        with unwatched():
            written = version(state) != before
        if written:
            raise ModifiedError(
                f"{self.call}: {self.which} has written into the state that it was given, of shape "
                f"{list(state.shape)}, which the pair needs again, and so may you. Take inplace=False in its first "
                f"layers, or give them a copy: lambda x: {self.which}(x.clone())."
            )
        return result


def fitting(result: Any, like: torch.Tensor, call: str, which: str, name: str) -> torch.Tensor:
    """What a part gave, if it has the shape of what it changes; another one would be broadcast in silence."""
    if not isinstance(result, torch.Tensor):
        kind = type(result).__name__
        raise ArgumentTypeError(f"{call}: {which} returns something of type {kind}, but has to return a tensor.")
    if result.shape != like.shape:
        raise ArgumentError(
            f"{call}: {which} returns a tensor of shape {list(result.shape)}, but {name}, which it changes, has shape "
            f"{list(like.shape)}."
        )
    return result


def fitting_state(result: Any, like: Any, call: str, which: str, name: str) -> Any:
    """The same of a state that may be any pytree of tensors."""
    (came, form), (wanted, wanted_form) = tree.flatten(result), tree.flatten(like)
    if form != wanted_form:
        raise ArgumentError(
            f"{call}: {which} returns {_described(result)}, but {name}, which it changes, is {_described(like)}."
        )
    return tree.unflatten([fitting(t, of, call, which, name) for t, of in zip(came, wanted, strict=True)], wanted_form)


def _described(state: Any) -> str:
    if isinstance(state, torch.Tensor):
        return "a tensor"
    paths = ", ".join(path for path, _ in tree.named_leaves(state) if path)
    return f"a {type(state).__name__}" + (f" of {paths}" if paths else "")


def given_functions(functions: tuple, call: str, state: Any) -> Any:
    """The state, if the functions that a pair shares stand in front of it."""
    if not all(map(callable, functions)):
        raise ArgumentTypeError(
            f"{call}: forward, inverse and log_det of a pair get the functions that they share in front of x, as in "
            "pair.log_det(*pair.shared, x, params). with_log_det(pair) and invert(pair) take x or y alone."
        )
    return state
