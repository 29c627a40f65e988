"""Where the tensors between blocks are: in memory, or behind the block that took them over.

A block `y = f(x)` has a slot for every tensor of x and of y. The slots of a chain are its memory:

    x1 --f1--> x2 --f2--> x3            a block knows the slots of its y, a slot the block that took its tensor over
      slot 1     slot 2     slot 3      only slot 3 holds a tensor: it was taken over by nobody

When f2 takes x2 over, slot 2 lets go of it: whoever needs it asks f2, which inverts itself from slot 3. In a backward
pass each block fills the slots of its x, which is where the block before it looks for its y.

Nothing here refers in circles: a slot refers to the block behind it, and that block to the slot only weakly.
"""

from __future__ import annotations

import weakref
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import EllipsisType
from typing import Any

import torch

from invfunc._torch.functorch import saving_hooks, version
from invfunc._torch.sharded import gathered_again
from invfunc.errors import ModifiedError
from invfunc.recomputation.like import same_memory
from invfunc.recomputation.rounding import Error

Hooks = tuple[Callable, Callable]
Tensors = Sequence[torch.Tensor]


class Taker(ABC):
    """What takes tensors over."""

    @property
    @abstractmethod
    def sources(self) -> list[Slot]:
        """The slots of what it computes them from."""

    @abstractmethod
    def invert(self) -> None:
        """Give them back, from the sources, which are in memory."""


class Slot:
    """One tensor of x or y. It is held until a block takes it over; a tensor that the user holds is found anyway."""

    state: Any = None
    """What is noted of the tensor (`states`), where somebody notes it."""

    def __init__(self, tensor: torch.Tensor, hooks: Hooks | None) -> None:
        self._version = version(tensor)
        self._users = weakref.ref(tensor)
        self._within = None if hooks is None else hooks[0]
        """The hook that saved tensors go through: that of a block or checkpoint whose function is being evaluated."""
        self._held: Held | None = None
        self.block: Taker | None = None
        """The block that took the tensor over."""
        self.gathering: Sequence[Any] = ()
        """What `fully_shard` gathers parameters with that this block reads, and those behind it in its module."""
        self.error: Error = 0.0
        """The error of the tensor that the block gave back; NaN if its pass failed before it was compared."""
        self.waits = False
        """Whether the tensor that the block gave back is still to be compared, in the pass that is running."""

    def hold(self, tensor: torch.Tensor, hooks: Hooks | None) -> None:
        """Keep the tensor in memory, or with what takes the place of saved tensors, unless a block can give it back."""
        if self.block is None and self._held is None:
            self._held = Held(tensor, hooks=hooks)

    def find(self) -> torch.Tensor | None:
        """The tensor, where it is in memory as it was."""
        users = self._users()
        if users is not None and version(users) == self._version:
            return users.detach()
        held = self._held  # of which another thread may let go
        return None if held is None else held.get()

    def is_of(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is as it was when the slot was made, and it was made within the same evaluation."""
        hooks = saving_hooks()
        return version(tensor) == self._version and self._within == (None if hooks is None else hooks[0])

    def take_over(self, block: Taker) -> None:
        """Let go of the tensor, which the block can give back."""
        self.block, self._held = block, None
        if self.state is not None:
            self.state.taken = True

    def fill(self, tensor: torch.Tensor, error: Error, waits: bool) -> None:
        """Hold a tensor that was given back."""
        self._held = Held(tensor, users=False)
        self.error, self.waits = error, waits

    def release(self) -> None:
        """Let go of a tensor that can be given back again."""
        if self.block is not None:
            self._held = None
        elif self._held is not None:
            self._held.let_go()

    def is_slot_of(self, tensor: torch.Tensor) -> bool:
        """Whether this very tensor was put in."""
        return self._users() is tensor and self.is_of(tensor)

    def is_in_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether another object is the tensor that is held, as it was."""
        own = self._held
        held = None if own is None else own.tensor
        return held is not None and self.is_of(tensor) and self.is_of(held) and same_memory(held, tensor)


class Between(Slot):
    """One tensor of a state that nobody but two blocks has had: no node tells of it, and nobody writes it."""

    def __init__(self, block: Taker) -> None:
        self.block, self.gathering, self.error, self.waits = block, (), 0.0, False
        self._tensor: torch.Tensor | None = None

    def find(self) -> torch.Tensor | None:
        return self._tensor

    def fill(self, tensor: torch.Tensor, error: Error, waits: bool) -> None:
        self._tensor, self.error, self.waits = tensor.detach(), error, waits

    def release(self) -> None:
        self._tensor = None


class Held:
    """A tensor in memory, detached, or in the care of the hooks that take the place of saved tensors around us."""

    _ours = False

    def __init__(self, tensor: torch.Tensor, users: bool = True, hooks: Hooks | None | EllipsisType = ...) -> None:
        if hooks is ...:
            hooks = saving_hooks() if users else None
        self.tensor = tensor.detach() if hooks is None else None
        self._version = version(tensor) if users and hooks is None else None
        """None where the caller has it not, and cannot write into it."""
        if hooks is not None:
            self._ours = of_a_block(hooks)
            pack, self._unpack = hooks
            origins = getattr(getattr(pack, "__self__", None), "origins", None)
            with nullcontext() if origins is None else origins.paused:  # it is saved by no call
                self._packed = pack(tensor)

    def get(self) -> torch.Tensor:
        """The tensor, as it was."""
        tensor = self.tensor  # of which another thread may let go
        if tensor is None:
            tensor = self.tensor = self._unpack(self._packed).detach()
        if self._version is not None and version(tensor) != self._version:
            raise ModifiedError(
                f"a tensor of shape {list(tensor.shape)} that is needed for a gradient has been modified by an "
                "inplace operation: an argument of an invertible block, or the output from which its input is "
                "computed. Write y = y + z in place of y += z."
            )
        return tensor

    def let_go(self) -> None:
        """Forget a tensor that a block around us can give back any number of times."""
        if self._ours:
            self.tensor = None


def of_a_block(hooks: Hooks | None) -> bool:
    """Whether hooks are those of a block, whose function is being evaluated."""
    return hooks is not None and isinstance(getattr(hooks[0], "__self__", None), Taker)


def fetch(slots: Sequence[Slot]) -> list[torch.Tensor]:
    """The tensors of some slots; blocks that took them over are inverted, from the last one on."""
    found = [slot.find() for slot in slots]
    if all(tensor is not None for tensor in found):
        return [tensor for tensor in found if tensor is not None]
    blocks: list[tuple[Taker, Sequence[Any]]] = []
    needed = slots
    while True:
        found = [slot.find() for slot in needed]
        lost = next((slot for slot, tensor in zip(needed, found, strict=True) if tensor is None), None)
        if lost is not None:
            assert lost.block is not None
            blocks.append((lost.block, lost.gathering or (blocks[-1][1] if blocks else ())))
            needed = lost.block.sources
        elif blocks:
            block, gathering = blocks.pop()
            with gathered_again(gathering):
                block.invert()
            needed = blocks[-1][0].sources if blocks else slots
        else:
            return [tensor for tensor in found if tensor is not None]
