"""A run of f without numbers, and the numbers of what is had afterwards."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch

from invfunc import tree
from invfunc._functorch import storage_of, unwatched
from invfunc._generators import Generator, global_generator, same_state, set_states, state_of
from invfunc.errors import InverseError
from invfunc.operations.heard import function_of
from invfunc.pairs.automatic.graph import Call, Constant, Node, Tracer, refuse
from invfunc.pairs.automatic.search import Step

META = torch.device("meta")
_OF_DEVICE = {"get:device", "get:is_cuda", "get:is_cpu", "get:is_meta", "get:is_mkldnn", "get_device", "get:layout"}


class Symbolic(Tracer):
    """Runs f with tensors that have a form and no numbers in the place of those of x.

    What does not depend on x is computed, and what draws or writes a state is evaluated at zeros, so that the random
    numbers and the states go on as they did.

    Args:
        near: a tensor that a zero is made beside, which knows of the batches of vmap.
        drawing: the names of functions that are known to draw.
    """

    def __init__(self, near: torch.Tensor, drawing: set[str]) -> None:
        super().__init__()
        self._near, self._drawing = near, drawing
        self.generators: list[Generator] = [torch.default_generator]
        self._devices = set[torch.device]()

    keeps_constants = True

    def stand_in(self, like: Any, device: torch.device) -> torch.Tensor:
        """A tensor of x without its numbers."""
        with unwatched():
            made = torch.empty_strided(like.shape, like.stride, dtype=like.dtype, device=META)
        node = self.node(made, device, [], None)
        self.inputs = [*self.inputs, self.known(made, node)]
        if device not in self._devices and device.type not in ("cpu", "meta"):
            self._devices.add(device)
            self.generators.append(global_generator(device))
        return made

    def node(self, tensor: torch.Tensor, device: torch.device, family: list[Node], made: Call | None) -> Node:
        node = super().node(tensor, device, family, made)
        node.alike = tensor
        return node

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if args and (node := self.of(args[0])) is not None and function_of(func).name in _OF_DEVICE:
            return func(torch.empty(0, dtype=node.dtype, device=node.device), *args[1:])
        return super().__torch_function__(func, types, args, kwargs)

    def _unseen(self, function: Any, given: Sequence[torch.Tensor]) -> None:
        super()._unseen(function, given)
        for t in given:
            if t.device.type == "meta" and all(node.device.type != "meta" for node in self.inputs):
                refuse(
                    f"`{function.called}` reads what depends on x by an operation that is not seen (an "
                    "autograd.Function?)."
                )

    def run(self, call: Call, leaves: list[Any], structure: Any) -> Any:
        function, (args, kwargs) = call.function, tree.unflatten(leaves, structure)
        if function.entry.asks == "memory":
            refuse(f"{call} asks where what depends on x is in memory.")
        if function.entry.reads == "none" and not call.writes:
            return self._of_form(call)
        if call.aside or function.called in self._drawing or function.draws(args, kwargs) or _casts(call):
            return self._at_zeros(call, leaves)
        try:
            with unwatched():
                found = [self._bare(function.name, leaf) for leaf in leaves]
                args, kwargs = tree.unflatten(found, structure)
                if "device" in kwargs:
                    self._stays(call, kwargs["device"])
                    kwargs["device"] = META
                return function.func(*args, **kwargs)
        except InverseError:
            raise
        except (RuntimeError, NotImplementedError, TypeError):  # it has no form without numbers
            return self._at_zeros(call, leaves)

    def _bare(self, name: str, leaf: Any) -> Any:
        """An argument without its numbers."""
        if isinstance(leaf, torch.device) or (name == "to" and isinstance(leaf, str)):
            return META
        if not isinstance(leaf, torch.Tensor) or self.of(leaf) is not None:
            return leaf
        return torch.empty_strided(leaf.shape, leaf.stride(), dtype=leaf.dtype, device=META)

    def _stays(self, call: Call, device: Any) -> None:
        if device is not None and torch.device(device).type != call.operands[0].device.type:
            refuse(f"{call} moves what depends on x to another device.")

    def _of_form(self, call: Call) -> Any:
        """What a call makes of the form of a tensor alone: it does not depend on x."""
        args, kwargs = tree.unflatten([self._zeros(x) if _is(x) else value(x) for x in call.leaves], call.structure)
        return call.function.func(*args, **kwargs)

    def _zeros(self, node: Node) -> torch.Tensor:
        """Zeros that lie as the tensor does."""
        near = self._near.new_empty_strided(node.shape, node.stride, dtype=node.dtype, device=node.device)
        return near.detach().zero_()

    def _at_zeros(self, call: Call, leaves: list[Any]) -> Any:
        """The form of what a call gives, from its values at zeros."""
        if _by_values(call):
            refuse(f"{call} gives a tensor whose shape depends on numbers of x.")
        zeros = [self._zeros(leaf) if _is(leaf) else value(leaf) for leaf in call.leaves]
        args, kwargs = tree.unflatten(zeros, call.structure)
        own = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        for generator in own:
            if not any(generator is known for known in self.generators):
                self.generators.append(generator)
        before = [state_of(g) for g in self.generators]
        with torch.no_grad():
            result = call.function.func(*args, **kwargs)
        states = zip(self.generators, before, [state_of(g) for g in self.generators], strict=True)
        call.drawn = tuple((g, then, now) for g, then, now in states if not same_state(then, now))
        sources = {storage_of(z): (z, leaf) for z, leaf in zip(zeros, leaves, strict=True) if self.of(leaf) is not None}
        written = {id(zeros[place]): leaves[place] for place in call.writes}

        def form(t: torch.Tensor) -> torch.Tensor:
            if id(t) in written:
                return written[id(t)]
            with unwatched():
                if storage_of(t) in sources:
                    zero, alike = sources[storage_of(t)]
                    if zero is t:
                        return alike
                    return alike.as_strided(t.shape, t.stride(), alike.storage_offset() + _offset(t))
                return torch.empty_strided(t.shape, t.stride(), dtype=t.dtype, device=META)

        return tree.map_tensors(form, result)


class Values:
    """The numbers of the tensors that the steps give, each for as long as it is needed.

    Args:
        given: those that are known.
        steps: in their order.
    """

    def __init__(
        self, given: dict[Node, torch.Tensor], steps: Sequence[Step], wanted: Sequence[Node], near: torch.Tensor
    ) -> None:
        self._of, self._near = dict(given), near
        self._needed = {*wanted, *(node for step in steps for node in step.reads)}
        self._steps, self._wanted = steps, wanted
        self._parts: dict[Call, list[torch.Tensor]] = {}
        """What views of tensors that are put together give, by their calls."""
        self._whole: dict[Node, torch.Tensor] = {}
        self._together = {step.node: step for step in steps if step.how == "together"}

    def compute(self) -> list[torch.Tensor]:
        """The tensors that are wanted."""
        last = {node: i for i, step in enumerate(self._steps) for node in step.reads}
        for i, step in enumerate(self._steps):
            if step.node not in self._of or step.how == "together":
                self._take(step)
            for node in step.reads:
                if last[node] == i and node not in self._wanted:
                    self._of.pop(node, None)
        return [self._of[node] for node in self._wanted]

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
        whole = self._buffer(step.node)
        for piece in step.pieces:
            if torch.is_grad_enabled():  # which goes through no writes into several views
                at = piece.offset - step.node.offset
                whole = whole.as_strided_scatter(self._of[piece], piece.shape, piece.stride, at)
            else:
                self._place(piece, self._of[piece])
        return whole

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
            at += leaf.shape[dim] if leaf.shape != (0,) else 0
        return out.narrow(dim, at, node.shape[dim])

    def _place(self, node: Node, number: torch.Tensor) -> None:
        """Note a value, lying as it did: in its place in the tensor that it was a view of, or with its strides."""
        if not torch.is_grad_enabled() and (self._in_whole(node) or number.stride() != node.stride):
            slot = self._buffer(node)
            if slot is not number:
                slot.copy_(number)
            number = slot
        self._of[node] = number

    def _in_whole(self, node: Node) -> bool:
        """Whether it is a view of what is put together."""
        return node.made is not None and node.made.views and node.made.operands[0] in self._together

    def _buffer(self, node: Node) -> torch.Tensor:
        """The memory of a tensor that is put together."""
        call = node.made
        if call is not None and self._in_whole(node) and not torch.is_grad_enabled():
            if call not in self._parts:
                base = self._buffer(call.operands[0])
                args, kwargs = tree.unflatten([base if _is(x) else value(x) for x in call.leaves], call.structure)
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
        if node in self._needed:
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


def _casts(call: Call) -> bool:
    return call.autocast is not None and call.autocast[0]


def _by_values(call: Call) -> bool:
    """Whether the shape of a result depends on numbers."""
    packet = getattr(torch.ops.aten, call.function.name, None)
    overloads = packet.overloads() if packet is not None and hasattr(packet, "overloads") else ()
    if any(torch.Tag.dynamic_output_shape in getattr(packet, overload).tags for overload in overloads):
        return True
    masks = [x for x in call.operands if x.dtype in (torch.bool, torch.uint8)]
    return call.function.name == "getitem" and bool(masks)


def _offset(t: torch.Tensor) -> int:
    return int(t.storage_offset())


def _is(leaf: Any) -> bool:
    return isinstance(leaf, Node)


def value(leaf: Any) -> Any:
    """An argument that does not depend on x."""
    return leaf.tensor if isinstance(leaf, Constant) else leaf
