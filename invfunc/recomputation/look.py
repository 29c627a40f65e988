"""A look at the calls of torch that a function makes, in a call that is watched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from invfunc import tree
from invfunc.operations.heard import Function, Listener
from invfunc.operations.naming import shaped_by_numbers
from invfunc.recomputation.purity import gives_tensors


class Look:
    """A look at the calls of torch that a function makes: whether each gives tensors, by its arguments alone."""

    def __init__(self) -> None:
        self.harmless = True
        self.on = True
        self.seen = False
        """Whether there was a call to look at."""

    def ends(self, harmless: bool = True) -> None:
        """The call has ended, or there is something in it that has to be watched."""
        self.seen, self.harmless = True, self.harmless and harmless

    def hears(self, function: Function, args: tuple, kwargs: dict[str, Any], result: Any) -> None:
        """Look at a call."""
        if self.harmless and self.on:
            entry = function.entry
            other = entry.asks != "no" or entry.saves_early or entry.registers or entry.differentiates or entry.exits
            writes = function.writes(args, kwargs) or bool(function.written(args, kwargs)) or "out" in kwargs
            known = gives_tensors(function.name) and not shaped_by_numbers(function.name, tree.tensors((args, kwargs)))
            gives = isinstance(result, torch.Tensor) or bool(tree.tensors(result))
            self.harmless = known and gives and not (other or writes or function.draws(args, kwargs))


@contextmanager
def paused(look: Look | None) -> Iterator[None]:
    """A context in which no look is taken."""
    if look is not None:
        look.on = False
    try:
        yield
    finally:
        if look is not None:
            look.on = True


def looking(look: Look | None) -> AbstractContextManager:
    """A context in which a look is taken, if it is one."""
    return nullcontext() if look is None else _Looking(look)


class _Looking(Listener):
    def __init__(self, look: Look) -> None:
        super().__init__()
        self._look = look

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        result = function.func(*args, **kwargs)
        self._look.hears(function, args, kwargs, result)
        return result
