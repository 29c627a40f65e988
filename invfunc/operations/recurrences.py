"""All time steps of a recurrent layer in a few operations, whose first derivatives are right.

A step is `s_t = cell(a_t, s_(t-1))` with gates `a_t = x_t W^T + h_(t-1) U^T`. The states are computed beforehand, as
numbers (`states_before`). Given them, the gates of all steps are two products, and the outputs have a derivative in
those which goes on to earlier steps (`states_after`): that of each step alone, for all of them at once, and a linear
recursion back. So what arrives at the two products is what arrives there where one step follows the other; and there W
and U have read the inputs, and the states as numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch.overrides import handle_torch_function, has_torch_function

from invfunc.operations.cells import Cell, CellWeights, Tensors, like, resized


class Steps:
    """The time steps of a layer in one direction; no trace looks in here."""

    before: Tensors
    """The parts of the state before all steps."""
    outputs: torch.Tensor
    last: Tensors

    def __init__(self, cell: Cell, w: CellWeights, backwards: bool, sizes: list[int] | None) -> None:
        """`sizes` are how many of the samples, the first ones, have each step of a packed sequence."""
        self.cell, self.w, self.backwards, self.sizes = cell, w, backwards, sizes

    def run(self, x: torch.Tensor, first: Tensors) -> None:
        """One step after the other, given what comes from the input."""
        state, ended = tuple(h[:0] for h in first), list[Tensors]()
        found, outputs = [list[torch.Tensor]() for _ in first], list[torch.Tensor]()
        for many, before, *now in self._each(self.backwards, *self.cell.divided(x)):
            if many < before:
                ended.append(tuple(h[many:] for h in state))
            state = state if many == before else resized(state, first, many)
            for some, h in zip(found, state, strict=True):
                some.append(h)
            state = self.cell.step(tuple(now), state, self.w)
            outputs.append(state[0])
        self.before = tuple(self._joined(some, self.backwards) for some in found)
        self.outputs = self._joined(outputs, self.backwards)
        self.last = tuple(torch.cat(h) for h in zip(state, *ended[::-1], strict=True))

    def pulled_back(self, slopes: Tensors, sent: torch.Tensor, last: Tensors) -> tuple[torch.Tensor, Tensors]:
        """Cotangents at the gates, one after the other, and at the first state, of those at the outputs
        and to the last state."""
        cell, w, own = self.cell, self.w.w_hh, self.cell.own * slopes[0].shape[-1]
        gates = own + len(w)
        carried, begun, found = tuple(h[:0] for h in last), list[Tensors](), list[torch.Tensor]()
        for many, before, arrived, *slope in self._each(not self.backwards, sent, *slopes):
            if many < before:  # the others have begun at the step behind
                begun.append(tuple(h[many:] for h in carried))
            h, *others = carried if many == before else resized(carried, last, many)
            back = slope[0] * (arrived + h).unsqueeze(1)
            for steep, c in zip(slope[1:], others, strict=True):
                back = torch.addcmul(back, steep, c.unsqueeze(1))
            back = back.flatten(1)
            found.append(back[:, :gates] if cell.besides else back)
            carried = ((found[-1][:, own:] if own else found[-1]) @ w,)
            if cell.besides:
                carried = (*carried, back[:, gates:]) if others else (carried[0] + back[:, gates:],)
        first = tuple(torch.cat(h) for h in zip(carried, *begun[::-1], strict=True))
        return self._joined(found, not self.backwards), first

    def _each(self, backwards: bool, *tensors: torch.Tensor) -> Iterator[Any]:
        """The number of samples have a step, and had the step before it in this order, and the tensors there."""
        parts = [x.unbind() if self.sizes is None else x.split(self.sizes) for x in tensors]
        sizes = [len(parts[0][0])] * len(parts[0]) if self.sizes is None else self.sizes
        steps = [*zip(sizes, *parts, strict=True)][:: -1 if backwards else 1]
        before = 0
        for many, *now in steps:
            yield many, before, *now
            before = many

    def _joined(self, xs: list[torch.Tensor], backwards: bool) -> torch.Tensor:
        """The results of single steps, perhaps from the last one on, as one tensor."""
        xs = xs[::-1] if backwards else xs
        return torch.stack(xs) if self.sizes is None else torch.cat(xs)


class _After(torch.autograd.Function):
    """The outputs and the last state, of whose derivative the recursion back is a part."""

    @staticmethod
    def forward(ctx: Any, steps: Steps, *given: torch.Tensor) -> Tensors:
        before, found = steps.before, (steps.outputs, *steps.last)
        del steps.before, steps.outputs, steps.last  # the results hold the graph, which holds the steps
        ctx.steps = steps
        ctx.save_for_backward(*before, *given[: -len(before)])
        return found

    @staticmethod
    def backward(ctx: Any, *sent: torch.Tensor) -> Any:
        steps, count = ctx.steps, len(sent) - 1
        before, gates = ctx.saved_tensors[:count], ctx.saved_tensors[count:]
        if torch.is_grad_enabled():
            sent = _Linked.apply(count + 1, *sent, *gates)
        slopes = steps.cell.slopes(tuple(a.detach() for a in gates), before)
        found, first = steps.pulled_back(slopes, sent[0], sent[1:])
        return None, *found.split([a.shape[-1] for a in gates], -1), *first


class _Linked(torch.autograd.Function):
    """The cotangents, as they depend on the gates: there is no derivative in these, but a path in the graph."""

    @staticmethod
    def forward(ctx: Any, count: int, *given: torch.Tensor) -> Tensors:
        ctx.others = len(given) - count
        return tuple(x.view_as(x) for x in given[:count])

    @staticmethod
    def backward(ctx: Any, *sent: torch.Tensor) -> Any:
        return None, *sent, *[None] * ctx.others


# Two operations, as a trace sees them


def states_before(x: torch.Tensor, first: Tensors, steps: Steps) -> torch.Tensor:
    """The hidden states before all steps, as numbers; `steps` has them all then."""
    if has_torch_function((x,)):
        return handle_torch_function(states_before, (x,), x, first, steps)
    with torch.no_grad():
        w, b = steps.w.w_hh.detach().to(x.dtype), steps.w.b_hh
        steps.w = CellWeights(steps.w.w_ih, w, None, None if b is None else b.detach().to(x.dtype))
        steps.run(x, first)
    return steps.before[0]


def states_after(gates: Tensors, first: Tensors, steps: Steps) -> Tensors:
    """The outputs and the last state."""
    if has_torch_function(gates):
        return handle_torch_function(states_after, gates, gates, first, steps)
    return _After.apply(steps, *gates, *first)


def at_once(
    cell: Cell, x: torch.Tensor, state: Tensors, w: CellWeights, backwards: bool, sizes: list[int] | None
) -> tuple[torch.Tensor, Tensors]:
    """The outputs at all time steps and the last state, given the inputs at all steps and the first state."""
    added = F.linear(x, w.w_ih, w.b_ih)
    state, steps = like((added,), state), Steps(cell, w, backwards, sizes)
    read = states_before(added, state, steps)
    gates = cell.gates(cell.divided(added), F.linear(read, w.w_hh, w.b_hh))
    output, *last = states_after(gates, state, steps)
    return output, tuple(last)
