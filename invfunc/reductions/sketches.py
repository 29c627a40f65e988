"""Sketches of the shares: each multiplied with drawn matrices, which keep inner products on average."""

from __future__ import annotations

import math

import torch

from invfunc._functorch import plainly
from invfunc.per_sample import Shares, Sides
from invfunc.reductions.gradients import EachSample
from invfunc.reductions.reduction import State


class Sketches(EachSample):
    """`P^T G[n] Q` of each sample, with P and Q that a key and the number of the parameter make."""

    forms = "no"

    def __init__(self, rows: int, columns: int, key: int) -> None:
        self.rows, self.columns, self.key = rows, columns, key

    def step(self, shares: Shares) -> State:
        return (shares.sketches(self.sides(shares.place, shares.leaf)),)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(n, self.rows * self.columns),)

    def sides(self, place: int, leaf: torch.Tensor) -> Sides:
        """The matrices of a parameter, the same ones in each call; a row or column of numbers has one of them."""
        size = leaf.shape[0] if leaf.ndim else 1
        others = leaf.numel() // max(1, size)
        dtype = torch.promote_types(leaf.dtype, torch.float32)
        with plainly():
            generator = torch.Generator().manual_seed(self.key + place)
            if min(size, others) < 2:
                first = _drawn(leaf.numel(), self.rows * self.columns, generator, dtype)
                rest = torch.ones(1, 1, dtype=dtype)
            else:
                first = _drawn(size, self.rows, generator, dtype)
                rest = _drawn(others, self.columns, generator, dtype)
            return Sides(first.to(leaf.device), rest.to(leaf.device))


def _drawn(size: int, count: int, generator: torch.Generator, dtype: torch.dtype) -> torch.Tensor:
    """S `[size, count]`, where S S^T is the identity on average: with as many columns as rows always, else of random
    signs."""
    if size <= count:
        return torch.eye(size, count, dtype=dtype)
    return torch.randint(2, (size, count), generator=generator, dtype=dtype).mul_(2).sub_(1).div_(math.sqrt(count))
