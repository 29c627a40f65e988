"""A composition of transforms beside the same composition of a plain loop.

Private: records for the rules of the machine. What is put around a composition is that of the public laws.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.func import grad, jvp, vjp
from torch.utils._pytree import tree_map

from invfunc.kronecker import Kronecker


@dataclass(frozen=True, repr=False)
class Built:
    """`make()` is a function of `(params, x, y)[:arguments]`, and `oracle()` another one that should give the same.

    Both are made anew for each call, so that what is drawn starts from the same seed.
    """

    text: str
    make: Callable[[], Callable]
    oracle: Callable[[], Callable]
    arguments: int = 3
    least: int = 1
    """The fewest samples that it takes."""
    axes: tuple[str, ...] = ()
    """What it can be chunked over; none unless it is a statistic."""
    drawn: bool = False
    by_parameter: bool = False
    """Whether the result is a tree like the parameters."""
    within_func: bool = True
    """Whether torch.func may be around it; torch refuses its checkpoint, `torch.autograd` and broken graphs there."""
    smooth: bool = True
    """Whether it has derivatives."""
    batched: bool = False
    """Whether there is a vmap in it; of several, torch's own losses fail."""
    depth: int = 0
    """Derivatives and vmaps in it."""

    def __repr__(self) -> str:
        return self.text

    def around(self, text: str, transform: Callable) -> Built:
        """What should not change the result."""
        return replace(self, text=text, make=lambda: transform(self.make()))

    def mapped(self, text: str, transform: Callable, loop: Callable, **changed: Any) -> Built:
        """What changes the result as a loop changes the oracle's."""
        made = {"make": lambda: transform(self.make()), "oracle": lambda: loop(self.oracle())}
        return replace(self, text=text, **made, **changed)


def shown(result: Any) -> Any:
    """A result with the matrices that K-factors stand for: their eigenvectors have signs of their own."""
    return tree_map(
        lambda x: x.dense() if isinstance(x, Kronecker) else x, result, is_leaf=lambda x: isinstance(x, Kronecker)
    )


def compiled(t: Callable) -> Callable:
    """Seen through by dynamo; the backend would only compile what is not ours."""
    torch._dynamo.reset()
    return torch.compile(lambda *args: t(*args), backend="eager")


def loop_hvp(f: Callable, loss: Callable) -> Callable:
    """The Hessian times v, by torch.func."""

    def call(params: Any, v: Any, x: Any, y: torch.Tensor) -> Any:
        return vjp(grad(lambda p: loss(f(p, x), y)), params)[1](v)[0]

    return call


def loop_ggnvp(f: Callable, loss: Callable) -> Callable:
    """The GGN times v, by torch.func."""

    def call(params: Any, v: Any, x: Any, y: torch.Tensor) -> Any:
        z, along = jvp(lambda p: f(p, x), (params,), (v,))
        curved = vjp(grad(lambda z: loss(z, y)), z)[1](along)[0]
        return vjp(lambda p: f(p, x), params)[1](curved)[0]

    return call
