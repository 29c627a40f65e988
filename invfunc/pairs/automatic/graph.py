"""What a function does with the tensors of x, call by call, and the mode that writes it down."""

from __future__ import annotations

import sys
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost, storage_of, unwatched, unwrapped, version
from invfunc._torch.generators import Generator
from invfunc._torch.weak import WeakIdMap
from invfunc.errors import InverseError
from invfunc.operations.heard import Function, Listener

WAY = "Pass f_inv, or None for a plain checkpoint."


@dataclass(eq=False)
class Node:
    """A tensor of x, or one that is computed from such."""

    shape: torch.Size
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype
    device: torch.device
    family: list[Node]
    """All that lie in one memory."""
    made: Call | None = None
    """The call that gave it; None of a tensor of x."""
    alike: torch.Tensor | None = None
    """A tensor without numbers, in the place of the one that it stands for."""
    stale: str = ""
    """The call that has written into its memory since."""
    readers: list[Call] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.family.append(self)


class Constant(NamedTuple):
    """An argument that does not depend on x."""

    tensor: torch.Tensor | None
    """None where f runs with numbers, which are not kept."""
    positive: bool
    """Whether all its numbers are known to be positive."""
    version: int = 0
    """How often it was written when it was read."""


@dataclass(eq=False)
class Call:
    """A call of torch that reads tensors of x, or what was computed from them."""

    function: Function
    leaves: list[Any]
    """Its arguments, with nodes where they are of x."""
    structure: Any
    place: str
    """Where it is in the user's code."""
    grad: bool
    autocast: tuple[bool, torch.dtype] | None
    """Those around it."""
    results: list[tuple[Node, int]] = field(default_factory=list)
    """What it gives, and the place among the tensors of its result."""
    rewritten: list[tuple[Node, int]] = field(default_factory=list)
    """What its arguments at some places hold afterwards."""
    writes: tuple[int, ...] = ()
    """The arguments, by their places, that it writes."""
    aside: tuple[int, ...] = ()
    """The states that it writes, on which its result does not depend."""
    views: bool = False
    """Whether its results lie in the memory of its only operand."""
    drawn: tuple[tuple[Generator, torch.Tensor, torch.Tensor], ...] = ()
    """The generators that it draws from, with their states before and after."""

    def __post_init__(self) -> None:
        self.operands = list({id(leaf): leaf for leaf in self.leaves if isinstance(leaf, Node)}.values())

    @property
    def outputs(self) -> list[Node]:
        """All that it gives or rewrites."""
        return [node for node, _ in (*self.results, *self.rewritten)]

    def given(self) -> tuple[tuple, dict[str, Any]]:
        """Its arguments as they were given, with nodes."""
        return tree.unflatten(self.leaves, self.structure)

    def argument(self, name: str, default: Any = None) -> Any:
        """One of them."""
        return self.function.argument(*self.given(), name, default)

    def __str__(self) -> str:
        return f"`{self.function.called}`" + (f" ({self.place})" if self.place else "")


def refuse(what: str) -> NoReturn:
    """No inverse is found."""
    raise InverseError(f"no inverse is found: {what} {WAY}")


class Tracer(Listener):
    """Writes down the calls that read tensors of x while a function runs."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[Call] = []
        self._of: WeakIdMap[Node] = WeakIdMap()
        self._positive: WeakIdMap[bool] = WeakIdMap()
        """What does not depend on x and is known to be positive."""

    def known(self, tensor: torch.Tensor, node: Node) -> Node:
        """Note what a tensor stands for."""
        self._of.set(tensor, node)
        return node

    def of(self, tensor: Any) -> Node | None:
        """The node of a tensor; None of one that does not come from x."""
        return self._of.get(tensor)

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        given = tree.tensors((args, kwargs))
        if not any(t in self._of for t in given):
            self._unseen(function, given)
            result = function.func(*args, **kwargs)
            floats = isinstance(result, torch.Tensor) and result.is_floating_point()  # of a whole number 0 is near
            if floats and not function.renews and _stays_positive(function, given, self):
                self._positive.set(result, True)
            return result
        leaves, structure = tree.flatten((args, kwargs))
        held = [self._held(leaf) for leaf in leaves]
        device = next(leaf.device for leaf in held if isinstance(leaf, Node))
        call = Call(function, held, structure, _place(), torch.is_grad_enabled(), _autocast(device))
        self._may_be_read(call)
        self._note_writes(call, leaves, args, kwargs)
        if function.entry.reads == "none" and not call.writes:
            return self.of_form(call, leaves, structure)
        result = self.run(call, leaves, structure)
        self._enter(call, leaves, result, device)
        return result

    def let_go(self) -> None:
        """Let go of tensors, and of the calls that the steps to x do not take."""
        for node in (*self.inputs, *(node for call in self.calls for node in call.outputs)):
            node.alike, node.readers, node.family = None, [], []

    def forget(self) -> None:
        """Let go of all tensors at once: calls and nodes know one another, which only the garbage collector ends."""
        self.let_go()
        for node in (*self.inputs, *(node for call in self.calls for node in call.outputs)):
            node.made = None
        for call in self.calls:
            call.leaves, call.operands, call.drawn = [], [], ()
        self.calls = []

    @abstractmethod
    def run(self, call: Call, leaves: list[Any], structure: Any) -> Any:
        """The result of a call that reads what is of x."""

    @abstractmethod
    def of_form(self, call: Call, leaves: list[Any], structure: Any) -> Any:
        """The result of a call that asks of what shape a tensor is, and not for its numbers."""

    keeps_constants = False
    """Whether tensors that are not of x are kept."""

    def _held(self, leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        node = self.of(leaf)
        if node is not None:
            return node
        if not self.keeps_constants:
            return Constant(None, self.positive(leaf))
        with unwatched():  # it is no call of f
            return Constant(leaf, self.positive(leaf), version(leaf))

    def positive(self, tensor: torch.Tensor) -> bool:
        """Whether all numbers of what does not depend on x are known to be positive."""
        return tensor in self._positive

    def _unseen(self, function: Function, given: Sequence[torch.Tensor]) -> None:
        """Tensors that come from x by what no call tells of."""
        for t in given:
            inner = t
            while (inner := unwrapped(inner)) is not None:
                if inner in self._of:
                    refuse(f"f gives a tensor that depends on x to a transform of torch.func (`{function.called}`).")

    def _may_be_read(self, call: Call) -> None:
        entry = call.function.entry
        if entry.differentiates or entry.registers:
            refuse(f"{call} differentiates, or registers what is called when it is done.")
        for node in call.operands:
            if node.stale:
                refuse(f"{call} reads a tensor whose memory {node.stale} has written in place by another view of it.")

    def _note_writes(self, call: Call, leaves: list[Any], args: tuple, kwargs: dict[str, Any]) -> None:
        function = call.function
        written = [*function.written(args, kwargs), *(args[:1] if function.writes(args, kwargs) else ())]
        places = [i for i, leaf in enumerate(leaves) if any(leaf is t for t in written)]
        call.writes = tuple(i for i in places if isinstance(call.leaves[i], Node))
        call.aside = tuple(i for i in places if i not in call.writes)
        if call.aside and not function.entry.aside:
            refuse(f"{call} writes what depends on x into a tensor that does not. Join parts by torch.cat.")
        for i in call.writes:
            if any(call.leaves[i].family is node.family for node in self.inputs):
                refuse(f"{call} writes into x in place.")

    inputs: Sequence[Node] = ()
    """The nodes of x."""

    def _enter(self, call: Call, leaves: list[Any], result: Any, device: torch.device) -> None:
        tensors = tree.tensors(result)
        if not tensors and not call.writes:
            refuse(f"{call} reads numbers of what depends on x, so that what f does may depend on them.")
        for place in call.writes:
            self._rewrite(call, leaves[place], place)
        fresh = [i for i, t in enumerate(tensors) if self.of(t) is None]
        call.views = bool(fresh) and len(call.operands) == 1 and not call.writes
        with unwatched():  # these are no calls of f, which others may look at too
            families = {storage_of(leaf): node for leaf, node in zip(leaves, call.leaves, strict=True) if is_node(node)}
            sources = {i: families.get(storage_of(tensors[i])) for i in fresh}
        for i in fresh:
            source = sources[i]
            call.views &= source is not None and not (tensors[i].is_conj() or tensors[i].is_neg())
            node = self.node(tensors[i], device, [] if source is None else source.family, call)
            call.results.append((self.known(tensors[i], node), i))
        if call.results or call.rewritten:
            self.calls.append(call)
            for node in call.operands:
                node.readers.append(call)

    def _rewrite(self, call: Call, tensor: torch.Tensor, place: int) -> None:
        """A tensor holds something else from now on, and what shares its memory is not known any more."""
        old = call.leaves[place]
        for other in old.family:
            other.stale = str(call)
        node = self.node(tensor, old.device, old.family, call)
        call.rewritten.append((self.known(tensor, node), place))

    def node(self, tensor: torch.Tensor, device: torch.device, family: list[Node], made: Call | None) -> Node:
        """What a tensor is like."""
        with unwatched():
            offset = int(innermost(tensor).storage_offset())
        return Node(tensor.shape, tensor.stride(), offset, tensor.dtype, device, family, made)


def like_of(tensor: torch.Tensor) -> Node:
    """What a tensor is like, which is given."""
    return Node(tensor.shape, tensor.stride(), 0, tensor.dtype, tensor.device, [])


def is_node(leaf: Any) -> bool:
    """Whether an argument is of x."""
    return isinstance(leaf, Node)


def value(leaf: Any) -> Any:
    """An argument that is not of x."""
    if not isinstance(leaf, Constant):
        return leaf
    with unwatched():
        written = leaf.tensor is not None and version(leaf.tensor) != leaf.version
    if written:
        refuse("f writes in place into a tensor after a call has read it, by whose numbers x is computed.")
    return leaf.tensor


POSITIVE = {"exp", "exp2", "sigmoid", "softplus", "cosh"}
"""What gives positive numbers only."""
KEEPS_SIGN = {"chunk", "split", "getitem", "unsqueeze", "expand", "view", "reshape", "contiguous", "clone", "to"}
KEEPS_SIGN |= {"neg", "float", "double", "tensor_split", "unbind", "squeeze", "select", "narrow", "mul", "div"}
KEEPS_SIGN |= {"reciprocal", "sqrt", "rsqrt", "transpose", "permute", "view_as", "expand_as", "flatten"}
"""What gives positive numbers of positive ones, or other ones than 0 of such."""


def _stays_positive(function: Function, given: Sequence[torch.Tensor], tracer: Tracer) -> bool:
    """Whether a call that does not depend on x gives positive numbers."""
    if function.name in POSITIVE:
        return True
    keeps = function.name in KEEPS_SIGN - {"neg", "mul", "div"}
    return keeps and bool(given) and tracer.positive(given[0])


def _place() -> str:
    """The line of the user's code that makes a call."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in ("torch", "invfunc"):
        frame = frame.f_back
    return "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"


def _autocast(device: torch.device) -> tuple[bool, torch.dtype] | None:
    if not torch.amp.is_autocast_available(device.type):
        return None
    return torch.is_autocast_enabled(device.type), torch.get_autocast_dtype(device.type)
