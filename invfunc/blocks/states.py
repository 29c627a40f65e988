"""States between blocks as a context notes them, which can then tell of those that are still in memory."""

from __future__ import annotations

import threading
from typing import Any, NamedTuple
from weakref import ref

import torch

from invfunc import tree
from invfunc._torch.weak import memory_ref
from invfunc.blocks.slots import Slot

_FEW = 200


class State(NamedTuple):
    """A tensor that a block gave out; or, without a block, the caller's x, or one that the next block keeps."""

    memory: ref[Any]
    slot: ref[Slot] | None
    """None within a run, which lets go of it at once."""
    block: Any
    number: int
    output: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def taken(self) -> bool:
        """Whether the next block took it over."""
        slot = self.slot and self.slot()
        return self.slot is None or (slot is not None and slot.later is not None)


class Noted:
    """States that blocks gave out."""

    def __init__(self) -> None:
        self.states: list[State] = []
        self.empty = True
        self._room = _FEW

    def add(self, states: list[State]) -> None:
        """Note some more, and forget those that are gone."""
        self.empty = False
        self.states += states
        if len(self.states) > self._room:
            self.states = [s for s in self.states if s.memory() is not None]
            self._room = max(2 * len(self.states), _FEW)


class _Here(threading.local):
    def __init__(self) -> None:
        self.noted: tuple[Noted, ...] = ()


HERE = _Here()


def note_kept(xs: list[torch.Tensor], kept: dict[int, Slot]) -> None:
    """Note the tensors of x that a block keeps."""
    for noted in HERE.noted:
        noted.add([_unnamed(xs[i], ref(slot)) for i, slot in kept.items()])


def _unnamed(x: torch.Tensor, slot: ref[Slot] | None = None) -> State:
    return State(memory_ref(x), slot, None, 0, "", tuple(x.shape), x.dtype)


def note(block: Any, number: int, y: Any, xs: list[torch.Tensor], slots: list[Slot] | None) -> None:
    """Note what a block gives out, and an x that no block gave out."""
    if not HERE.noted:
        return
    found = [_unnamed(x) for x in xs] if number == 0 else []
    named = [(path, t) for path, t in tree.named_leaves(y) if isinstance(t, torch.Tensor)]
    for (path, t), slot in zip(named, slots or [None] * len(named), strict=True):
        at = None if slot is None else ref(slot)
        found.append(State(memory_ref(t), at, block, number, "y" + path, tuple(t.shape), t.dtype))
    for noted in HERE.noted:
        noted.add(found)
