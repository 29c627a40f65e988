"""Pairs and blocks as modules, which register the modules that they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

from torch import nn

from invfunc.errors import ArgumentError
from invfunc.pairs.value import Value


class BlockModule(nn.Module):
    """A pair, block or chain as a module: `module(x, *args, **kwargs)`.

    Args:
        block: what it calls, with the parameters of its own modules.
        pair: the pair of the block.
    """

    def __init__(self, block: Any, pair: Any) -> None:
        super().__init__()
        self.block = block
        of_parts = isinstance(getattr(pair.forward, "__self__", pair.forward), Value)
        self._of_parts = of_parts if pair.composition is None else not pair.composition.counted
        """Whether the block takes parameters in front of further arguments."""
        for name, module in _modules(pair):
            if module not in self._modules.values():
                self.add_module(f"{name}_{len(self._modules)}" if name in self._modules else name, module)
        if not self._modules:
            raise ArgumentError(
                f"{block!r}.module(): no part is a module that could be registered. Give modules as the parts, as in "
                "additive_coupling(nn.Linear(2, 2), nn.Linear(2, 2)); a module that holds what lambdas call registers "
                "it already."
            )

    def forward(self, x: Any, *args: Any, **kwargs: Any) -> Any:
        """What the block gives; further arguments go to its parts."""
        own = (None,) if self._of_parts and (args or kwargs) else ()
        return self.block(x, *own, *args, **kwargs)

    def extra_repr(self) -> str:
        return repr(self.block)


def _modules(pair: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules of a pair with their names; of a chain one for each block that has any."""
    if pair.composition is not None:
        blocks = enumerate(pair.composition.blocks)
        yield from ((str(i), BlockModule(block, block.pair)) for i, block in blocks if any(_modules(block.pair)))
        return
    names = getattr(getattr(pair.forward, "__self__", None), "names", [f"parts_{i}" for i in range(len(pair.shared))])
    for name, held in (*zip(names, pair.shared, strict=True), ("f", pair.forward), ("f_inv", pair.inverse)):
        yield from ((name, module) for module in _held(held))


def _held(value: Any) -> Iterator[nn.Module]:
    """The modules that a function of a pair is, or holds as its own."""
    if isinstance(value, nn.Module):
        yield value
    elif isinstance(value, MethodType):
        yield from _held(value.__self__)
    elif isinstance(value, (tuple, list, Value)):
        for inner in vars(value).values() if isinstance(value, Value) else value:
            yield from _held(inner)
