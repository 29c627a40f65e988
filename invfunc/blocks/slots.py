"""States between blocks: in memory, or to be had from the later call that took them over."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch

from invfunc._torch.functorch import alive, function_of, is_wrapped, recorded, storage_of, version
from invfunc._torch.sharded import gathered_again, gathers
from invfunc._torch.weak import WeakIdMap
from invfunc.errors import ModifiedError, ReplayError

_KEY = "invfunc"
_WITHOUT_GRAPH: WeakIdMap[Callable[[], Slot | None]] = WeakIdMap()
"""The slots of tensors of which there is no graph."""
Hooks = tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]


class Slot:
    """A tensor that a call gave out, until the next call takes it over.

    Hooks on saved tensors that are around the call (a block or a checkpoint that it is a part of) take it as they take
    what autograd saves.
    """

    __slots__ = ("_value", "_packed", "version", "shape", "later", "owner", "depth", "lock", "__weakref__")

    def __init__(self, tensor: torch.Tensor, depth: int = 0, hooks: Hooks | None = None, lock: Any = None) -> None:
        value = tensor.detach()
        self._value, self._packed = (value, None) if hooks is None else (None, (hooks[1], hooks[0](value)))
        self.version, self.shape = version(tensor), tensor.shape
        self.later: Holder | None = None
        self.owner: weakref.ref[Holder] | None = None
        self.depth = depth
        """How many blocks come before it in its series, this one included."""
        self.lock = lock
        """One for all calls of a series, of which threads may need the states at the same time."""

    @property
    def empty(self) -> bool:
        """Whether a later call has to give the tensor back."""
        return self._value is None and self._packed is None

    def get(self) -> torch.Tensor:
        """The tensor, which must not have been written since."""
        if self._packed is not None:
            unpack, packed = self._packed
            return unpack(packed).detach()
        value = self._value
        if value is None:
            raise ReplayError("the state behind it is gone: a second backward pass needs retain_graph=True.")
        if version(value) != self.version:
            raise ModifiedError(
                f"its output, of shape {list(self.shape)}, has been modified by an inplace operation, and is needed to "
                "compute the gradient. Write y = y + z in place of y += z."
            )
        return alive(value) if is_wrapped(value) else value

    def of_memory(self, tensor: torch.Tensor) -> bool:
        """Whether it is that tensor, which somebody handed on."""
        value = self._value
        if value is None or storage_of(value) != storage_of(tensor):
            return False
        return (value.storage_offset(), value.stride()) == (tensor.storage_offset(), tensor.stride())

    def fill(self, value: torch.Tensor) -> None:
        """Put the tensor back that the later call has computed again."""
        self._value, self.version = value, version(value)

    def drop(self) -> None:
        """Let go of the tensor."""
        self._value = self._packed = None

    def note(self, tensor: torch.Tensor, held: bool) -> None:
        """Let the next call find this slot at the tensor; a copy or a pickle of the tensor knows nothing of it.

        Args:
            tensor: the tensor.
            held: whether the slot lives as long as the graph, also where nobody needs it to go backwards.
        """
        own, of = weakref.ref(self), recorded(tensor)
        node: Any = of.grad_fn
        if node is None:
            _WITHOUT_GRAPH.set(tensor, own)
        else:
            node.metadata[_KEY, of.output_nr] = (lambda: self) if held else own


def slot_of(tensor: torch.Tensor, groups: list[Any]) -> Slot | None:
    """The slot of a tensor that a call gave out, if it was not written and nobody took it over.

    Functions of autograd may have handed it on, as `fully_shard` does; what gathers parameters there is added to
    `groups`.
    """
    of = recorded(tensor)
    node: Any = of.grad_fn
    number = of.output_nr
    found = _WITHOUT_GRAPH.get(tensor) if node is None else None
    while node is not None and (found := node.metadata.get((_KEY, number))) is None:
        if function_of(node) is None or number >= len(node.next_functions):
            break
        groups += [] if (group := gathers(node)) is None else [group]
        node, number = node.next_functions[number]
    handed = node is not of.grad_fn
    slot = found and found()
    if slot is None or slot.later is not None or slot.empty or slot.shape != tensor.shape:
        return None
    if slot.version != version(tensor) or (handed and not slot.of_memory(tensor)):
        return None
    return slot


class Holder:
    """A call: the slots of its output, those of its input that it took over, and a way back from one to the other."""

    outs: Sequence[Slot] = ()
    ins: Sequence[weakref.ref[Slot] | None] = ()
    gathering: Sequence[Any] = ()
    """What `fully_shard` gathers parameters with for this call, if it is the first one in its module."""

    def back(self, ys: list[torch.Tensor]) -> list[torch.Tensor]:
        """The tensors of the input, from those of the output."""
        raise NotImplementedError  # of this class alone

    def release(self) -> None:
        """Drop what can be computed again."""

    def take_over(self, slots: Sequence[Slot | None]) -> None:
        """Let go of the input, whose slots are filled again by `fill`."""
        self.ins = ins = list[weakref.ref[Slot] | None]()
        for slot in slots:
            ins.append(None if slot is None else weakref.ref(slot))
            if slot is not None:
                slot.later = self
                slot.drop()

    def output(self) -> list[torch.Tensor]:
        """The tensors of the output; later calls compute those that they took over, one after the other."""
        missing = [slot.later for slot in self.outs if slot.later is not None and slot.empty]
        waiting, groups = list[Holder]([self] if missing else []), [self.gathering]
        while waiting:
            missing = [slot.later for slot in waiting[-1].outs if slot.later is not None and slot.empty]
            if missing:
                waiting.append(missing[0])
                groups.append(missing[0].gathering or groups[-1])
                continue
            done, group = waiting.pop(), groups.pop()
            if waiting:
                with gathered_again(group):
                    done.fill(done.back([slot.get() for slot in done.outs]))
        found = [slot.get() for slot in self.outs]
        for slot in self.outs:
            if slot.later is not None:
                slot.later.release()
                slot.drop()
        return found

    def fill(self, xs: Sequence[torch.Tensor]) -> None:
        """Give the input back to the calls that it came from."""
        for x, found in zip(xs, self.ins, strict=False):
            slot = found() if found is not None else None
            if slot is not None and slot.later is self:
                slot.fill(x)
                if slot.owner is not None and (owner := slot.owner()) is not None:
                    owner.release()  # what it holds is of an earlier backward pass


def depth_of(slots: Sequence[Any]) -> int:
    """How many blocks come before a state, by its slots."""
    return max((slot.depth for slot in slots if slot is not None), default=0)
