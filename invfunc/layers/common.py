"""Common parts of the layers: checks of x, full precision, log-determinants, matrices with their biases."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any

import torch

from invfunc import tree
from invfunc.arguments.problem import of_numpy
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs.couplings import wide
from invfunc.pairs.pair import Invertible


@dataclass(frozen=True, repr=False)
class DataDependent(Invertible):
    """An `Invertible` whose parameters start from a batch."""

    law: Any = None

    def start(self, x: torch.Tensor) -> Any:
        """The parameters for a first batch."""
        return self.law.start(x)


def at_full_precision(op: Callable[..., torch.Tensor], x: torch.Tensor, *params: torch.Tensor | None) -> torch.Tensor:
    """`op(x, *params)` in the widest of their dtypes, given in that of x: what autocast rounds off is lost for the
    inverse."""
    dtype = reduce(torch.promote_types, [p.dtype for p in params if p is not None], x.dtype)
    if dtype.is_complex != x.is_complex():
        return op(x, *params)  # torch says what does not fit
    kind, params = x.device.type, tuple(None if p is None else p.to(dtype) for p in params)
    with torch.autocast(kind, enabled=False) if _autocasts(kind) else nullcontext():
        return op(x.to(dtype), *params).to(x.dtype)


def _autocasts(kind: str) -> bool:
    return torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)


def shape(x: torch.Tensor) -> tuple[int, ...]:
    """The shape as a plain tuple, which reads best in a message."""
    return tuple(x.shape)


def need_tensor(call: str, name: str, x: Any) -> None:
    """The first of the checks: each raises an error that opens with the call."""
    if not isinstance(x, torch.Tensor):
        array = f" Pass torch.as_tensor({name})." if of_numpy(x) else ""
        raise ArgumentTypeError(f"{call}: {name} is of type {type(x).__name__}, but has to be a tensor.{array}")


def need_axes(call: str, name: str, x: Any, form: str, least: int, most: int | None = None) -> None:
    """A tensor with so many axes; `form` says which."""
    need_tensor(call, name, x)
    if x.ndim < least or (most is not None and x.ndim > most):
        raise ArgumentError(f"{call}: {name} has shape {shape(x)}, but has to be {form}.")


def need_size(call: str, name: str, x: torch.Tensor, axis: int, size: int, why: str) -> None:
    """So many numbers along an axis; `why` says where the size is from."""
    if x.shape[axis] != size:
        place = "the last axis" if axis == -1 else f"axis {axis}"
        raise ArgumentError(f"{call}: {name} has shape {shape(x)}, but {place} has to have size {size}, {why}.")


def need_pair(call: str, name: str, given: Any, names: tuple[str, str]) -> tuple[torch.Tensor, torch.Tensor]:
    """Two tensors of these names, each with a number for each channel."""
    form = f"({names[0]}, {names[1]})"
    if not isinstance(given, (tuple, list)):
        kind = type(given).__name__
        raise ArgumentTypeError(f"{call}: {name} is of type {kind}, but has to be {form}, both [C].")
    if len(given) != 2:
        raise ArgumentError(f"{call}: {name} has {len(given)} entries, but has to be {form}, both [C].")
    for which, v in zip(names, given, strict=True):
        need_axes(call, which, v, "[C]", 1, 1)
    return given[0], given[1]


def need_number(call: str, name: str, value: Any) -> None:
    """A finite number above 0."""
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not number or not 0 < value < float("inf"):
        raise ArgumentError(f"{call}: {name} has to be a finite number above 0.")


def need_integers(call: str, name: str, values: Any, least: int) -> None:
    """A tuple or list of integers that are not too small."""
    if not isinstance(values, (tuple, list)):
        raise ArgumentTypeError(
            f"{call}: {name} is of type {type(values).__name__}, but has to be a tuple of integers."
        )
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ArgumentError(f"{call}: {value!r} in {name}, whose entries have to be integers of at least {least}.")


def need_count(call: str, name: str, value: Any) -> None:
    """An integer of at least 1."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ArgumentError(f"{call}: {name} has to be an integer of at least 1.")


def for_each(x: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """One value repeated for each entry of the leading axis of x, `[N]`."""
    return value.repeat(x.shape[0])


def keeps_volume(call: str, form: str = "[N, ...]", least: int = 1) -> Callable[..., torch.Tensor]:
    """The log-determinant of a layer that only moves or turns the numbers of each sample: zeros `[N]`."""
    return partial(_no_volume, f"{call}.log_det(x)", form, least)


def _no_volume(call: str, form: str, least: int, x: Any, params: Any = None) -> torch.Tensor:
    first = next(iter(tree.tensors(x)), x)
    need_axes(call, "x", first, form, least)
    return first.new_zeros(first.shape[0], dtype=torch.promote_types(first.dtype, torch.float32))


def weight_and_bias(call: str, params: Any, name: str = "W") -> tuple[torch.Tensor, torch.Tensor | None]:
    """The two of `(W, b)`, `(W, None)` or `W` alone."""
    if isinstance(params, torch.Tensor):
        return params, None
    if not isinstance(params, (tuple, list)):
        kind = type(params).__name__
        raise ArgumentTypeError(
            f"{call}: params is of type {kind}, but has to be {name}, ({name}, b) or ({name}, None)."
        )
    if len(params) != 2:
        raise ArgumentError(
            f"{call}: params has {len(params)} entries, but has to be {name}, ({name}, b) or ({name}, None)."
        )
    weight, bias = params
    need_tensor(call, name, weight)
    if bias is not None:
        need_tensor(call, "b", bias)
        if weight.ndim and shape(bias) != shape(weight)[:1]:
            raise ArgumentError(
                f"{call}: b has shape {shape(bias)}, but has to have shape {shape(weight)[:1]} beside {name} of shape "
                f"{shape(weight)}."
            )
    return weight, bias


def matrix_and_bias(call: str, params: Any, square: str = "") -> tuple[torch.Tensor, torch.Tensor | None]:
    """The weight, a matrix, and the bias; `square`: what the matrix is called if it has to be square."""
    name = square or "W"
    weight, bias = weight_and_bias(call, params, name)
    need_axes(call, name, weight, "[C, C]" if square else "[out, in]", 2, 2)
    if square and weight.shape[0] != weight.shape[1]:
        raise ArgumentError(f"{call}: {name} has shape {shape(weight)}, but has to be square.")
    if weight.shape[0] < weight.shape[1]:
        raise no_way_back(call, weight, weight.shape[1])
    return weight, bias


def no_way_back(call: str, weight: torch.Tensor, numbers: int) -> ArgumentError:
    """The error for a matrix that gives fewer numbers than it gets."""
    return ArgumentError(
        f"{call}: W has shape {shape(weight)}: it makes {weight.shape[0]} numbers of {numbers}, from which there is no "
        f"way back. It has to give at least as many as it gets: out >= {numbers}."
    )


def no_determinant(call: str, weight: torch.Tensor, numbers: int) -> ArgumentError:
    """The error for a matrix that gives more numbers than it gets, where a determinant is asked for."""
    return ArgumentError(
        f"{call}: W has shape {shape(weight)}: it makes {weight.shape[0]} numbers of {numbers}, so that dy/dx is not "
        f"square and has no determinant. A log-determinant needs out == {numbers}."
    )


def solved(y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """x `[..., in]` of `y = x W^T + b` `[..., out]`; for out > in the one with the least squared error."""
    z = wide(y) if bias is None else wide(y) - wide(bias)
    x = at_full_precision(_solved, z.reshape(-1, weight.shape[0]), wide(weight))
    return x.reshape(*y.shape[:-1], weight.shape[1]).to(y.dtype)


def _solved(rows: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    if w.shape[0] == w.shape[1]:
        return torch.linalg.solve(w.mT, rows, left=False)
    q, r = torch.linalg.qr(w)
    return torch.linalg.solve_triangular(r.mT, rows @ q, upper=False, left=False)


def log_abs_det(weight: torch.Tensor) -> torch.Tensor:
    """A number, -inf if the matrix is singular."""
    return torch.linalg.slogdet(wide(weight)).logabsdet


def rotation(a: torch.Tensor) -> torch.Tensor:
    """The rotation `-H_1 ... H_C` `[C, C]`, of the reflections `H_i = 1 - 2 v_i v_i^T / |v_i|^2`.

    v_i is column i of a below the diagonal, with a 1 on the diagonal and zeros above: a = 0 gives the identity.
    """
    below = wide(a).tril(-1)
    return -torch.linalg.householder_product(below, 2 / (1 + below.square().sum(-2)))
