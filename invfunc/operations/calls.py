"""Calls of torch functions as a function mode sees them: what they ask, read, write and produce."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import lru_cache, partial
from types import FunctionType
from typing import Any

import torch

from invfunc import tree
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis.indices import advanced
from invfunc.operations.equations import equation
from invfunc.operations.operation import known

_IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()}
_IN_PLACE.add("__setitem__")


def spelled(name: str | None) -> str:
    """The name of a call in an error."""
    if not name or name.startswith(("get:_", "reduce")):
        return "a copy (by copy, pickle or torch.save)"  # which read such attributes
    return f"`.{name[4:]}`" if name.startswith("get:") else f"`{name}`"


@lru_cache(maxsize=4096)
def in_place(func: Callable) -> bool:
    """Whether a function works in place on its first argument."""
    name = getattr(func, "__name__", "").partition(".")[0]
    return name in _IN_PLACE or (name.endswith("_") and not name.endswith("__") and name != "requires_grad_")


@lru_cache(maxsize=4096)
def inplace_flag(func: Callable) -> int | None:
    """The position of the argument that makes a function of torch.nn.functional write into its input."""
    if getattr(func, "__module__", None) != "torch.nn.functional" or not isinstance(func, FunctionType):
        return None
    names = list(inspect.signature(func).parameters)
    return names.index("inplace") if "inplace" in names else None


def picking(name: str, args: tuple) -> tuple[bool, bool]:
    """Whether each entry of a result is one of the first argument, and whether none occurs twice."""
    picks = known(name).picks
    return picks != "no", picks == "once" or (name == "getitem" and not advanced(args[1]))


def read_by(name: str, args: tuple, kwargs: dict) -> list[torch.Tensor]:
    """The tensors whose values a call reads."""
    reads = known(name).reads
    if reads == "none":
        return []
    if reads == "first":
        args, kwargs = args[:1], {}
    return tree.tensors((args, kwargs))


def produced_by(out: Any) -> list[torch.Tensor]:
    return [out] if isinstance(out, torch.Tensor) else tree.tensors(out) if isinstance(out, (tuple, list)) else []


def _in_product(name: str, args: tuple, kwargs: dict, x: torch.Tensor, dim: int, param: torch.Tensor) -> int | None:
    """The dimension of a parameter that shares its label with a dimension of x in a product."""
    parsed = equation(name, args, kwargs)
    if parsed is None:
        return None
    label = next((s[dim] for s, y in zip(parsed.inputs, parsed.operands, strict=True) if y is x), None)
    own = next((s for s, y in zip(parsed.inputs, parsed.operands, strict=True) if y is param), None)
    if own is None and any(y is param for y, _ in parsed.added):
        own = parsed.output[len(parsed.output) - param.ndim :]
    return own.index(label) if label is not None and own is not None and label in own else None


def alignment(
    name: str, args: tuple, kwargs: dict[str, Any], param: torch.Tensor, placed: list[tuple[torch.Tensor, Axis]]
) -> Axis | None:
    """Where a parameter whose entries an operation pairs with samples has its sample axis."""
    for x, place in placed:
        own = known(name).paired
        if place.dim is None or (own is None and x.shape[place.dim] not in param.shape):
            continue
        dim = (own or partial(_in_product, name))(args, kwargs, x, place.dim, param)
        if dim is not None and 0 <= dim < param.ndim and param.shape[dim] == x.shape[place.dim]:
            return place.at(dim)
    return None
