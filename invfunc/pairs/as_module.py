"""Pairs and blocks as modules, which register the modules that they are made of."""

from __future__ import annotations

from collections.abc import Iterator
from types import MethodType
from typing import Any

from torch import nn

from invfunc.errors import ArgumentError
from invfunc.pairs.part import Unwritten
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
        by_parts = isinstance(getattr(pair.forward, "__self__", None), Value)
        self._of_parts = by_parts if pair.composition is None else not pair.composition.counted
        """Whether the block takes parameters in front of further arguments."""
        for name, part in _modules(pair):
            self.add_module(name, part)
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
    """The modules of a pair, each once, with their names; of a chain one for each block that has any."""
    if pair.composition is not None:
        for i, block in enumerate(pair.composition.blocks):
            try:
                yield str(i), BlockModule(block, block.pair)
            except ArgumentError:  # a block without modules
                continue
        return
    seen = dict[int, str]()
    for name, part in (*_parts("parts", pair.shared), *_parts("f", pair.forward), *_parts("f_inv", pair.inverse)):
        if id(part) not in seen:
            name = name if name not in seen.values() else f"{name}_{len(seen)}"
            seen[id(part)] = name
            yield name, part


def _parts(name: str, held: Any) -> Iterator[tuple[str, nn.Module]]:
    """The modules that a function of a pair is, or holds as its own, with names for them."""
    if isinstance(held, nn.Module):
        yield name, held
    elif isinstance(held, Unwritten):
        yield from _parts(held.which if held.which.isidentifier() else "f", held.fn)
    elif isinstance(held, MethodType):
        yield from _parts(name, held.__self__)
    elif isinstance(held, (tuple, list)):
        for i, inner in enumerate(held):
            yield from _parts(f"{name}_{i}", inner)
    elif isinstance(held, Value):
        for inner in vars(held).values():
            yield from _parts(name, inner)
