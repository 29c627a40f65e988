"""Weights with their biases as parameters, and what is computed with a matrix."""

from __future__ import annotations

from typing import Any

import torch

from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.layers.common import at_full_precision, need_axes, need_tensor, shape
from invfunc.pairs.couplings import wide


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
