"""What is around a function: the tensors that it uses and was not given, in the order in which each part uses them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from invfunc._torch.functorch import level_of, levels, version
from invfunc.errors import ClosedOverError, ReplayError
from invfunc.operations.heard import Function
from invfunc.recomputation.origins import OUTSIDE
from invfunc.recomputation.outside import SHARDED, Outside, State, bare, depends, targets, wrote
from invfunc.recomputation.recall import Other, Use, meant
from invfunc.recomputation.slots import Hooks
from invfunc.recomputation.sparse import any_sparse


@dataclass(frozen=True)
class Closure:
    """What a function closes over that is made an argument."""

    tensors: tuple[torch.Tensor, ...] = ()
    written: Mapping[int, torch.Tensor | None] = field(default_factory=dict)
    """Which of them it writes, with what they held before, where that matters; an argument is copied first."""

    constants: tuple[torch.Tensor, ...] = ()
    """What needs no gradient, and is given to transforms of torch.func that the function uses itself."""
    wrapped: torch.Tensor | None = None
    """What does need one and is given to them; it cannot be made an argument."""

    def arguments(self) -> list[torch.Tensor]:
        """The arguments that stand for the tensors: views, as a statistic that records f sees how they are made."""
        before = {
            i: t.detach().clone() if (v := self.written[i]) is None else v
            for i, t in enumerate(self.tensors)
            if i in self.written
        }
        return [before[i] if i in before else t.view_as(t) for i, t in enumerate(self.tensors)]

    def place(self, tensor: torch.Tensor) -> int | None:
        """The number of a tensor among those closed over."""
        return next((i for i, known in enumerate(self.tensors) if known is tensor), None)


class Surroundings:
    """The tensors from outside that a function uses, in their order.

    Args:
        closure: what the function is known to close over.
        closed: whether it is evaluated in a node.
    """

    def __init__(self, closure: Closure, closed: bool) -> None:
        self.closure, self._closed = closure, closed
        self._outside: dict[int, Outside] = {}
        self._order: dict[int, dict[int, tuple[Outside, State]]] = {}
        self._uses: list[tuple[Outside, Callable]] = []

    def root(self, tensor: torch.Tensor) -> Outside:
        """The tensor that another one is a name of."""
        return self._met(tensor).root

    def _met(self, tensor: torch.Tensor) -> Outside:
        return self._outside.setdefault(id(tensor), Outside(tensor))

    def instead(self, tensor: torch.Tensor, lifts: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The tensor that stands for one which the function is known to close over; None for any other."""
        lift = self.closure.place(tensor)
        if lift is None:
            return None
        root = self._met(tensor)
        root.lift = lift
        if lift not in self.closure.written:
            return lifts[lift]
        if root.holder is tensor:  # it was written when it was found out what is closed over
            root.holder = lifts[lift].detach().clone()
            self._outside[id(root.holder)] = Outside(root.holder, root)
        return root.holder

    def wrapped(self, tensor: torch.Tensor, above: int) -> torch.Tensor:
        """The tensor that a transform which the function uses itself was given; itself for any other.

        Its level is above those around the function, and there now. In a node the former are not there, and it is one
        that is known; where a block around this one is evaluated again, they may be above what is there.
        """
        if id(tensor) in self._outside:
            root = self.root(tensor)
            return root.tensor if root.wrapped else tensor
        source = bare(tensor, above)
        gone = (level_of(tensor) or 0) > max((level for _, level in levels()), default=0)
        if gone or source is tensor or (self._closed and not self.constant(source)):
            return tensor
        self.rename(tensor, source)
        self.root(source).wrapped = True
        return source

    def constant(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or what it is a name of, is known to need no gradient."""
        named = self._outside[id(tensor)].root.tensor if id(tensor) in self._outside else tensor
        return any(named is known for known in self.closure.constants)

    def note(self, tensor: torch.Tensor, part: int, func: Callable) -> None:
        """Note that a call of a part uses a tensor."""
        root = self.root(tensor)
        state = root.use(part)
        if tensor is root.tensor or tensor is root.holder:
            self._order.setdefault(part, {}).setdefault(id(root), (root, state))
            if part == OUTSIDE:
                self._uses.append((root, func))

    def rename(self, tensor: torch.Tensor, source: torch.Tensor) -> None:
        """Note that a tensor is another name of one from outside."""
        if id(tensor) not in self._outside:
            self._outside[id(tensor)] = Outside(tensor, self.root(source))

    def named(self, result: Any) -> Any:
        """What writes a copy gives out the tensor that it is of, which a module may take for its new state."""
        known = self._outside.get(id(result))
        return known.root.tensor if known is not None and result is known.root.holder else result

    def closed_over(self) -> Closure:
        """What gradients may be asked for that the function was not given, and what it writes."""
        roots = [o for o in self._outside.values() if o.root is o]
        written = [o for o in roots if o.written]
        needed = [o.tensor for o in roots if o.read and not o.written and _has_gradient(o.tensor)]
        _check_gradients(written, needed)
        values = {i: o.first.value for i, o in enumerate(written, len(needed))}
        wrapped = [o.tensor for o in roots if o.wrapped]
        constants = tuple(t for t in wrapped if not _has_gradient(t))
        of_gradient = next((t for t in wrapped if _has_gradient(t)), None)
        return Closure((*needed, *(o.tensor for o in written)), values, constants, of_gradient)

    @property
    def wrote(self) -> bool:
        """Whether the function wrote to any of them."""
        return any(o.written for o in self._outside.values())

    def others(self, hooks: Hooks | None) -> tuple[dict[int, list[Other]], list[Use]]:
        """What each part used, in order, and the reads and writes of states beside shared functions.

        What is read and written would not be the same the next time.
        """
        others: dict[int, Other] = {}
        for o, state in (used for order in self._order.values() for used in order.values()):
            kept = o.written and o.kept(state)
            if o.read and o.written and (o.crossed or not kept):
                raise ReplayError(
                    f"the function reads and writes a tensor of shape {list(o.tensor.shape)} that is none of its "
                    "arguments, in a way that cannot be repeated: within one operation, or by functions that both "
                    "directions share and what is beside them. Pass it as an argument and return its new value; of a "
                    f"module in train mode, use eval mode. {SHARDED}"
                )
            others.setdefault(id(state), Other(o, state if kept else None, hooks))
        beside = self._order.get(OUTSIDE, {})
        uses = [(others[id(beside[id(o)][1])], func) for o, func in self._uses if o.read and o.written]
        return {part: [others[id(state)] for _, state in order.values()] for part, order in self._order.items()}, uses


class Reach:
    """A call that reaches outside, from before it is made: what it reads there, and what it may write."""

    def __init__(
        self, around: Surroundings, outer: list[torch.Tensor], function: Function, args: tuple, kwargs: dict[str, Any]
    ) -> None:
        self._around, self._function, self._args = around, function, args
        self._outer = [(t, version(t)) for t in outer]
        self._targets = targets(function, args, kwargs)
        for t in outer:
            if any(t is w for w in self._targets):
                root = around.root(t)
                root.now.keep(root.holder)

    def made(self, part: int, result: Any, looks: bool) -> list[torch.Tensor]:
        """The call of a part was made; returns what it has written. One that `looks` reads nothing."""
        written = wrote(self._function, self._args, self._targets)
        outer = [t for t, _ in self._outer]
        for t, then in self._outer:
            root = self._around.root(t)
            if version(t) != then or any(t is w for w in written):
                root.write(part)
                root.read |= depends(self._function, result, outer)
            elif not looks:
                root.read = True
        return written


def _check_gradients(written: Sequence[Outside], needed: Sequence[torch.Tensor]) -> None:
    """That what is closed over can have its gradient as an argument."""
    for o in written:
        if o.read and o.tensor.requires_grad:  # a copy takes its place, which has no gradient
            raise ReplayError(
                f"the function writes into a tensor of shape {list(o.tensor.shape)} that it reads and that needs a "
                "gradient, which it would not get. Write it before (clamp_, an initialisation by data), by one call of "
                "the block under torch.no_grad(), or read what was computed from it (weight.clamp(...))."
            )
    if any_sparse(needed):
        raise ClosedOverError(
            "the function closes over a sparse tensor that needs a gradient or belongs to a transform of torch.func, "
            "as a buffer does that is an argument there. Pass it to the block as an argument."
        )


def _has_gradient(tensor: torch.Tensor) -> bool:
    tensor = meant(tensor)
    return tensor.requires_grad or level_of(tensor) is not None
