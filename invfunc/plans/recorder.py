"""A call written down, operation by operation, while it runs."""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import ref

import torch

from invfunc import thresholds, tree
from invfunc._torch.functorch import TorchDispatchMode, same_generator, storage, unheard
from invfunc._torch.weak import WeakIdMap
from invfunc.plans.draws import Drawn, default_generators, draws
from invfunc.plans.facts import Facts, by_numbers, facts_of, written
from invfunc.plans.key import content
from invfunc.plans.tape import Item, Step, Tape, outward
from invfunc.plans.watch import Watch
from invfunc.transform import Transform

_ATEN = torch.ops.aten
_NO_TENSORS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device, torch.layout, torch.Size})
_LIFTED = _ATEN.lift_fresh.default


@dataclass
class Guard:
    """A number, or several, that the call has read: what they are computed as, and what they were."""

    copy: Item
    value: torch.Tensor
    site: str
    """Where in the code it was read."""
    of: torch.Tensor | None = None
    """What it is a copy of, which may be written later."""
    original: Item | None = None

    def item(self, written: Callable[[torch.Tensor], bool]) -> Item:
        """What gives them: the copy, if it is needed."""
        found = self.copy if self.original is None or self.of is None or written(self.of) else self.original
        self.of = None
        return found


_DEPENDS, _GIVEN, _WRITTEN = 1, 2, 4
"""What is known of memory: its numbers depend on arguments, it is the caller's, it is written in place."""


class Recorder(TorchDispatchMode):
    """Writes down all that is done with tensors. What runs is the call itself; nothing is changed in it.

    As soon as there is something that a graph cannot repeat, `why` says it, and no more is written down. It `watches`
    also where other modes are switched off.
    """

    watches = True

    def __init__(self, given: Iterable[torch.Tensor], watch: Watch) -> None:
        super().__init__()
        self.why, self.watch = "", watch
        self.tape, self.guards = Tape(), list[Guard]()
        self.sources: list[Callable[[], Any]] = []
        """Where the inputs of the graph behind the arguments come from."""
        self.closed: list[ref[torch.Tensor]] = []
        """What it reads that is closed over."""
        self.values: dict[Item, torch.Tensor] = {}
        """Small results that depend on no argument, and belong to no part."""
        self.literal = False
        """Whether the call that runs makes a tensor of numbers that are no tensor's."""
        self.turns = False
        """Whether something is made another view of its memory."""
        self._items: WeakIdMap[Item] = WeakIdMap()
        self._memory: WeakIdMap[int] = WeakIdMap()
        self._constants: dict[Any, Item] = {}
        """Those among the inputs, by their content where they are small."""
        self.drawn = Drawn(self._generator, self.tape, watch)
        for x in given:
            self._enter(x, self._input("given"))

    def depends(self, x: torch.Tensor) -> bool:
        """Whether the numbers of a tensor depend on arguments, on what is closed over, or on what is drawn."""
        return self._items.get(x) is None or bool(self._known(x) & _DEPENDS)

    def written(self, x: torch.Tensor) -> bool:
        """Whether something is written into its memory."""
        return bool(self._known(x) & _WRITTEN)

    def refuse(self, why: str) -> None:
        """Say why there is no plan of this call."""
        self.why = self.why or f"{why} (at {site()})"

    def read(self, x: torch.Tensor) -> None:
        """Note that numbers of a tensor are read, so that what follows may depend on them."""
        if self.why or not self.depends(x) or (item := self.input(x)) is None:
            return
        if x.numel() > thresholds.COMPARED_NUMBERS:
            self.refuse(f"it reads {x.numel()} numbers")
            return
        copy = self.tape.write(_ATEN.clone.default, (item,))
        known = (None, None) if self.tape.within else (x, item)
        self.guards.append(Guard(copy, x.detach().clone(), site(), *known))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.why:
            return func(*args, **kwargs)
        with unheard():  # of what is looked at here
            return self._done(func, args, kwargs)

    def _done(self, func: Any, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Do an operation, and write it down."""
        if func is _LIFTED and self._items.get(args[0]) is None:
            self._literal(args[0])
        facts, given, generator = facts_of(func), list[torch.Tensor](), None
        if drawing := facts.draws and draws(func, args, kwargs):
            self.tape.spill()
            generator = self.drawn.before(func, args, kwargs)
        taken = self._taken(args, given), self._taken(kwargs, given)
        if self.why or self.drawn.why or not facts.operator or not all([x.layout is torch.strided for x in given]):
            self.refuse(self.drawn.why or f"it calls {func}, which is more than an operation on dense tensors")
            return func(*args, **kwargs)
        if facts.decides and func is _ATEN._local_scalar_dense.default:
            self.read(args[0])
            return func(*args, **kwargs)
        if facts.decides and func is _ATEN.equal.default:
            return self._equal(func, *args)
        result = func(*args, **kwargs)
        self._write(func, facts, args, kwargs, given, taken, result, drawing)
        if generator is not None:
            self.drawn.after(generator, self.tape.root.steps[-1])
        return result

    def _equal(self, func: Any, a: torch.Tensor, b: torch.Tensor) -> bool:
        """Whether tensors are equal is a guard, unless their shapes say it."""
        found = func(a, b)
        if a.shape == b.shape and (self.depends(a) or self.depends(b)):
            item = self.tape.write(_ATEN.eq.Tensor, (self.input(a), self.input(b)))
            item = self.tape.write(_ATEN.all.default, (item,))
            self.guards.append(Guard(item, a.eq(b).all(), site()))
        return found

    def _write(
        self, func: Any, facts: Facts, args: tuple, kwargs: dict, given: list, taken: tuple, result: Any, drawn: bool
    ) -> None:
        """Write an operation behind the others."""
        depends = drawn or any([self._known(x) & _DEPENDS for x in given])
        self._refuse_write(func, facts, args, kwargs, depends, result)
        if self.why:
            return
        self.turns = self.turns or facts.turns
        for x in written(func, args, kwargs) if facts.writes else ():
            self._memory.set(storage(x), self._known(x) | _WRITTEN | depends)
        if sized := depends and facts.sized and by_numbers(func, args):
            self.tape.spill()
        item = self.tape.write(func, *taken)
        depends = depends and (drawn or not facts.of_shapes)
        for x, at in _places(result, item, self.tape):
            self._make(x, at, depends)
            if sized:
                self.tape.write(same_shape, (at, list(x.shape), site()))

    def _refuse_write(self, func: Any, facts: Facts, args: tuple, kwargs: dict, depends: bool, result: Any) -> None:
        """Say why an operation cannot be written down, if that is so."""
        if depends and facts.decides and not tree.tensors((result,)):
            self.refuse(f"what `{func.overloadpacket.__name__}` reads decides what is done")
        elif self.tape.size > thresholds.OPERATIONS:
            self.refuse(
                f"it has more than {thresholds.OPERATIONS} operations; ask for fewer chunks, or give parts of the "
                "batch as a loader to streamed(compiled(t)), whose plan is of one part"
            )
        elif facts.writes and any(self._known(x) & _GIVEN for x in written(func, args, kwargs)):
            self.refuse(f"`{func}` writes into what it was given, or closes over")

    def _make(self, x: torch.Tensor, item: Step, depends: bool) -> None:
        """Note what is the result of an operation."""
        self._items.set(x, item)
        memory = storage(x)
        known = self._memory.get(memory) or 0
        if depends and not known & _DEPENDS:
            self._memory.set(memory, known | _DEPENDS)
        elif not (depends or self.tape.within or known & _DEPENDS) and memory.nbytes() <= 8 * thresholds.FOLDED:
            self.values[item] = x

    def _known(self, x: torch.Tensor) -> int:
        """What is known of the memory of a tensor."""
        return self._memory.get(storage(x)) or 0

    # Inputs of the graph

    def _input(self, name: str) -> Step:
        return self.tape.input(f"{name}_{len(self.tape.inputs)}")

    def _enter(self, x: torch.Tensor, item: Item) -> None:
        self._items.set(x, item)
        self._memory.set(storage(x), self._known(x) | _GIVEN | _DEPENDS)

    def constant(self, x: torch.Tensor) -> Item:
        """An input that is always this tensor, of which nobody else knows."""
        key = content(x)
        key = id(x) if key is None else key
        if key not in self._constants:
            self.sources.append(lambda: x)
            self._constants[key] = self._input("constant")
        return self._constants[key]

    def _literal(self, x: torch.Tensor) -> None:
        """A tensor made of numbers of Python's, anew in each call."""
        if not self.literal:
            self.refuse("it makes a tensor of numbers, and does not say which (from numpy, or by torch.Tensor)")
            return
        own = x.detach().clone()
        item = self.tape.write(_ATEN.clone.default, (self.constant(own),))
        self._items.set(x, item)
        if not self.tape.within and own.numel() <= thresholds.FOLDED:
            self.values[item] = x

    def input(self, x: torch.Tensor) -> Any:
        """What a tensor is for what is written next."""
        item = self._items.get(x)
        if item is not None:
            return outward(item)
        held = self.watch.tensor(x)
        if held is None:
            self.refuse("it reads a tensor that is no argument, and not closed over where that can be seen")
            return None
        self.closed.append(held)
        self.sources.append(held)
        self._enter(x, self._input("closed_over"))
        return self._items.get(x)

    def _generator(self, g: torch.Generator) -> Step | None:
        held: Any = self.watch.generator(g)
        if held is None and all(same_generator(g) != same_generator(own) for own in default_generators()):
            return None
        self.sources.append(held or (lambda: g))
        return self._input("generator")

    def _taken(self, x: Any, given: list[torch.Tensor]) -> Any:
        """Arguments of an operation as they are written down; tensors among them are added to what is given."""
        kind = type(x)
        if kind in _NO_TENSORS:
            return x
        if isinstance(x, torch.Tensor):
            given.append(x)
            return self.input(x)
        if kind is tuple or kind is list:
            return kind([self._taken(y, given) for y in x])
        if kind is dict:
            return {key: self._taken(y, given) for key, y in x.items()}
        return self.drawn.item(x) if isinstance(x, torch.Generator) else x


def _places(result: Any, item: Step, tape: Tape) -> Iterable[tuple[torch.Tensor, Step]]:
    """The tensors among what an operation returns, each as it is written down."""
    if isinstance(result, torch.Tensor):
        return [(result, item)]
    if not isinstance(result, (list, tuple)):
        return []
    found = [(i, x) for i, x in enumerate(result) if isinstance(x, torch.Tensor)]
    return [(x, tape.write(operator.getitem, (item, i))) for i, x in found]


class Missed(Exception):
    """A call is not as the plan has it."""


def same_shape(x: torch.Tensor, shape: list[int], at: str) -> None:
    """A guard in a plan, of a shape that depends on numbers; all that follows relies on it."""
    if list(x.shape) != shape:
        raise Missed(f"a shape that depends on numbers (at {at})")


_BETWEEN = "/values.py", "/contextlib.py"
"""Where numbers are read for others."""
_TORCH, _OURS = torch.__path__[0], str(Path(__file__).parents[1])


def site() -> str:
    """The line of code that runs: of the caller's, or where there is none, of this library."""
    frame, found = sys._getframe(1), ""
    while frame is not None:
        name = frame.f_code.co_filename
        if not name.startswith((_TORCH, "<")) and "/invfunc/plans/" not in name and not name.endswith(_BETWEEN):
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
