"""A reversible chain of additive couplings: ways to run it, and the table of their times."""

from __future__ import annotations

import argparse
import importlib.util
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import invfunc

from .measure import difference, medians
from .peers import Call
from .report import announce, difference_cell, number, over, print_table

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


def loss(y: State) -> Tensor:
    """The mean square of the output."""
    return y.square().mean() if isinstance(y, Tensor) else halves(y).sum()


def halves(y: State) -> Tensor:
    """The parts of the loss that come from each half of the output."""
    a, b = y.chunk(2, -1) if isinstance(y, Tensor) else y
    return torch.stack([a.square().mean(), b.square().mean()]) / 2


def backward(way: Way, chain: Chain) -> Call:
    """The gradients of the weights by `.backward()`."""
    run, weights = way.build(chain.blocks), list(leaves(chain.blocks))

    def call() -> list[Tensor | None]:
        loss(run(way.enter(chain.x), chain.blocks)).backward()
        grads = [w.grad for w in weights]
        for w in weights:
            w.grad = None
        return grads

    return call


def func_grad(way: Way, chain: Chain) -> Call:
    """The gradient of the function of the weights that torch.func takes."""
    weights = chain.detached()
    run = way.build(weights)
    gradient = grad(lambda weights, x: loss(run(way.enter(x), weights)))
    return lambda: gradient(weights, chain.x)


_MEMCNN, _INVTORCH = PACKAGES = ("memcnn", "invtorch")
INSTALL_PEERS = f"pip install --no-deps {' '.join(PACKAGES)}"


def missing() -> list[str]:
    """The packages of peers that are not installed."""
    return [package for package in PACKAGES if importlib.util.find_spec(package) is None]


def _one_by_one(block: Callable[[State, Block], State]) -> Callable[[Sequence[Block]], Run]:
    """The same function for each block."""

    def run(x: State, blocks: Sequence[Block]) -> State:
        for weights in blocks:
            x = block(x, weights)
        return x

    return lambda _: run


def _checkpointed(x: State, block: Block) -> State:
    return checkpoint(couple, x, block, use_reentrant=False)


def _modules(blocks: Sequence[Block], module: Callable[[nn.Module, nn.Module], Callable]) -> Run:
    """Blocks of modules around the weights of a chain."""
    modules = [module(_net(p), _net(q)) for p, q in blocks]

    def run(x: State, blocks: Sequence[Block]) -> State:
        for block in modules:
            x = block(x)
        return x

    return run


def _net(weights: Weights) -> nn.Module:
    """`net` as a module, of the weights themselves, so that their .grad is filled."""
    w, b, v, c = weights
    first, last = nn.Linear(w.shape[1], w.shape[0]), nn.Linear(v.shape[1], v.shape[0])
    for layer, weight, bias in ((first, w, b), (last, v, c)):
        assert isinstance(weight, nn.Parameter) and isinstance(bias, nn.Parameter)
        layer.register_parameter("weight", weight)
        layer.register_parameter("bias", bias)
    return nn.Sequential(first, nn.GELU(), last)


def _of_modules(blocks: Sequence[Block]) -> Run:
    """Blocks of modules with their own weights."""
    return _modules(blocks, lambda f, g: invfunc.invertible_checkpoint(invfunc.additive_coupling(f, g)))


def _closing_over(blocks: Sequence[Block]) -> Run:
    """Generic blocks whose functions close over modules."""

    def block(f: nn.Module, g: nn.Module) -> Callable:
        def forward(x: State) -> State:
            a = x[0] + f(x[1])
            return a, x[1] + g(a)

        def inverse(y: State) -> State:
            b = y[1] - g(y[0])
            return y[0] - f(b), b

        return invfunc.invertible_checkpoint(forward, inverse)

    return _modules(blocks, block)


def _memcnn(blocks: Sequence[Block]) -> Run:
    _quiet(_MEMCNN)
    import memcnn

    return _modules(blocks, lambda f, g: memcnn.InvertibleModuleWrapper(memcnn.AdditiveCoupling(f, g)))


def _invtorch(blocks: Sequence[Block]) -> Run:
    _quiet(_INVTORCH)
    import invtorch

    class Coupling(invtorch.nn.Module):
        def __init__(self, f: nn.Module, g: nn.Module):
            super().__init__()
            self.f, self.g = f, g

        def function(self, x: Tensor) -> Tensor:
            a, b = x.chunk(2, -1)
            a = a + self.f(b)
            return torch.cat([a, b + self.g(a)], -1)

        def inverse(self, y: Tensor) -> Tensor:
            a, b = y.chunk(2, -1)
            b = b - self.g(a)
            return torch.cat([a - self.f(b), b], -1)

    return _modules(blocks, Coupling)


def _quiet(package: str) -> None:
    """Hides torch's warnings about a peer's use of torch."""
    warnings.filterwarnings("ignore", module=package)


def _merged(**options: Any) -> Callable:
    return invfunc.invertible_checkpoint(invfunc.additive_coupling(net, net, **options))


def _ours(name: str, g: Callable[[], Callable], enter: Callable[[Tensor], State] = pair) -> Way:
    """One transformed function that is called for each block."""
    return Way(name, lambda blocks: _one_by_one(g())(blocks), enter, ours=True)


PLAIN = Way("plain, pair", _one_by_one(couple))
PLAIN_ONE = Way("plain, one tensor", _one_by_one(of_one_tensor(couple)), one_tensor)
CHECKPOINT = Way("torch checkpoint, pair", _one_by_one(_checkpointed))
MEMCNN = Way("MemCNN, one tensor", _memcnn, one_tensor, needs=_MEMCNN)
INVTORCH = Way("invtorch, one tensor", _invtorch, one_tensor, needs=_INVTORCH)
MERGED = _ours("merged, pair", _merged)
MERGED_ONE = _ours("merged, one tensor", lambda: _merged(split_dim=-1), one_tensor)
GENERIC = _ours("generic, pair", lambda: invfunc.invertible_checkpoint(couple, uncouple))
MODULES = Way("merged, modules", _of_modules, ours=True)
GENERIC_MODULES = Way("generic, modules", _closing_over, ours=True)
REPEATED = Way("repeated, pair", lambda blocks: invfunc.repeated(_merged()), ours=True)
CHAINED = Way("chain, pair", lambda blocks: invfunc.chain(*[_merged()] * len(blocks)), ours=True)


SMALL_CHAIN = "small_chain"
DEPTH, WIDTH, SAMPLES = 64, 64, 32
COMPARED = 4
"""Depth of the chain whose gradients are compared."""
_BACKWARD = [PLAIN, PLAIN_ONE, CHECKPOINT, MEMCNN, INVTORCH, MERGED, MERGED_ONE, MODULES, GENERIC, GENERIC_MODULES]
ROWS = {f".backward() {way.name}": (backward, way) for way in [*_BACKWARD, CHAINED, REPEATED]}
ROWS |= {f"torch.func.grad {way.name}": (func_grad, way) for way in (PLAIN, MERGED, GENERIC, CHAINED)}


def small_chain(name: str, options: argparse.Namespace) -> None:
    """Print seconds of a chain, as multiples of the plain way of the same kind and state."""
    device, absent = options.device, missing()
    if absent:
        print(f"{' and '.join(absent)}: missing, the rows stay empty: {INSTALL_PEERS}\n")
    few, chain = (Chain(depth, WIDTH, SAMPLES, device) for depth in (COMPARED, DEPTH))
    calls, differences, first = dict[str, Call](), dict[str, float](), None
    for row, (kind, way) in ROWS.items():
        if way.needs in absent:
            continue
        gradient = [*leaves(kind(way, few)())]
        first = first or gradient
        differences[row], calls[row] = difference(gradient, first), kind(way, chain)
    for call in [*calls.values()] * 2:
        call()
    seconds = medians(calls, dict.fromkeys(calls, options.repeats), device, partial(announce, name))
    announce(name, "")
    lines = []
    for row, (_, way) in ROWS.items():
        kind = row.removesuffix(way.name)
        plain = seconds[kind + (PLAIN_ONE if way.enter is one_tensor else PLAIN).name]
        line = {"": row, "s": number(seconds.get(row), 3), "over plain": number(over(seconds.get(row), plain))}
        lines.append(line | {"difference": difference_cell(differences.get(row))})
    print(
        f"{name}: forward and backward of {DEPTH} additive couplings, width {WIDTH}, N = {SAMPLES}; {device}, one "
        f"thread, median of {options.repeats} calls"
    )
    print_table(lines)
    print("over plain: of the same kind and state")
    print(f"difference: of the gradient of {COMPARED} blocks, relative to the largest entry of the first row's leaf\n")
