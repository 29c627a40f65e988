"""A run of a function, recorded call by call without its numbers."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost, storage_of, unwatched, unwrapped
from invfunc._torch.generators import Generator, global_generator, same_state, state_of
from invfunc._torch.weak import WeakIdMap
from invfunc.errors import InverseError
from invfunc.operations.heard import Function, Listener
from invfunc.pairs.value import ClosedOver, Place, read


def refuse(why: str) -> NoReturn:
    """Say that no inverse is found."""
    raise InverseError(f"no inverse is found: {why}. Pass f_inv, or None for a plain checkpoint.")


@dataclass(eq=False)
class Ref:
    """A tensor of the run: its form, and the call that gave it (None of one that f was given or closes over)."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    memory: list[Ref]
    """Tensors that lay in the same memory, until it was written."""
    made: OpCall | None = None
    of_x: bool = False
    written: str = ""
    """The call that has written into its memory since."""
    leaf: bool = False
    """True if it is computed of x, and f has made it a leaf that needs a gradient."""


@dataclass(eq=False)
class OpCall:
    """A call of torch."""

    function: Function
    leaves: list[Any]
    """Its arguments, nodes in the place of tensors."""
    structure: Any
    place: str
    """The line of the user's code."""
    autocast: tuple | None
    """Autocast around it."""
    results: dict[Ref, int] = field(default_factory=dict)
    """Its results, with their places among the tensors that it returns."""
    rewritten: dict[Ref, int] = field(default_factory=dict)
    """The arguments that it writes as they are afterwards, with their places."""
    generators: list[Generator] = field(default_factory=list)
    """Generators that it draws from."""

    def __post_init__(self) -> None:
        nodes = list(dict.fromkeys(leaf for leaf in self.leaves if isinstance(leaf, Ref)))
        self.reads = {"none": [], "first": nodes[:1]}.get(self.function.entry.reads, nodes)
        """Operands whose numbers matter, and not only their shape."""

    @property
    def outputs(self) -> list[Ref]:
        return [*self.results, *self.rewritten]

    def argument(self, name: str, default: Any = None) -> Any:
        """An argument by its name."""
        args, kwargs = tree.unflatten(self.leaves, self.structure)
        return self.function.argument(args, kwargs, name, default)

    def again(self, get: Callable[[Ref], torch.Tensor]) -> dict[Ref, torch.Tensor]:
        """The outputs for other numbers; what it writes is written into copies."""
        leaves = [get(leaf) if isinstance(leaf, Ref) else leaf for leaf in self.leaves]
        for place in self.rewritten.values():
            leaves[place] = leaves[place].clone()
        args, kwargs = tree.unflatten(leaves, self.structure)
        auto = self.autocast
        with nullcontext() if auto is None or auto == autocast_of(auto[0]) else torch.autocast(*auto):
            came = tree.tensors(self.function.func(*args, **kwargs))
        return {node: came[i] for node, i in self.results.items()} | {n: leaves[i] for n, i in self.rewritten.items()}

    def __str__(self) -> str:
        return f"`{self.function.called}` ({self.place})"


class RecordedRun(Listener):
    """A run of a function of x, its further arguments and what it closes over; recorded while it is entered.

    Args:
        xs, rest: the tensors of x, and of the further arguments.
        dry: whether copies are written in place of what f closes over, such as running statistics.
    """

    def __init__(self, xs: Sequence[torch.Tensor], rest: Sequence[torch.Tensor], dry: bool) -> None:
        super().__init__()
        self._of: WeakIdMap[Ref] = WeakIdMap()
        self._dry = dry
        self.calls: list[OpCall] = []
        self.differentiates = False
        """True if f differentiates what depends on x."""
        self.once = False
        """True where it holds for one call only: numbers left torch, or tensors come from unknown places."""
        self.outside: dict[Ref, Any] = {}
        """The tensors that f reads and was not given, while it runs."""
        self.rest, self.xs = [[self._enter(t, of_x=given is xs) for t in given] for given in (rest, xs)]
        devices = {t.device for t in (*xs, *rest)} - {torch.device("cpu"), torch.device("meta")}
        generators = [torch.default_generator, *map(global_generator, devices)]
        self.start: dict[Generator, torch.Tensor] = {g: state_of(g) for g in generators}
        """The generators, with their states before anything was drawn."""

    def node(self, tensor: torch.Tensor) -> Ref:
        """The node of a tensor."""
        node = self._of.get(tensor)
        if node is None:
            inner = tensor
            while (inner := unwrapped(inner)) is not None:
                if inner in self._of:
                    refuse("f gives tensors to a transform of torch.func, which is not followed")
            self.outside[node := self._enter(tensor)] = tensor
        if node.written:
            refuse(f"f reads a tensor whose memory {node.written} has written in place by another view of it")
        return node

    def _enter(self, t: torch.Tensor, made: OpCall | None = None, of_x: bool = False, near: Iterable = ()) -> Ref:
        """Note a tensor, which lies in the memory of one of those that are near, or in its own."""
        with unwatched():  # these are no calls of f
            plain, own = t.layout is torch.strided and not (t.is_conj() or t.is_neg()), storage_of(t)
            same = (n.memory for n, x in near if plain and len(n.stride) == x.dim() and storage_of(x) == own)
            memory = next(same, [])
            stride, offset = (t.stride(), int(innermost(t).storage_offset())) if plain else ((), 0)
        node = Ref(t.shape, stride, offset, t.dtype, t.device, memory, made, of_x)
        memory.append(node)
        self._of.set(t, node)
        return node

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        if function.entry.asks == "memory" or function.name in ("is_zerotensor", "memory_of"):  # of hooks that save
            return function.func(*args, **kwargs)
        leaves, structure = tree.flatten((args, kwargs))
        held: list[Any] = [self.node(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        kind = next((node.device.type for node in held if isinstance(node, Ref)), "cpu")
        call = OpCall(function, held, structure, _place(), autocast_of(kind))
        of_x = any(node.of_x for node in call.reads)
        self.differentiates |= of_x and function.entry.differentiates
        written = _written(function, args, kwargs, leaves)
        if self._dry:
            copies = {i: leaves[i].clone() for i in written if held[i].made is None}
            args, kwargs = tree.unflatten([copies.get(i, leaf) for i, leaf in enumerate(leaves)], structure)
        tensors = tree.tensors(result := self._drawing(call, leaves, args, kwargs))
        if not (tensors or written or function.entry.reads == "none" or function.name.startswith("get:")):
            if of_x:
                refuse(f"{call} reads numbers of x, on which what f does may depend")
            self.once |= any(isinstance(node, Ref) for node in held)
        self._note(call, of_x, leaves, written, tensors)
        return result

    def _drawing(self, call: OpCall, leaves: list[Any], args: tuple, kwargs: dict[str, Any]) -> Any:
        """The result of a call; the generators that it draws from are noted."""
        self.start |= {g: state_of(g) for g in leaves if isinstance(g, torch.Generator) and g not in self.start}
        before = {g: state_of(g) for g in self.start}
        result = call.function.func(*args, **kwargs)
        call.generators = [g for g, state in before.items() if not same_state(state, state_of(g))]
        return result

    def _note(self, call: OpCall, of_x: bool, leaves: list[Any], written: Iterable[int], tensors: Any) -> None:
        """Note what a call writes and gives, and which of its arguments f has made leaves that need a gradient."""
        near = [(node, leaf) for node, leaf in zip(call.leaves, leaves, strict=True) if isinstance(node, Ref)]
        for node, leaf in near if of_x else ():
            node.leaf |= node.of_x and leaf.requires_grad and leaf.is_leaf
        for i in written:
            before: Any = call.leaves[i]
            for other in before.memory:
                other.written = str(call)
            call.rewritten[self._enter(leaves[i], call, of_x or before.of_x)] = i
        call.results |= {self._enter(t, call, of_x, near): i for i, t in enumerate(tensors) if t not in self._of}
        if call.outputs:
            self.calls.append(call)

    def end(self, ys: Sequence[torch.Tensor], closure: ClosedOver) -> None:
        """Note the tensors of the result, and from where those come that f was not given."""
        self.ys = [self.node(t) for t in ys]
        places = {n: [p for p in closure.tensors.get(id(t), ()) if read(p) is t] for n, t in self.outside.items()}
        self.once |= not all(places.values())
        self._places: dict[Ref, list[Place]] = {} if self.once else places

    def now(self) -> dict[Ref, torch.Tensor] | None:
        """The tensors that f closes over by now; None where the run has to be recorded anew."""
        values = {node: [*map(read, places)] for node, places in self._places.items()}
        if self.once or any(t is not some[0] or t is None for some in values.values() for t in some):
            return None
        return {node: some[0] for node, some in values.items()}


def _written(function: Function, args: tuple, kwargs: dict[str, Any], leaves: list[Any]) -> list[int]:
    """The places of the arguments that a call writes."""
    tensors = [*function.written(args, kwargs), *(args[:1] if function.writes(args, kwargs) else ())]
    return list(dict.fromkeys(next(i for i, leaf in enumerate(leaves) if leaf is t) for t in tensors))


def autocast_of(kind: str) -> tuple[str, torch.dtype, bool] | None:
    """The autocast of a kind of device."""
    if not torch.amp.is_autocast_available(kind):
        return None
    return kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)


def _place() -> str:
    """The line of the user's code that makes a call."""
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "invfunc"):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
