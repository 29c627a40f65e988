"""Numbers and trees of parameters that are said in a line of code, which is how they print."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import ArgumentError


class Numbers:
    """Float64 numbers that are float32 numbers too, so that one oracle serves both."""

    def __init__(self, seed: int = 0):
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=self.generator).double()

    def below(self, high: int, *shape: int) -> torch.Tensor:
        """Integers from 0 on."""
        return torch.randint(high, shape, generator=self.generator)


def seeded(seed: int = 0, device: str | torch.device = "cpu") -> torch.Generator:
    """A generator."""
    return torch.Generator(device).manual_seed(seed)


def moved(tensors: Any, dtype: torch.dtype, device: str | torch.device) -> Any:
    """Numbers in another precision and place; integers stay integers."""
    return tree.map_tensors(lambda x: x.to(device, dtype if x.is_floating_point() else x.dtype), tensors)


class Shape:
    """A leaf of so many entries, in a tree of parameters."""

    def __init__(self, *sizes: int) -> None:
        self.sizes = sizes

    def __repr__(self) -> str:
        return f"Shape({', '.join(map(str, self.sizes))})"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Shape) and self.sizes == other.sizes

    def __hash__(self) -> int:
        return hash(self.sizes)


@dataclass(frozen=True)
class Tied:
    """A leaf that is the tensor of an earlier one."""

    to: int
    """Which of those that have a shape, from 0."""


@dataclass(frozen=True)
class Parameters:
    """A tree of parameters, with a function `[N]` that reads all of them.

    >>> params = Parameters({"w": Shape(2, 3), "b": [None, Shape()], "again": Tied(0)}, seed=1).tree
    >>> params["w"].shape, params["b"][1].shape, params["again"] is params["w"]
    (torch.Size([2, 3]), torch.Size([]), True)
    """

    shapes: Any
    """Of dicts, lists and tuples, with `Shape`, `Tied` and None as leaves."""
    seed: int = 0
    dtype: torch.dtype = torch.float64
    device: str = "cpu"

    @cached_property
    def tree(self) -> Any:
        """The parameters."""
        rand, made = Numbers(self.seed), list[torch.Tensor]()

        def one(leaf: Any) -> Any:
            if isinstance(leaf, Shape):
                made.append(moved(rand(*leaf.sizes), self.dtype, self.device))
                return made[-1]
            return made[leaf.to] if isinstance(leaf, Tied) else leaf

        return tree.map_leaves(one, self.shapes)

    def inputs(self, n: int) -> torch.Tensor:
        """`[n, 2]`, for f."""
        return moved(Numbers(self.seed + 1)(n, 2), self.dtype, self.device)

    @staticmethod
    def f(params: Any, x: torch.Tensor) -> torch.Tensor:
        """`[N]`: each entry of each leaf at each sample."""
        at = x[:, :1] + torch.arange(3, dtype=x.dtype, device=x.device)
        parts = [(at[:, :1] * p.flatten() + x[:, 1:]).sin().sum(1) for p in tree.tensors(params)]
        return torch.stack(parts).sum(0).square()


def option(call: str, kind: str, name: str, known: dict[str, Callable]) -> Callable:
    """One of those that there are."""
    if name not in known:
        raise ArgumentError(f"{call}({name!r}): there is no {kind} {name!r}; there are {', '.join(map(repr, known))}.")
    return known[name]
