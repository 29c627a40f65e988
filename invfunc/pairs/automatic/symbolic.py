"""A run of f without numbers."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import storage_of, unwatched
from invfunc._torch.generators import Generator, global_generator, same_state, state_of
from invfunc.errors import InverseError
from invfunc.operations.heard import function_of
from invfunc.operations.naming import shaped_by_numbers
from invfunc.pairs.automatic.graph import Call, Node, Tracer, is_node, refuse, value

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
        self.instead: dict[int, torch.Tensor] = {}
        """Stand-ins for tensors that f closes over."""
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
        if self.instead:
            args, kwargs = tree.map_tensors(lambda t: self.instead.get(id(t), t), (args, kwargs or {}))
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
        if call.aside or function.called in self._drawing or function.draws(args, kwargs) or _casts(call):
            return self._at_zeros(call, leaves)
        try:
            with unwatched():
                key = _key(call, leaves)
                if key is not None and (known := _FORMS.get(key)) is not None:
                    shape, stride, dtype = known
                    return torch.empty_strided(shape, stride, dtype=dtype, device=META)
                found = [self._bare(function.name, leaf) for leaf in leaves]
                args, kwargs = tree.unflatten(found, structure)
                if "device" in kwargs:
                    self._stays(call, kwargs["device"])
                    kwargs["device"] = META
                result = function.func(*args, **kwargs)
                if key is not None and isinstance(result, torch.Tensor) and _is_new(result, found):
                    if len(_FORMS) >= _MOST:
                        _FORMS.clear()
                    _FORMS[key] = result.shape, result.stride(), result.dtype
                return result
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

    def of_form(self, call: Call, leaves: list[Any], structure: Any) -> Any:
        args, kwargs = tree.unflatten([self._zeros(x) if is_node(x) else value(x) for x in call.leaves], call.structure)
        return call.function.func(*args, **kwargs)

    def _zeros(self, node: Node) -> torch.Tensor:
        """Zeros that lie as the tensor does."""
        near = self._near.new_empty_strided(node.shape, node.stride, dtype=node.dtype, device=node.device)
        return near.detach().zero_()

    def _at_zeros(self, call: Call, leaves: list[Any]) -> Any:
        """The form of what a call gives, from its values at zeros."""
        if shaped_by_numbers(call.function.name, call.operands):
            refuse(f"{call} gives a tensor whose shape depends on numbers of x.")
        zeros = [self._zeros(leaf) if is_node(leaf) else value(leaf) for leaf in call.leaves]
        args, kwargs = tree.unflatten(zeros, call.structure)
        own = [leaf for leaf in leaves if isinstance(leaf, torch.Generator)]
        for generator in own:
            if not any(generator is known for known in self.generators):
                self.generators.append(generator)
        before = [state_of(g) for g in self.generators]
        try:
            with torch.no_grad():
                result = call.function.func(*args, **kwargs)
        except (RuntimeError, NotImplementedError, TypeError) as error:
            raise InverseError(
                f"no inverse is found: {call} is evaluated at zeros to see what it gives: {error}"
            ) from error
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


_FORMS: dict[Hashable, tuple[torch.Size, tuple[int, ...], torch.dtype]] = {}
"""The forms of new tensors by the calls that give them: torch takes a millisecond to find some of them."""
_MOST = 4096
_PLAIN = (int, float, bool, str, type(None), torch.dtype)


def _key(call: Call, leaves: list[Any]) -> Hashable | None:
    """What the form of a result depends on; None where that is not known."""
    if call.writes or not all(type(leaf) in _PLAIN or isinstance(leaf, torch.Tensor) for leaf in leaves):
        return None
    forms = [(tuple(x.shape), x.stride(), x.dtype) if isinstance(x, torch.Tensor) else (type(x), x) for x in leaves]
    return call.function.func, tree.hashable(call.structure), torch.get_default_dtype(), *forms


def _is_new(result: torch.Tensor, given: list[Any]) -> bool:
    """Whether a result is in a memory of its own."""
    own = storage_of(result)
    return all(own != storage_of(x) for x in given if isinstance(x, torch.Tensor))


def _casts(call: Call) -> bool:
    return call.autocast is not None and call.autocast[0]


def _offset(t: torch.Tensor) -> int:
    return int(t.storage_offset())
