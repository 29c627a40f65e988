"""Sketches of the shares: each multiplied with drawn matrices, which keep inner products on average."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from invfunc._torch.functorch import plainly
from invfunc.linear_algebra.contract import contract, present, promoted, squeezed
from invfunc.reductions.gradients import EachSample
from invfunc.reductions.reduction import State


@dataclass(frozen=True)
class Projection:
    """The matrices that a parameter `[O, I]` is multiplied with: `first^T G rest`. Of a vector the rest is `[1, 1]`."""

    first: torch.Tensor
    """`[O, rows]`"""
    rest: torch.Tensor
    """`[I, columns]`"""

    def of(self, share: torch.Tensor) -> torch.Tensor:
        """The sketches `[b, rows * columns]` of shares `[b, *p]` that are there."""
        matrices = share.reshape(len(share), len(self.first), len(self.rest))
        terms = squeezed(promoted([("Noi", matrices), ("oR", self.first), ("iC", self.rest)]))
        return contract(terms, present("NRC", terms)).reshape(len(share), -1)


class Sketches(EachSample):
    """`P^T G[n] Q` of each sample, with P and Q that a key and the number of the parameter make."""

    def __init__(self, rows: int, columns: int, projection: str, key: int) -> None:
        self.rows, self.columns, self.projection, self.key = rows, columns, projection, key

    def step(self, shares: Any) -> State:
        return (shares.sketches(self.sides(shares.place, shares.leaf)),)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(n, self.rows * self.columns),)

    def sides(self, place: int, leaf: torch.Tensor) -> Projection:
        """The matrices of a parameter, the same ones in each call; a row or column of numbers has one of them."""
        size = leaf.shape[0] if leaf.ndim else 1
        others = leaf.numel() // max(1, size)
        dtype = torch.promote_types(leaf.dtype, torch.float32)
        with plainly():
            generator = torch.Generator().manual_seed(self.key + place)
            draw = partial(_drawn, PROJECTIONS[self.projection], generator=generator, dtype=dtype)
            if min(size, others) < 2:
                first, rest = draw(leaf.numel(), self.rows * self.columns), torch.ones(1, 1, dtype=dtype)
            else:
                first, rest = draw(size, self.rows), draw(others, self.columns)
            return Projection(first.to(leaf.device), rest.to(leaf.device))


def _drawn(kind: Callable, size: int, count: int, *, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """S `[size, count]`, where S S^T is the identity on average: with as many columns as rows always."""
    if size <= count:
        return torch.eye(size, count, dtype=dtype)
    return kind(size, count, dtype, generator)


def _signs(size: int, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random signs."""
    return torch.randint(2, (size, count), generator=generator, dtype=dtype).mul_(2).sub_(1).div_(math.sqrt(count))


def _sparse(size: int, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A random sign somewhere in each row."""
    columns = torch.randint(count, (size,), generator=generator)
    signs = torch.randint(2, (size,), generator=generator, dtype=dtype).mul_(2).sub_(1)
    return F.one_hot(columns, count) * signs[:, None]


def _mask(size: int, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Each column picks another row."""
    rows = torch.randperm(size, generator=generator)[:count]
    found = torch.zeros(size, count, dtype=dtype)
    found[rows, torch.arange(count)] = math.sqrt(size / count)
    return found


PROJECTIONS = {"signs": _signs, "sparse": _sparse, "mask": _mask}
"""The kinds of random matrices."""
