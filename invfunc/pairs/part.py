"""What a pair evaluates to change its state: functions, or modules with parameters of their own."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from invfunc import tree
from invfunc.callables import describe
from invfunc.errors import ArgumentTypeError
from invfunc.functional.functional import Functional
from invfunc.pairs.exact import Grid
from invfunc.pairs.value import Value


class OfModule(Value):
    """A module as a function `F(b, params, *args)`: of its own parameters, where None is given, or of those of
    `functional(module)`."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.f = Functional(module, "__call__")

    def __repr__(self) -> str:
        return describe(self.f)

    def __call__(self, b: Any, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        if params is None:
            return self.module(b, *args, **kwargs)
        if not isinstance(params, dict):
            raise ArgumentTypeError(
                f"the parameters of the module {self!r} are of type {type(params).__name__}, but have to be a "
                "dict as functional(module) gives it, or None for its own. Further inputs stand behind them."
            )
        return self.f(params, b, *args, **kwargs)


@dataclass(eq=False, repr=False)
class Rounded(Value):
    """A function whose results are put on a grid. It gets the state in the dtype of its parameters, if they have one;
    None stands in the place of parameters where none are given."""

    grid: Grid
    fn: Callable

    def __repr__(self) -> str:
        return describe(self.fn)

    def __call__(self, b: torch.Tensor, params: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        of_module = isinstance(self.fn, OfModule) and not isinstance(params, dict)
        weights = self.fn.module.parameters() if of_module else tree.tensors(params)
        kinds = {dtype for t in weights if (dtype := t.dtype).is_floating_point}
        dtype = kinds.pop() if len(kinds) == 1 else None
        own = () if params is None and not of_module else (params,)
        return self.grid.round(self.fn(b if dtype in (None, b.dtype) else b.to(dtype), *own, *args, **kwargs))


def as_part(call: str, which: str, fn: Any) -> Callable:
    """A function, or a module as one."""
    return OfModule(fn) if isinstance(fn, nn.Module) else needed(call, which, fn)


def needed(call: str, which: str, fn: Any) -> Callable:
    """A function that has to be one."""
    if not callable(fn):
        raise ArgumentTypeError(f"{call}: {which} is of type {type(fn).__name__}, but has to be a function.")
    return fn


def without(fn: Callable) -> tuple:
    """What stands in the place of the parameters of a part where none are given."""
    return (None,) if isinstance(fn, (OfModule, Rounded)) else ()
