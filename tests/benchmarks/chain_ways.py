"""The ways to run a chain: plain, the peers', ours."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import invfunc

from .chains import Block, Run, State, Way, Weights, couple, net, of_one_tensor, one_tensor, pair, uncouple

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
