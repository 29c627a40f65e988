"""A reversible chain of additive couplings, and the kinds of derivative that are taken of it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.nn import functional as F

from .peers import Call

Weights = tuple[Tensor, Tensor, Tensor, Tensor]
"""Weights of `Linear GELU Linear`."""
Block = tuple[Weights, Weights]
"""Of F and G."""
State = Any
"""One tensor `[N, width]`, or a pair of its halves."""
Run = Callable[[State, Sequence[Block]], State]


class Chain:
    """The weights of its blocks and an input, the same in each run."""

    def __init__(self, depth: int, width: int, rows: int, device: torch.device):
        generator = torch.Generator().manual_seed(0)
        half = width // 2
        bound = 1 / math.sqrt(half)

        def uniform(*shape: int) -> Tensor:
            return nn.Parameter(torch.empty(shape).uniform_(-bound, bound, generator=generator).to(device))

        def weights() -> Weights:
            return uniform(half, half), uniform(half), uniform(half, half), uniform(half)

        self.blocks: list[Block] = [(weights(), weights()) for _ in range(depth)]
        self.x = torch.randn(rows, width, generator=generator).to(device)

    def detached(self) -> list[Block]:
        """The weights as `torch.func` takes them: without requires_grad, or a second graph would be kept."""

        def plain(weights: Weights) -> Weights:
            w, b, v, c = weights
            return w.detach(), b.detach(), v.detach(), c.detach()

        return [(plain(p), plain(q)) for p, q in self.blocks]


def leaves(tree: Any) -> Iterator[Tensor]:
    """The tensors of nested lists and tuples."""
    if isinstance(tree, Tensor):
        yield tree
    else:
        for part in tree:
            yield from leaves(part)


def net(x: Tensor, weights: Sequence[Tensor]) -> Tensor:
    """F and G: `Linear GELU Linear`."""
    w, b, v, c = weights
    return F.linear(F.gelu(F.linear(x, w, b)), v, c)


def couple(state: tuple[Tensor, Tensor], block: Block) -> tuple[Tensor, Tensor]:
    """One block, of a pair."""
    a, b = state
    p, q = block
    a = a + net(b, p)
    return a, b + net(a, q)


def uncouple(state: tuple[Tensor, Tensor], block: Block) -> tuple[Tensor, Tensor]:
    """The inverse of `couple`."""
    a, b = state
    p, q = block
    b = b - net(a, q)
    return a - net(b, p), b


def of_one_tensor(block: Callable) -> Callable[[Tensor, Block], Tensor]:
    """A block of a pair as one of a tensor that is split and joined again."""
    return lambda x, weights: torch.cat(block(x.chunk(2, -1), weights), -1)


def one_tensor(x: Tensor) -> Tensor:
    """The input as a chain gets it: new, since peers wipe it."""
    return x.clone()


def pair(x: Tensor) -> tuple[Tensor, Tensor]:
    """Its halves."""
    a, b = x.chunk(2, -1)
    return a.clone(), b.clone()


@dataclass(frozen=True)
class Way:
    """A way to run the blocks."""

    name: str
    build: Callable[[Sequence[Block]], Run]
    """Makes it for the weights of a chain; modules take them here, functions at each call."""
    enter: Callable[[Tensor], State] = pair
    needs: str = ""
    """The package of a peer."""
    ours: bool = False


@dataclass(frozen=True)
class Kind:
    """A kind of derivative of the mean square of the output."""

    name: str
    build: Callable[[Way, Chain], Call]


def loss(y: State) -> Tensor:
    """The mean square of the output."""
    return y.square().mean() if isinstance(y, Tensor) else halves(y).sum()


def halves(y: State) -> Tensor:
    """The parts of the loss that come from each half of the output."""
    a, b = y.chunk(2, -1) if isinstance(y, Tensor) else y
    return torch.stack([a.square().mean(), b.square().mean()]) / 2


def _backward(way: Way, chain: Chain) -> Call:
    run, weights = way.build(chain.blocks), list(leaves(chain.blocks))

    def call() -> list[Tensor | None]:
        loss(run(way.enter(chain.x), chain.blocks)).backward()
        grads = [w.grad for w in weights]
        for w in weights:
            w.grad = None
        return grads

    return call


def _of_func(way: Way, chain: Chain) -> Call:
    """The gradient of the function of the weights that torch.func takes."""
    weights = chain.detached()
    run = way.build(weights)
    gradient = grad(lambda weights, x: loss(run(way.enter(x), weights)))
    return lambda: gradient(weights, chain.x)


BACKWARD = Kind(".backward()", _backward)
GRAD = Kind("torch.func.grad", _of_func)
