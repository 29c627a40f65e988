"""A call written down, operation by operation, while it runs."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any
from weakref import ref

import torch
from torch import fx

from invfunc import thresholds, tree
from invfunc._torch.functorch import TorchDispatchMode, same_generator, storage
from invfunc._torch.weak import WeakIdMap
from invfunc.plans.draws import Drawn, default_generators, draws
from invfunc.plans.key import content
from invfunc.plans.parts import Parts, Step
from invfunc.plans.watch import Watch
from invfunc.transform import Transform

_ATEN = torch.ops.aten
Operator = type(_ATEN.add.Tensor)
_OF_SHAPES = {
    *("zeros_like", "ones_like", "full_like", "empty_like", "new_zeros", "new_ones", "new_full", "new_empty"),
    *("new_empty_strided",),
}
"""Operations whose result does not depend on the numbers of what they are given."""
_BOOLEAN = (torch.bool, torch.uint8)


@dataclass
class Guard:
    """A number, or several, that the call has read: what they are computed as, and what they were."""

    node: fx.Node
    value: torch.Tensor
    site: str
    """Where in the code it was read."""
    of: torch.Tensor | None = None
    """What it is a copy of, which may be written later."""

    def leave(self) -> None:
        """Be what the graph has behind the part in which it was read."""
        node: Any = self.node
        self.node, self.of = node.outside(), None


class Recorder(TorchDispatchMode):
    """Writes a graph of all that is done with tensors. What runs is the call itself; nothing is changed in it.

    As soon as there is something that a graph cannot repeat, `why` says it, and no more is written down. It `watches`
    also where other modes are switched off.
    """

    watches = True

    def __init__(self, given: Iterable[torch.Tensor], watch: Watch) -> None:
        super().__init__()
        self.why, self.watch = "", watch
        self.graph, self.guards = fx.Graph(), list[Guard]()
        self.parts = Parts(self.graph)
        self.sources: list[Callable[[], Any]] = []
        """Where the inputs of the graph behind the arguments come from."""
        self.closed: list[ref[torch.Tensor]] = []
        """What it reads that is closed over."""
        self.values: dict[fx.Node | Step, torch.Tensor] = {}
        """Small results that depend on no argument."""
        self.literal = False
        """Whether the call that runs makes a tensor of numbers that are no tensor's."""
        self._nodes: WeakIdMap[fx.Node | Step] = WeakIdMap()
        self._dependent: WeakIdMap[bool] = WeakIdMap()
        self._given: WeakIdMap[bool] = WeakIdMap()
        self.written: WeakIdMap[bool] = WeakIdMap()
        """Memory: that whose numbers depend on arguments, that of the caller, and that which is written in place."""
        self._constants: dict[Any, fx.Node] = {}
        """Those among the inputs, by their content where they are small."""
        self._last: fx.Node | None = None
        self._count = 0
        self.drawn = Drawn(self._generator, self.graph, watch)
        for x in given:
            self._enter(x, self._placeholder("given"))

    def depends(self, x: torch.Tensor) -> bool:
        """Whether the numbers of a tensor depend on arguments, on what is closed over, or on what is drawn."""
        return self._nodes.get(x) is None or bool(self._dependent.get(storage(x)))

    def refuse(self, why: str) -> None:
        """Say why there is no plan of this call."""
        self.why = self.why or f"{why} (at {site()})"

    def read(self, x: torch.Tensor) -> None:
        """Note that numbers of a tensor are read, so that what follows may depend on them."""
        if self.why or not self.depends(x) or self.input(x) is None:
            return
        if x.numel() > thresholds.COMPARED_NUMBERS:
            self.refuse(f"it reads {x.numel()} numbers")
            return
        kept = self.parts.write(_ATEN.clone.default, (self.input(x),))
        self._guard(Guard(kept, x.detach().clone(), site(), x))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.why:
            return func(*args, **kwargs)
        if func is _ATEN.lift_fresh.default and self._nodes.get(args[0]) is None:
            self._literal(args[0])
        given = tree.tensors((args, kwargs))
        for x in given:
            self.input(x)  # which it may be from now on
        generator = None
        if draws(func, args, kwargs):
            self.parts.spill()
            generator = self.drawn.before(func, args, kwargs)
        if self.why or any(x.layout is not torch.strided for x in given) or not isinstance(func, Operator):
            self.refuse(self.drawn.why or f"it calls {func}, which is more than an operation on dense tensors")
            return func(*args, **kwargs)
        if func is _ATEN._local_scalar_dense.default:
            self.read(args[0])
            return func(*args, **kwargs)
        if func is _ATEN.equal.default:
            return self._equal(func, *args)
        result = func(*args, **kwargs)
        self._write(func, args, kwargs, given, result, generator is not None)
        if generator is not None:
            self.drawn.after(generator, self._last_node)
        return result

    @property
    def _last_node(self) -> fx.Node:
        return next(iter(reversed(self.graph.nodes)))

    def _equal(self, func: Any, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether tensors are equal is a guard, unless their shapes say it."""
        found = func(a, b)
        if a.shape == b.shape and (self.depends(a) or self.depends(b)):
            node = self.parts.write(_ATEN.eq.Tensor, (self.input(a), self.input(b)))
            node = self.parts.write(_ATEN.all.default, (node,))
            self._guard(Guard(node, a.eq(b).all(), site()))
        return found

    def _guard(self, guard: Guard) -> None:
        self.guards.append(guard)
        if isinstance(guard.node, Step):
            self.parts.ended.append(guard.leave)

    def _write(self, func: Any, args: tuple, kwargs: dict, given: list[torch.Tensor], result: Any, drawn: bool) -> None:
        """Write an operation behind the others."""
        depends = drawn or any(map(self.depends, given))
        made = tree.tensors((result,))
        if depends and torch.Tag.data_dependent_output in func.tags and not made:
            self.refuse(f"what `{func.overloadpacket.__name__}` reads decides what is done")
            return
        if self.parts.operations > thresholds.OPERATIONS:
            self.refuse(
                f"it has more than {thresholds.OPERATIONS} operations; ask for fewer chunks, or give parts of the "
                "batch as a loader to streamed(compiled(t)), whose plan is of one part"
            )
            return
        for x in written(func, args, kwargs):
            if self._given.get(storage(x)):
                self.refuse(f"`{func}` writes into what it was given, or closes over")
                return
            self.written.set(storage(x), True)
            if depends:
                self._dependent.set(storage(x), True)
        if sized := depends and _sized(func, args):
            self.parts.spill()
        node = self.parts.write(func, self._put(args), self._put(kwargs))
        depends = depends and (drawn or func.overloadpacket.__name__ not in _OF_SHAPES)
        for x, at in _places(result, node, self.parts):
            self._nodes.set(x, at)
            if depends:
                self._dependent.set(storage(x), True)
            elif storage(x).nbytes() <= 8 * thresholds.FOLDED and not self.depends(x):
                self.values[at] = x
            if sized:
                self.parts.write(same_shape, (at, list(x.shape), site()))

    # Inputs of the graph

    def _placeholder(self, name: str) -> fx.Node:
        """A new input; they come before all operations."""
        name = f"{name}_{self._count}"
        self._count += 1
        if self._last is None:
            self._last = self.graph.placeholder(name)
            return self._last
        with self.graph.inserting_after(self._last):
            self._last = self.graph.placeholder(name)
        return self._last

    def _enter(self, x: torch.Tensor, node: fx.Node) -> None:
        memory = storage(x)
        self._nodes.set(x, node)
        self._given.set(memory, True)
        self._dependent.set(memory, True)

    def constant(self, x: torch.Tensor) -> fx.Node:
        """An input that is always this tensor, of which nobody else knows."""
        key = content(x)
        if key is None or key not in self._constants:
            self.sources.append(lambda: x)
            self._constants[key] = self._placeholder("constant")
        return self._constants[key]

    def _literal(self, x: torch.Tensor) -> None:
        """A tensor made of numbers of Python's, anew in each call."""
        if not self.literal:
            self.refuse("it makes a tensor of numbers, and does not say which (from numpy, or by torch.Tensor)")
            return
        own = x.detach().clone()
        node = self.parts.write(_ATEN.clone.default, (self.constant(own),))
        self._nodes.set(x, node)
        if own.numel() <= thresholds.FOLDED:
            self.values[node] = x

    def input(self, x: torch.Tensor) -> Any:
        """What a tensor is in the graph."""
        node = self._nodes.get(x)
        if node is not None:
            return self.parts.now(node)
        held = self.watch.tensor(x)
        if held is None:
            self.refuse("it reads a tensor that is no argument, and not closed over where that can be seen")
            return None
        self.closed.append(held)
        self.sources.append(held)
        self._enter(x, self._placeholder("closed_over"))
        return self._nodes.get(x)

    def _generator(self, g: torch.Generator) -> fx.Node | None:
        held: Any = self.watch.generator(g)
        if held is None and all(same_generator(g) != same_generator(own) for own in default_generators()):
            return None
        self.sources.append(held or (lambda: g))
        return self._placeholder("generator")

    def _put(self, x: Any) -> Any:
        """Arguments of an operation, as they are in the graph."""
        if isinstance(x, torch.Tensor):
            return self.input(x)
        if isinstance(x, torch.Generator):
            return self.drawn.node(x)
        if isinstance(x, (list, tuple)):
            return type(x)(map(self._put, x)) if type(x) in (list, tuple) else x
        return {key: self._put(value) for key, value in x.items()} if isinstance(x, dict) else x


def _places(result: Any, node: Any, parts: Parts) -> Iterable[tuple[torch.Tensor, Any]]:
    """The tensors among what an operation returns, each with its node."""
    if isinstance(result, torch.Tensor):
        return [(result, node)]
    if not isinstance(result, (list, tuple)):
        return []
    found = [(i, x) for i, x in enumerate(result) if isinstance(x, torch.Tensor)]
    return [(x, parts.write(operator.getitem, (node, i))) for i, x in found]


def _sized(func: Any, args: tuple) -> bool:
    """Whether the shape of what an operation gives depends on numbers."""
    if torch.Tag.dynamic_output_shape in func.tags:
        indexes = func.overloadpacket.__name__ in ("index", "_unsafe_index")
        return not indexes or any(x.dtype in _BOOLEAN for x in tree.tensors((args[1:],)))
    return func is _ATEN._pack_padded_sequence.default


class Missed(Exception):
    """A call is not as the plan has it."""


def same_shape(x: torch.Tensor, shape: list[int], at: str) -> None:
    """A guard in a plan, of a shape that depends on numbers; all that follows relies on it."""
    if list(x.shape) != shape:
        raise Missed(f"a shape that depends on numbers (at {at})")


@cache
def writes(func: Any) -> tuple[tuple[int, str], ...]:
    """Which arguments an operation writes in place, by number and name."""
    found = enumerate(func._schema.arguments)
    return tuple((i, a.name) for i, a in found if a.alias_info is not None and a.alias_info.is_write)


def written(func: Any, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that an operation writes in place."""
    found = [args[i] if i < len(args) else kwargs.get(name) for i, name in writes(func)]
    return tree.tensors(tuple(found))


_TORCH, _OURS = torch.__path__[0], str(Path(__file__).parents[1])


def site() -> str:
    """The line of code that runs: of the caller's, or where there is none, of this library."""
    frame, found = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, "<")) and "/invfunc/plans/" not in name and not name.endswith("/values.py"):
            here = "/".join(name.split("/")[-2:]) + f":{frame.f_lineno}"
            if not name.startswith(_OURS):
                return here
            found = found or here
            if isinstance(frame.f_locals.get("self"), Transform):
                return found
        frame = frame.f_back
    return found


def outside() -> int:
    """How many calls further out that one is which is neither of torch nor of this library."""
    frame, count = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_code.co_filename.startswith((_TORCH, _OURS)):
        frame, count = frame.f_back, count + 1
    return count
