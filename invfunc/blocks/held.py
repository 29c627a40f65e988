"""States between blocks that are still in memory, as somebody holds them; a context notes what blocks give out."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from types import TracebackType
from typing import Any, NamedTuple
from weakref import ref

import torch

from invfunc import tree
from invfunc._extras import table
from invfunc._torch.weak import memory_ref
from invfunc.blocks.link import Slot
from invfunc.budget import told

_FEW = 200


class HeldState(NamedTuple):
    """A tensor that a block gave out; or, without a block, the caller's x, or one that the next block keeps."""

    memory: ref[Any]
    slot: ref[Slot] | None
    """None within a run, which lets go of it at once."""
    made_by: Any
    number: int
    """Number of blocks before that one in its series."""
    output: str
    """The output of the block that it is."""
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def block(self) -> str:
        """The block that gave it out."""
        return repr(self.made_by.pair)

    @property
    def bytes(self) -> int:
        """Bytes of the memory that it is a part of; 0 when that is gone."""
        memory = self.memory()
        return 0 if memory is None else memory.nbytes()

    @property
    def taken(self) -> bool:
        """Tells whether the next block took it over."""
        slot = self.slot and self.slot()
        return self.slot is None or (slot is not None and slot.later is not None)

    def __str__(self) -> str:
        what = f"{self.output}, {list(self.shape)} {self.dtype}, {told(self.bytes)}"
        return f"block {self.number}: {what}, of {self.block}"


class _Here(threading.local):
    def __init__(self) -> None:
        self.noted: tuple[HeldStates, ...] = ()


HERE = _Here()


def note_kept(xs: list[torch.Tensor], kept: dict[int, Slot]) -> None:
    """Note the tensors of x that a block keeps."""
    for noted in HERE.noted:
        noted.add([_unnamed(xs[i], ref(slot)) for i, slot in kept.items()])


def _unnamed(x: torch.Tensor, slot: ref[Slot] | None = None) -> HeldState:
    return HeldState(memory_ref(x), slot, None, 0, "", tuple(x.shape), x.dtype)


def note(block: Any, number: int, y: Any, xs: list[torch.Tensor], slots: list[Slot] | None) -> None:
    """Note what a block gives out, and an x that no block gave out."""
    if not HERE.noted:
        return
    found = [_unnamed(x) for x in xs] if number == 0 else []
    named = [(path, t) for path, t in tree.named_leaves(y) if isinstance(t, torch.Tensor)]
    for (path, t), slot in zip(named, slots or [None] * len(named), strict=True):
        at = None if slot is None else ref(slot)
        found.append(HeldState(memory_ref(t), at, block, number, "y" + path, tuple(t.shape), t.dtype))
    for noted in HERE.noted:
        noted.add(found)


def held_states() -> HeldStates:
    """List the states between invertible blocks that stay in memory, as other code refers to them, and their bytes.

        with held_states() as found:
            y = net(x)
        print(found)

    A block drops its reference to x, but x is freed only if there is no other. It stays in memory if a list, a hook, a
    debugger, a view, a detached tensor or a numpy array refers to it, or if an operation outside of the blocks saved it
    for its gradient. Then the memory grows with the number of blocks.

    Args:
        There are none.

    Returns:
        A context. It lists outputs of blocks called in it that are in memory when it is asked, inside of the context or
        later. `.held` are states that the next block could have freed, but to which other code refers: a list, whose
        `.bytes` are the memory of all of them (a tensor that several blocks hand on counts once). `.kept` are states
        that no block can free: the last y, those of `keep=` or `anchor_every=`, and inputs of operations that are not
        blocks. Each has the `block` that returned it, its `number` (of blocks before that one in its series), the
        `output` (its position in y, or among the hidden values), its `shape` and `dtype`, and the `bytes` of the memory
        that it belongs to.

    Example:
        >>> import torch, invfunc
        >>> double = invfunc.invertible_checkpoint(invfunc.Invertible(lambda x: 2 * x, lambda y: y / 2))
        >>> seen, x = [], torch.ones(512, 512, requires_grad=True)
        >>> with invfunc.pairs.held_states() as found:
        ...     for k in range(6):
        ...         x = double(x)
        ...         if k % 2 == 0:
        ...             seen.append(x.detach())
        >>> found
        in memory, as something outside of the blocks refers to them: 3 tensors, 3.00MiB
          block 0: y, [512, 512] torch.float32, 1.00MiB, of Invertible(<lambda>, <lambda>)
          block 2: y, [512, 512] torch.float32, 1.00MiB, of Invertible(<lambda>, <lambda>)
          block 4: y, [512, 512] torch.float32, 1.00MiB, of Invertible(<lambda>, <lambda>)
        saved by blocks, as the last output: 1 tensor, 1.00MiB
        >>> seen.clear()
        >>> found.held, found.held.bytes
        ([], 0)

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `multiscale`, and blocks of these, in modules, in steps
    of a training and inside of torch.func. It lists blocks called in its own thread. If a call saves no memory (without
    gradients, in forward mode, below `min_bytes`), no block frees anything; within torch.compile a chain is one
    operation, whose states no code can refer to.

    Cost: some 0.1 ms for a block that is called in it, and half a KiB for a tensor that is in memory. It keeps no
    tensor in memory itself.

    Source: this library.
    """
    return HeldStates()


class States(list[HeldState]):
    """Tensors that blocks gave out and that are in memory."""

    def __init__(self, found: Iterable[HeldState]) -> None:
        super().__init__(found)
        self.bytes = sum(state.bytes for state in self)


class HeldStates:
    """A context that notes what blocks give out in it, and tells what of that is in memory."""

    def __init__(self) -> None:
        self._states: list[HeldState] = []
        self._called, self._room = False, _FEW

    def add(self, states: list[HeldState]) -> None:
        """Note some more, and forget those that are gone."""
        self._called = True
        self._states += states
        if len(self._states) > self._room:
            self._states = [s for s in self._states if s.memory() is not None]
            self._room = max(2 * len(self._states), _FEW)

    def __enter__(self) -> HeldStates:
        HERE.noted = (*HERE.noted, self)
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        others = [*HERE.noted]
        others.remove(self)  # once: it may have been entered twice
        HERE.noted = tuple(others)

    @property
    def held(self) -> States:
        """States that a block took over, and that somebody else holds."""
        return self._in_memory(taken=True)

    @property
    def kept(self) -> States:
        """States that no block took over."""
        return self._in_memory(taken=False)

    def _in_memory(self, taken: bool) -> States:
        alive = [(s, memory) for s in self._states if (memory := s.memory()) is not None and memory.nbytes()]
        first = {id(memory): s for s, memory in reversed(alive)}
        last = {id(memory): s for s, memory in alive if s.made_by is not None}
        kept = {id(memory) for s, memory in alive if s.made_by is None and s.slot is not None and s.slot() is not None}
        kept |= {at for at, s in last.items() if not s.taken}
        by_blocks = (at for at in last if first[at].made_by is not None)  # the caller's x is in memory anyway
        return States([last[at] for at in by_blocks if (at in kept) is not taken])

    def _title(self, held: States) -> str:
        if not self._called:
            return "no block that saves memory was called"
        return f"in memory, as something outside of the blocks refers to them: {_counted(held)}"

    def _below(self, held: States) -> list[str]:
        """Lines beside the tensors that are listed."""
        if not self._called:
            return []
        more = len(held[_SHOWN:])
        lines = [f"{more} more of them"] if more else []
        return [*lines, f"saved by blocks, as the last output: {_counted(self.kept)}"]

    def __repr__(self) -> str:
        held = self.held
        return "\n".join([self._title(held), *(f"  {state}" for state in held[:_SHOWN]), *self._below(held)])

    def _repr_html_(self) -> str:
        held = self.held
        rows = [(s.number, s.output, list(s.shape), s.dtype, told(s.bytes), s.block) for s in held[:_SHOWN]]
        head = ["block", "output", "shape", "dtype", "memory", "of"]
        return table(self._title(held), head, rows, *self._below(held))


def _counted(found: States) -> str:
    return f"{len(found)} {'tensor' if len(found) == 1 else 'tensors'}, {told(found.bytes)}"


_SHOWN = 20
"""Number of tensors that are listed."""
