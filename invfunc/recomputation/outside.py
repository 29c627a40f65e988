"""Tensors from outside that a function uses, and what they hold between two writes."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import level_of, memory_of, plainly, unwrapped, vmaps_of, wrapped_like
from invfunc._torch.scripted import Scripted
from invfunc.operations.heard import Function

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
        self.wrapped = False
        """Whether a transform of torch.func that the function uses itself was given it."""
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


def bare(tensor: torch.Tensor, above: int = 0) -> torch.Tensor:
    """The tensor without the wrappers of the transforms of torch.func above a level; itself where it has none."""
    while (level_of(tensor) or 0) > above and (inner := unwrapped(tensor)) is not None:
        tensor = inner
    return tensor


def rewrapped(instead: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor | None:
    """What takes the place of a bare tensor, in the wrappers; None where a transform differentiates in one of them."""
    inner = unwrapped(tensor)
    if inner is None:
        return instead
    found = rewrapped(instead, inner)
    differentiated = tensor.requires_grad and level_of(tensor) not in vmaps_of(tensor)
    return None if found is None or differentiated else wrapped_like(found, tensor)


def targets(function: Function, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call is known to write, or may write."""
    if not isinstance(function.func, Scripted):
        return function.written(args, kwargs)
    state, _, *given = args
    return [*state.values(), *(t for t in tree.tensors(given) if not t.requires_grad)]


def wrote(function: Function, args: tuple, written: list[torch.Tensor]) -> list[torch.Tensor]:
    """Those tensors that a call has written, among those that it may write."""
    func = function.func
    return [args[0][place] for place in func.wrote] if isinstance(func, Scripted) else written


def depends(function: Function, result: Any, outer: list[torch.Tensor]) -> bool:
    """Whether the result of a call that writes some tensors depends on what they held, too."""
    return not function.entry.aside and any(not any(t is o for o in outer) for t in tree.tensors(result))


def freed(x: torch.Tensor) -> bool:
    """Whether the memory of a tensor was freed behind its back, as fully_shard does."""
    return x.layout is torch.strided and x.numel() > 0 and not memory_of(x).nbytes()
