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
from functools import partial
from operator import is_
from types import EllipsisType

import torch

from invfunc._torch.functorch import saving_hooks, version
from invfunc.errors import InvFuncError, ModifiedError
from invfunc.pairs.log_det import carries_a_sum
from invfunc.recomputation.gathered import Glance, glanced, settle
from invfunc.recomputation.noted import found_beside, note, slot_of
from invfunc.recomputation.probe import Comparison, Probe, probed
from invfunc.recomputation.released import release, told_of
from invfunc.recomputation.report import Evidence, Report
from invfunc.recomputation.rounding import Error, finite, largest, summed_finite

Hooks = tuple[Callable, Callable]
Tensors = Sequence[torch.Tensor]


class Slot:
    """One tensor of x or y. It is held until a block takes it over; a tensor that the user holds is found anyway."""

    def __init__(self, tensor: torch.Tensor, hooks: Hooks | None) -> None:
        self._version = version(tensor)
        self._users = weakref.ref(tensor)
        self._within = None if hooks is None else hooks[0]
        """The hook that saved tensors go through: that of a block or checkpoint whose function is being evaluated."""
        self._held: Held | None = None
        self.block: Block | None = None
        """The block that took the tensor over."""
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

    def take_over(self, block: Block) -> None:
        """Let go of the tensor, which the block can give back."""
        self.block, self._held = block, None

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


class Held:
    """A tensor in memory, detached, or in the care of the hooks that take the place of saved tensors around us."""

    _ours = False

    def __init__(self, tensor: torch.Tensor, users: bool = True, hooks: Hooks | None | EllipsisType = ...) -> None:
        if hooks is ...:
            hooks = saving_hooks() if users else None
        self._tensor = tensor.detach() if hooks is None else None
        self._version = version(tensor) if users and hooks is None else None
        """None where the caller has it not, and cannot write into it."""
        if hooks is not None:
            self._ours = isinstance(getattr(hooks[0], "__self__", None), Block)
            pack, self._unpack = hooks
            origins = getattr(getattr(pack, "__self__", None), "origins", None)
            with nullcontext() if origins is None else origins.paused:  # it is saved by no call
                self._packed = pack(tensor)

    def get(self) -> torch.Tensor:
        """The tensor, as it was."""
        tensor = self._tensor  # of which another thread may let go
        if tensor is None:
            tensor = self._tensor = self._unpack(self._packed).detach()
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
            self._tensor = None


class Block(ABC):
    """A call `y = f(x)` at one level of differentiation, with its slots.

    Args:
        kept: which tensors of x stay in memory, as the inverse does not give them back.
        report: how it is told if what the inverse gives back is something else.
    """

    gathers = False
    """Whether small tensors of x may be looked at together with those of other blocks, and at the end."""

    def __init__(self, kept: Sequence[int], report: Report) -> None:
        self.kept = kept
        self.report = report
        self._probe: Probe | Glance | None = None
        self._xs: list[Callable[[], Slot | None]] = []
        self._taken: set[int] = set()
        self._ys: list[Slot] = []
        self._found: dict[int, tuple[torch.Tensor, int]] = {}

    def connect(self, xs: Tensors, ys: Tensors, metadata: Sequence[dict | None], values: Tensors | None = None) -> None:
        """Take the slots of x over, of which the plain `values` may be at hand, and give out those of y by the metadata
        of the nodes they come from."""
        hooks, inverts = saving_hooks(), len(self.kept) < len(xs)
        for output, (y, of_node) in enumerate(zip(ys, metadata, strict=True)):
            self._give_out(y, output, of_node, hooks, inverts)
        produced = [slot_of(x) for x in xs]
        if self.report.check != "off" and inverts:
            without = self._not_compared(xs)
            gathered = self.gathers and not without and None not in produced  # others may be written afterwards
            self._probe = (glanced(values or xs) if gathered else None) or probed(xs, values, without)
        if None in produced and any(produced):
            produced = found_beside(xs, produced)
        lasting = [*self._ys, *(produced[i] for i in self.kept)]  # a tensor that is kept may be given twice
        for i, (x, slot) in enumerate(zip(xs, produced, strict=True)):
            self._xs.append(self._source(i, x, slot, lasting, hooks))

    def _give_out(self, y: torch.Tensor, output: int, of_node: dict | None, hooks: Hooks | None, held: bool) -> None:
        slot = slot_of(y) or Slot(y, hooks)
        self._ys.append(slot)
        if of_node is not None:
            note(of_node, output if y.grad_fn is None else y.output_nr, slot, self)
        if held:
            slot.hold(y, hooks)

    def _not_compared(self, xs: Tensors) -> Sequence[int]:
        """The tensors of x that need not come back with all their digits: those that are kept, and a carried sum, which
        begins at zeros and has no size of its own."""
        summed = carries_a_sum(getattr(self.report.block, "pair", None))
        return (*self.kept, len(xs) - 1) if summed else self.kept

    def _source(
        self, i: int, x: torch.Tensor, produced: Slot | None, lasting: list, hooks: Hooks | None
    ) -> Callable[[], Slot | None]:
        slot = produced or Slot(x, hooks)
        if i in self.kept:
            slot.hold(x, hooks)
        elif produced is None:
            self._taken.add(i)
        elif (produced.block is None or produced.block is self) and not any(map(partial(is_, produced), lasting)):
            produced.take_over(self)
            self._taken.add(i)
            return weakref.ref(produced)
        return lambda: slot

    @property
    def sources(self) -> list[Slot]:
        """The slots that the inverse reads: those of y, and those of x that are kept."""
        return [*self._ys, *(slot for i in self.kept if (slot := self._xs[i]()) is not None)]

    def xs(self) -> list[torch.Tensor] | None:
        """The tensors of x, or None where some have to be computed by the inverse."""
        found: list[torch.Tensor] = []
        for i, source in enumerate(self._xs):
            slot = source()
            tensor = None if slot is None else slot.find()
            if tensor is None:
                if i in self._taken or slot is None:
                    return None
                (tensor,) = fetch([slot])
            found.append(tensor)
        return found

    def exact(self) -> bool:
        """Whether x, where it is in memory, is as it was, and was not given back with an error."""
        slots = [source() for source in self._xs]
        known = [slot for slot in slots if slot is not None and not slot.waits]
        return len(known) == len(slots) and all(isinstance(slot.error, float) and slot.error == 0 for slot in known)

    def give_back(self, xs: Sequence[torch.Tensor]) -> Callable[[], None] | None:
        """Fill the slots of x, for the blocks that they come from; what can be given back again is let go of.

        What is returned tells that they are not what they were.
        """
        error, tell, probe = 0.0, None, self._probe
        waits = isinstance(probe, Glance)
        if probe is not None and not isinstance(probe, Glance):
            error, tell = self.judged(probe.compare(xs), xs)
        own = ((i, self._xs[i]()) for i in self._taken)
        filled = {i: slot for i, slot in own if slot is not None and slot.block is self}
        for i, slot in filled.items():
            slot.fill(xs[i], error, waits)
        release(self._ys)
        slots = [*filled.values()]
        if isinstance(probe, Glance):
            probe.wait(self, xs, slots)
        return None if tell is None else partial(told_of, tell, slots)

    def give_back_and_tell(self, xs: Sequence[torch.Tensor]) -> None:
        """Fill the slots of x as `give_back` does, and tell at once if they are not what they were."""
        tell = self.give_back(xs)
        if tell is not None:
            tell()

    def judged(self, comparison: Comparison, xs: Sequence[torch.Tensor]) -> tuple[Error, Callable[[], None] | None]:
        """The error of what the inverse gives, and how it is told of, where it has to be."""
        errors = comparison.errors()
        error = largest(errors)
        if isinstance(error, torch.Tensor):
            found = [t for slot in self.sources if (t := slot.find()) is not None]
            error = torch.where(summed_finite(found, error.device) | error.isfinite(), error, 0.0)
        elif not error:
            return error, None
        which = (lambda: "x") if isinstance(error, torch.Tensor) else lambda: self.names()[errors.index(error)]
        if any(slot.waits for slot in self._ys):
            settle()
        before = largest([slot.error for slot in self._ys])
        dtypes = [x.dtype for x in xs]
        tell = self.report.compared(which, error, before, dtypes, self.dtypes, lambda: self._evidence(xs))
        return error, tell or self.report.hidden(comparison.hidden(), dtypes)

    def _evidence(self, xs: Sequence[torch.Tensor]) -> Evidence | None:
        """What both functions give for y and for an x that did not come back; None where that is not found any more, as
        in a backward pass that changes weights."""
        try:
            with torch.no_grad():
                sources = fetch(self.sources)
                again, ys = self.once_more(sources, xs)
        except InvFuncError:
            return None
        apart, error = (largest(Probe(a, sums=True).errors(b)) for a, b in ((xs, again), (sources[: len(ys)], ys)))
        return Evidence(finite(sources), float(apart), float(error))

    def forget(self) -> None:
        """Let go of what was computed again."""
        self._found = {}

    @abstractmethod
    def names(self) -> list[str]:
        """The tensors of x."""

    @abstractmethod
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes that the function computes in, as far as they are known."""

    @abstractmethod
    def once_more(
        self, sources: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The inverse of the sources, and f of xs, as at the first time."""

    def behind(self) -> list[Block]:
        """The blocks that took over what comes out of this one."""
        return [slot.block for slot in self._ys if slot.block is not None]

    @abstractmethod
    def invert(self) -> None:
        """Give the tensors of x back, from the sources, which are in memory."""


def fetch(slots: Sequence[Slot]) -> list[torch.Tensor]:
    """The tensors of some slots; blocks that took them over are inverted, from the last one on."""
    found = [slot.find() for slot in slots]
    if all(tensor is not None for tensor in found):
        return [tensor for tensor in found if tensor is not None]
    blocks: list[Block] = []
    needed = slots
    while True:
        found = [slot.find() for slot in needed]
        lost = next((slot for slot, tensor in zip(needed, found, strict=True) if tensor is None), None)
        if lost is not None:
            assert lost.block is not None
            blocks.append(lost.block)
            needed = lost.block.sources
        elif blocks:
            blocks.pop().invert()
            needed = blocks[-1].sources if blocks else slots
        else:
            return [tensor for tensor in found if tensor is not None]
