"""Parts of pairs: those of a state, and the functions or modules that are evaluated to change them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from invfunc import tree
from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError
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


# States


def two_parts(state: Any, call: str, name: str) -> tuple[Any, Any]:
    """The parts of x or y."""
    several = isinstance(state, (tuple, list))
    if several and len(state) == 2:
        if type(state[0]) is torch.Tensor or all(isinstance(t, torch.Tensor) for t in tree.leaves(state)):
            return state[0], state[1]
    came = type(state).__name__ + (f" of {', '.join(type(t).__name__ for t in state)}" if several else "")
    raise ArgumentError(
        f"{call}: {name} has to be a pair of tensors, but is {came}. (One tensor as the state: split_dim=. Methods of "
        "a pair get the functions that they share in front of it: pair.log_det(*pair.shared, x).)"
    )


def fitting(result: Any, like: Any, call: str, what: str, name: str) -> Any:
    """A result, if it has the form and the shapes of what it changes; others would be broadcast in silence."""
    tensors = isinstance(result, torch.Tensor) and isinstance(like, torch.Tensor)
    if tensors and result.shape == like.shape:
        return result
    (came, form), (wanted, like_form) = tree.flatten(result), tree.flatten(like)
    if form is None or form != like_form:
        kind = ArgumentError if tensors or form else ArgumentTypeError
        raise kind(f"{call}: {what} is {_described(result)}, but {name}, which it changes, is {_described(like)}.")
    return tree.unflatten([fitting(*each, call, what, name) for each in zip(came, wanted, strict=True)], form)


def _described(state: Any) -> str:
    if isinstance(state, torch.Tensor):
        return f"a tensor of shape {list(state.shape)}"
    paths = ", ".join(path for path, _ in tree.named_leaves(state) if path)
    return f"a {type(state).__name__} of {paths}" if paths else f"of type {type(state).__name__}"


def combined(fn: Callable, first: Any, *others: Any) -> Any:
    """What a function makes of the tensors of states of one form, each in its place."""
    if isinstance(first, torch.Tensor):
        return fn(first, *others)
    leaves, form = tree.flatten(first)
    return tree.unflatten([fn(*each) for each in zip(leaves, *map(tree.leaves, others), strict=True)], form)


def per_sample(t: torch.Tensor) -> torch.Tensor:
    """The sum over all axes but the leading one, at least in float32."""
    return wide(t).flatten(1).sum(1) if t.dim() > 1 else wide(t)


def wide(t: torch.Tensor) -> torch.Tensor:
    """At least in float32."""
    return t.to(torch.promote_types(t.dtype, torch.float32))
