"""The numbers of what is had one step after another."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.generators import same_state, set_states, state_of
from invfunc.errors import InverseError
from invfunc.pairs.automatic.graph import Call, Node, is_node, value
from invfunc.pairs.automatic.search import Step


class Order:
    """Steps in their order, with what each is the last one to read.

    Args:
        steps: them.
        wanted: what they are taken for.
    """

    def __init__(self, steps: Sequence[Step], wanted: Sequence[Node]) -> None:
        self.wanted = wanted
        self.needed = {*wanted, *(node for step in steps for node in step.reads)}
        self.together = {step.node for step in steps if step.how == "together"}
        last = {node: i for i, step in enumerate(steps) for node in step.reads}
        kept = {*wanted}
        self.steps = [
            (step, [node for node in step.reads if last[node] == i and node not in kept])
            for i, step in enumerate(steps)
        ]


class Values:
    """The numbers of the tensors that the steps give, each for as long as it is needed.

    Args:
        given: those that are known.
        order: the steps.
        near: a tensor that memory is made beside.
    """

    def __init__(self, given: Mapping[Node, torch.Tensor], order: Order, near: torch.Tensor) -> None:
        self._of, self._order, self._near = dict(given), order, near
        self._parts: dict[Call, list[torch.Tensor]] = {}
        """What views of tensors that are put together give, by their calls."""
        self._whole: dict[Node, torch.Tensor] = {}

    def compute(self) -> list[torch.Tensor]:
        """The tensors that are wanted."""
        for step, done in self._order.steps:
            if step.node not in self._of or step.how == "together":
                self._take(step)
            for node in done:
                self._of.pop(node, None)
        return [self._of[node] for node in self._order.wanted]

    def _take(self, step: Step) -> None:
        call, node = step.call, step.node
        if step.how == "together":
            self._of[node] = self._put_together(step)
            return
        assert call is not None
        if step.how == "run":
            self._run(call)
        elif step.how == "part":
            self._place(node, self._part(call, node))
        else:
            assert step.rule is not None
            y = self._of[call.outputs[0]]
            self._place(node, step.rule[0](y, self._get).to(node.dtype))

    def _put_together(self, step: Step) -> torch.Tensor:
        """A tensor from its views, which are there already where they are in its memory."""
        if torch.is_grad_enabled():
            return self._gathered(step)
        for piece in step.pieces:
            self._place(piece, self._of[piece])
        return self._buffer(step.node)

    def _gathered(self, step: Step) -> torch.Tensor:
        """The same with a graph, out of place."""
        node, device = step.node, step.node.device
        numbers = torch.arange(node.shape.numel(), device=device).view(node.shape)
        numbers = torch.empty_strided(node.shape, node.stride, dtype=torch.long, device=device).copy_(numbers)
        laid = [numbers.as_strided(p.shape, p.stride, p.offset - node.offset).flatten() for p in step.pieces]
        order = torch.cat(laid).argsort()
        return torch.cat([self._of[piece].flatten() for piece in step.pieces])[order].view(node.shape)

    def _get(self, leaf: Any) -> Any:
        return self._of[leaf] if isinstance(leaf, Node) else value(leaf)

    def _part(self, call: Call, node: Node) -> torch.Tensor:
        """What was joined in the result of a call."""
        out, dim, at = self._of[call.outputs[0]], call.argument("dim", 0), 0
        if call.function.name == "stack":
            return out.select(dim, next(i for i, leaf in enumerate(_joined(call)) if leaf is node))
        for leaf in _joined(call):
            if leaf is node:
                break
            shape = leaf.shape if is_node(leaf) else value(leaf).shape
            at += shape[dim] if shape != (0,) else 0
        return out.narrow(dim, at, node.shape[dim])

    def _place(self, node: Node, number: torch.Tensor) -> None:
        """Note a value, lying as it did: in its place in the tensor that it was a view of, or with its strides."""
        overlaps = any(step == 0 < size - 1 for step, size in zip(node.stride, node.shape, strict=True))
        laid = overlaps or torch.is_grad_enabled() or number.stride() == node.stride
        if self._in_whole(node) or not laid:
            slot = self._buffer(node)
            if slot is not number:
                slot.copy_(number)
            number = slot
        self._of[node] = number

    def _in_whole(self, node: Node) -> bool:
        """Whether it is a view of what is put together in place."""
        if torch.is_grad_enabled():  # which goes through no writes into several views
            return False
        while node.made is not None and node.made.views:
            node = node.made.operands[0]
            if node in self._order.together:
                return True
        return False

    def _buffer(self, node: Node) -> torch.Tensor:
        """The memory of a tensor that is put together."""
        call = node.made
        if call is not None and self._in_whole(node):
            if call not in self._parts:
                base = self._buffer(call.operands[0])
                args, kwargs = tree.unflatten([base if is_node(x) else value(x) for x in call.leaves], call.structure)
                self._parts[call] = tree.tensors(call.function.func(*args, **kwargs))
            return self._parts[call][next(i for n, i in call.results if n is node)]
        if node not in self._whole:
            self._whole[node] = self._near.new_empty_strided(
                node.shape, node.stride, dtype=node.dtype, device=node.device
            )
        return self._whole[node]

    def _run(self, call: Call) -> None:
        leaves: list[Any] = [None if i in call.aside else self._get(leaf) for i, leaf in enumerate(call.leaves)]
        for place in call.writes:
            leaves[place] = leaves[place].clone()
        args, kwargs = tree.unflatten(leaves, call.structure)
        now = [(generator, state_of(generator)) for generator, _, _ in call.drawn]
        set_states((generator, before) for generator, before, _ in call.drawn)
        with _around(call):
            found = tree.tensors(call.function.func(*args, **kwargs))
        for generator, _, after in call.drawn:
            if not same_state(state_of(generator), after):
                raise InverseError(f"{call} draws more or less random numbers for other values.")
        set_states(now)
        for node, i in call.results:
            self._came(call, node, found[i] if i < len(found) else None)
        for node, place in call.rewritten:
            self._came(call, node, leaves[place])

    def _came(self, call: Call, node: Node, number: torch.Tensor | None) -> None:
        if number is None or (number.shape, number.dtype) != (node.shape, node.dtype):
            raise InverseError(f"{call} gives something of another form where its numbers are others.")
        if node in self._order.needed:
            self._of.setdefault(node, number)


def _around(call: Call) -> ExitStack:
    """What was around a call: whether it has a graph, and autocast."""
    stack = ExitStack()
    if torch.is_grad_enabled() and not call.grad:
        stack.enter_context(torch.no_grad())
    if call.autocast is not None:
        kind, (enabled, dtype) = call.operands[0].device.type, call.autocast
        now = torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)
        if now != call.autocast:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled))
    return stack


def _joined(call: Call) -> list[Any]:
    given = call.argument("tensors")
    return list(call.given()[0][0] if given is None else given)
