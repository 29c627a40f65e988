"""The states between blocks as a context notes them, which can then tell of those that are still in memory.

A weak reference of its memory is noted of each: that lives as long as any view of it, a detached tensor, an array of
numpy. So whoever has one of these is found, and the library is not, as it has let go of what a block took over.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any
from weakref import WeakSet

import torch

from invfunc import tree
from invfunc._torch.weak import memory_ref
from invfunc.recomputation.gathered import Gathered, Glance, open_here
from invfunc.recomputation.noted import found_otherwise, slot_of, state_of
from invfunc.recomputation.slots import Hooks, Slot, of_a_block


def names_of(name: str, form: tree.Form) -> list[str]:
    """The tensors of a tree as one would write them, behind its name."""
    named = tree.named_leaves(form.join(range(len(form.places))))
    return [name + named[place][0] for place in form.places]


class Giver:
    """A block that gives states out."""

    def __init__(self, block: Any) -> None:
        pair, names = block.report.block.pair, block.names("y")
        self.name = repr(pair)
        self.outputs = [_PARTS[name[:4]] + name[4:] for name in names] if pair.hidden else names
        self.number = 0
        """How many blocks come before it in its series."""


class State:
    """A tensor that a block gave out, or one from elsewhere that a block got.

    Args:
        tensor: it, which is not kept.
        giver: the block.
        output: which of its outputs it is.
        within: whether that was in the evaluation of another block, which gives out what is left at its end.
    """

    def __init__(self, tensor: torch.Tensor, giver: Giver | None = None, output: int = 0, within: bool = False) -> None:
        self.giver, self.output, self.within = giver, output, within
        self.last = giver
        """The last block that gave it out; others have handed it on."""
        self.shape, self.dtype, self.memory = tensor.shape, tensor.dtype, memory_ref(tensor)
        self.taken = False
        """Whether another block took it over, so that its slot let go of it."""


class Noted:
    """What was noted."""

    def __init__(self) -> None:
        self._states: list[State] = []
        self._gathered: WeakSet[Gathered] = WeakSet()
        self._lock = threading.Lock()
        self._room = _FEW
        self.empty = True
        """Whether nothing ever was."""

    def add(self, states: Sequence[State]) -> None:
        """Note some more, and forget those that are gone."""
        with self._lock:
            self.empty = False
            self._states += states
            if len(self._states) > self._room:
                self._states = [state for state in self._states if state.memory() is not None]
                self._room = max(2 * len(self._states), _FEW)

    def looks(self, glance: Glance) -> None:
        """Note where small tensors are held for a time, to be looked at together."""
        with self._lock:
            self._gathered.update(gathered for gathered, _ in glance.rows)

    def in_memory(self, taken: bool) -> Iterator[tuple[State, Giver, Any]]:
        """The states that are in memory, with who gave them out and their memory: of those that were taken over the
        ones that neither the caller's x nor another state keeps there; or those that were not."""
        with self._lock:
            states, waiting = [*self._states], [*self._gathered]
        for gathered in [*waiting, *open_here()]:  # also of blocks that were called behind the context
            gathered.seen()
        alive = [(state, memory) for state in states if (memory := state.memory()) is not None and memory.nbytes()]
        first = {id(memory): state for state, memory in reversed(alive)}
        own = {id(memory) for state, memory in alive if state.giver and not (state.taken or state.within)}
        for state, memory in alive:
            given = state.giver if first[id(memory)].giver else None
            if given and state.taken is taken and (id(memory) in own) is not taken:
                yield state, given, memory


class _Here(threading.local):
    """Who notes what the blocks of a thread do."""

    def __init__(self) -> None:
        self.noted: tuple[Noted, ...] = ()


HERE = _Here()


def giving(block: Any, output: int, slot: Slot, tensor: torch.Tensor, hooks: Hooks | None) -> None:
    """Note that a block gives a tensor out, which has this slot, among hooks on saved tensors."""
    if not HERE.noted:
        return
    if slot.state is None:
        slot.state = State(tensor, _giver(block), output, of_a_block(hooks))
        _add(slot.state)
    slot.state.last = _giver(block)


def getting(block: Any, xs: Sequence[torch.Tensor], slots: Sequence[Slot] | None = None) -> None:
    """Note that a block gets tensors, which may have slots; before it gives any out."""
    if not HERE.noted:
        return
    number = 0
    for x, slot in zip(xs, slots or found_otherwise(xs, [slot_of(x) for x in xs]), strict=True):
        state = state_of(x) if slot is None else slot.state
        if state is None:
            _add(State(x))
            continue
        state.taken |= slot is None
        number = max(number, state.last.number + 1)
    _giver(block).number = number + block.count - 1


def looking(glance: Any) -> None:
    """Note how tensors are looked at."""
    for noted in HERE.noted:
        if isinstance(glance, Glance):
            noted.looks(glance)


def _giver(block: Any) -> Giver:
    block.giver = block.giver or Giver(block)
    return block.giver


def _add(state: State) -> None:
    for noted in HERE.noted:
        noted.add([state])


_PARTS = {"y[0]": "y", "y[1]": "hidden"}
"""What comes of a pair that hides something."""
_FEW = 200
"""How many are noted before the first look at which of them are gone."""
