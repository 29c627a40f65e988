"""A call that frees its x: what it takes over and gives out, and how it tells that x did not come back."""

from __future__ import annotations

import weakref
from abc import abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from operator import is_
from typing import Any

import torch

from invfunc._torch.functorch import saving_hooks
from invfunc.errors import InvFuncError
from invfunc.pairs.log_det import carries_a_sum
from invfunc.recomputation.gathered import Glance, glanced, settle
from invfunc.recomputation.noted import found_otherwise, gathering, note, slot_of
from invfunc.recomputation.probe import Comparison, Probe, probed
from invfunc.recomputation.released import release, told_of
from invfunc.recomputation.report import Evidence, Report
from invfunc.recomputation.rounding import Error, finite, largest, summed_finite
from invfunc.recomputation.slots import Between, Hooks, Slot, Taker, Tensors, fetch
from invfunc.recomputation.states import Giver, getting, giving, looking


class Block(Taker):
    """A call `y = f(x)` at one level of differentiation, with its slots.

    Args:
        kept: which tensors of x stay in memory, as the inverse does not give them back.
        report: how it is told if what the inverse gives back is something else.
    """

    gathers = False
    """Whether small tensors of x may be looked at together with those of other blocks, and at the end."""
    count = 1
    """How many blocks it stands for, one after the other."""
    giver: Giver | None = None
    """How it is told of, where somebody notes what it gives out."""

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
        getting(self, xs)
        self.give_out(ys, metadata, len(self.kept) < len(xs))
        self.take_over(xs, ys, values)

    def give_out(self, ys: Tensors, metadata: Sequence[dict | None], held: bool) -> None:
        """Give out the slots of y."""
        hooks = saving_hooks()
        for output, (y, of_node) in enumerate(zip(ys, metadata, strict=True)):
            slot = slot_of(y) or Slot(y, hooks)
            self._ys.append(slot)
            giving(self, output, slot, y, hooks)
            if of_node is not None:
                note(of_node, output if y.grad_fn is None else y.output_nr, slot, self)
            if held:
                slot.hold(y, hooks)

    def take_over(self, xs: Tensors, ys: Tensors, values: Tensors | None = None) -> None:
        """Take the slots of x over, but for those that y has too."""
        hooks, produced = saving_hooks(), [slot_of(x) for x in xs]
        self.look_at(xs, values, None not in produced)
        direct = None not in produced
        if not direct:
            produced = found_otherwise(xs, produced)
        kept = (produced[i] for i in self.kept)  # a tensor that is kept may be given twice
        lasting = [*self._ys, *map(slot_of, ys), *kept]  # y without a node is among our own
        for i, (x, slot) in enumerate(zip(xs, produced, strict=True)):
            self._xs.append(self._source(i, x, slot, lasting, hooks))
            if not direct and slot is not None and slot.block is self:
                slot.gathering = gathering(x)

    def hand_on(self, state: Tensors, ys: Tensors, block: Block) -> None:
        """Have a block that gives `ys` take y over, which nobody else has had but for what x has, too."""
        through = [slot for i, x in enumerate(self._xs) if i not in self._taken and (slot := x()) is not None]
        slots = [next((s for s in through if s.is_slot_of(t)), None) or Between(block) for t in state]
        lasting = [slot for slot, t in zip(slots, state, strict=True) if slot in through and any(t is y for y in ys)]
        self._ys += slots
        for output, (slot, tensor) in enumerate(zip(slots, state, strict=True)):
            giving(self, output, slot, tensor, None)
        getting(block, state, slots)
        block._xs += [block._source(i, t, s, lasting, None) for i, (t, s) in enumerate(zip(state, slots, strict=True))]
        block.look_at(state, None, True)

    def look_at(self, xs: Tensors, values: Tensors | None, given_out: bool) -> None:
        """Note what x is like, to be compared: together with others if blocks gave it out, who do not write it."""
        if self.report.check != "off" and len(self.kept) < len(xs):
            without = self._not_compared(xs)
            gathered = self.gathers and not without and given_out
            self._probe = (glanced(values or xs) if gathered else None) or probed(xs, values, without)
            looking(self._probe)

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
    def names(self, of: str = "x") -> list[str]:
        """The tensors of x, or of y, as one would write them."""

    @abstractmethod
    def dtypes(self) -> list[torch.dtype]:
        """The dtypes that the function computes in, as far as they are known."""

    @abstractmethod
    def once_more(
        self, sources: Sequence[torch.Tensor], xs: Sequence[torch.Tensor]
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """The inverse of the sources, and f of xs, as at the first time."""

    def behind(self) -> list[Any]:
        """The blocks that took over what comes out of this one."""
        return [slot.block for slot in self._ys if slot.block is not None]
