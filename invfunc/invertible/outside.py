"""Tensors from outside that a function uses, and what they hold between two writes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch

from invfunc import tree
from invfunc._functorch import freed, level_of, plainly
from invfunc._scripted import Scripted
from invfunc.operations.calls import inplace_flag

_F = torch.nn.functional
_RUNNING = {
    _F.batch_norm: (1, 2, 5, "training", False),
    torch.batch_norm: (3, 4, 5, "training", False),
    _F.instance_norm: (1, 2, 5, "use_input_stats", True),
    torch.instance_norm: (3, 4, 5, "use_input_stats", True),
}
"""Which arguments are running statistics, and which says that they are written: their versions may not tell."""
_TABLES = {_F.embedding: 3, _F.embedding_bag: 4}
"""Which argument says that the rows that are looked up are renormalised where they stand."""
_IN_PLACE = {f"__i{name}__" for name in "add sub mul truediv floordiv mod pow and or xor lshift rshift".split()}
_IN_PLACE |= {"__setitem__", "__set__"}  # the latter of t.data = ...
_WRITES_NOTHING = frozenset("requires_grad_ detach_ share_memory_ rename_".split())


SHARDED = (
    "Are parameters gathered anew for each call, as by fully_shard of a part of the block? Shard the module that holds "
    "the whole block."
)


class State:
    """What a tensor holds between two writes, where it was kept."""

    def __init__(self) -> None:
        self.value: torch.Tensor | None = None
        self.needs = False
        """Whether the tensor needed a gradient."""

    def keep(self, tensor: torch.Tensor) -> None:
        """Keep what the tensor holds now, if its memory was not freed."""
        if self.value is None and not freed(tensor):
            with plainly() if level_of(tensor) is None else nullcontext():
                self.value, self.needs = tensor.detach().clone(), tensor.requires_grad


class Outside:
    """A tensor from outside, or another name of one."""

    def __init__(self, tensor: torch.Tensor, root: Outside | None = None) -> None:
        self.tensor = self.holder = tensor
        """The tensor, and what holds its numbers: a copy, where it was made an argument."""
        self.root = root or self
        self.read = self.written = False
        self.crossed = False
        """Whether one part wrote it while another was using it."""
        self.lift: int | None = None
        self.first = self.now = State()
        self._seen: dict[int, State] = {}

    def use(self, part: int) -> State:
        """Note that a part uses the tensor as it is now."""
        self.crossed |= self._seen.setdefault(part, self.now) is not self.now
        return self.now

    def write(self, part: int) -> None:
        """Note that a part has written to the tensor."""
        self.written = True
        self._seen[part] = self.now = State()

    def kept(self, state: State) -> bool:
        """Whether it is known what it held then; what it holds now is kept."""
        if state is self.now:
            state.keep(self.holder)
        return state.value is not None and level_of(state.value) is None


def targets(func: Callable, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call is known to write, or may write."""
    if isinstance(func, Scripted):
        state, _, *given = args
        return [*state.values(), *(t for t in tree.tensors(given) if not t.requires_grad)]
    if func in _RUNNING:
        mean, var, place, name, default = _RUNNING[func]
        statistics = (_argument(args, kwargs, mean, "running_mean"), _argument(args, kwargs, var, "running_var"))
        return tree.tensors(statistics) if _argument(args, kwargs, place, name, default) else []
    if func in _TABLES:
        renormalised = _argument(args, kwargs, _TABLES[func], "max_norm") is not None
        return tree.tensors(_argument(args, kwargs, 1, "weight")) if renormalised else []
    if _in_place(func):
        return tree.tensors(args[:1])
    return tree.tensors(kwargs["out"]) if kwargs.get("out") is not None else []


def wrote(func: Callable, args: tuple, written: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those tensors that a call has written, among those that it may write."""
    return [args[0][place] for place in func.wrote] if isinstance(func, Scripted) else written


def may_write(func: Callable) -> bool:
    """Whether a call writes a tensor for some of its arguments, besides `out`."""
    return func in _RUNNING or func in _TABLES or _in_place(func) or inplace_flag(func) is not None


@lru_cache(4096)
def _in_place(func: Callable) -> bool:
    name = getattr(func, "__name__", "")
    return name in _IN_PLACE or (name[-1:] == "_" and name[-2:] != "__" and name not in _WRITES_NOTHING)


def _argument(args: tuple, kwargs: dict[str, Any], place: int, name: str, default: Any = None) -> Any:
    return args[place] if place < len(args) else kwargs.get(name, default)


def depends(func: Callable, result: Any, outer: list[torch.Tensor]) -> bool:
    """Whether the result of a call that writes some tensors depends on what they held, too."""
    return func not in _RUNNING and any(not any(t is o for o in outer) for t in tree.tensors(result))
