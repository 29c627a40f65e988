"""How the tensors of a function came about, so that one that is computed again is known to be the same one.

Each call becomes a number: of the operation, its arguments, and how those came about in turn. Equal numbers mean the
same operations on the same inputs (they are hashes of 64 bits), whatever is done beside them; values do not matter.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple
from weakref import ref

import torch

from invfunc import tree
from invfunc._torch.generators import state_of
from invfunc.operations.heard import Function

OUTSIDE, INVERSE = -1, -2
"""The parts of a function that are in none of its shared functions, which are counted from 0: of f, and of its inverse.
"""
Key = tuple[int, int]
"""Which saved tensor: the part that saves it, and which one there."""
Origin = tuple[int, int]
"""Where a tensor or call comes from: two hashes of its operations and their arguments, without and with fractions."""


class Place(NamedTuple):
    """The call in which a tensor is saved."""

    call: str
    origin: Origin
    read: bool
    """Whether numbers were read from tensors before, which may have the rounding errors of x."""
    kinked: bool = False
    """Whether its derivative jumps."""

    def same(self, other: Place) -> bool:
        """Whether two calls are the same, with the same fractions where these cannot come from x."""
        return self.origin == other.origin or (self.origin[0] == other.origin[0] and (self.read or other.read))

    def instead_of(self, other: Place) -> str:
        """The sentence of an error that says that there was another call."""
        call, then = (f"`{place.call}`" if place.call else "a call that is not seen" for place in (self, other))
        if call != then:
            return f"autograd saves a tensor of {call} where it saved one of {then} the first time"
        return f"{call}, of which autograd saves a tensor, has other arguments than the first time"


Names = dict[Hashable, list[Origin]]
"""The origins of what the parts of a function are given and give."""
Given = dict[int, list[Place]]
"""How what the parts give came about within them."""
_UNKNOWN: Origin = (0, 0)


class Origins:
    """Follows the calls of one evaluation, of which some are within parts.

    Args:
        names: those of the first evaluation; None if this is the first.
        given: what its parts gave; None if this is the first.
    """

    def __init__(self, names: Names | None = None, given: Given | None = None) -> None:
        self._names: Names = {} if names is None else names
        self._given: Given = {} if given is None else given
        self._scope: Scope | None = Scope(OUTSIDE)
        self._read = False
        self.paused = Paused()

    def again(self) -> Origins:
        """New origins for an evaluation that is to be compared with this one."""
        return Origins(self._names, self._given)

    def save(self) -> tuple[Key, Place]:
        """The key of the tensor that is saved now, and the last call of the part, by which it is saved, or by what is
        not seen and comes after it."""
        scope = self._scope
        assert scope is not None  # autograd saves nothing of the inverse
        key = scope.part, scope.saved
        scope.saved += 1
        if self.paused.depth:
            return key, Place("", (0, 0), self._read)
        return key, Place(scope.name, scope.now, self._read, scope.kinked)

    def enter(self, part: int) -> Scope | None:
        """A part begins, within another one, which `leave` goes back to. What the inverse does beside shared functions
        is not followed."""
        outer, self._scope = self._scope, None if part == INVERSE else Scope(part)
        return outer

    def leave(self, outer: Scope | None) -> None:
        """The part has ended."""
        self._scope = outer

    def begin(self, given: Sequence[torch.Tensor]) -> None:
        """The function of a part is called at these tensors; what came before is none of its doing."""
        assert self._scope is not None
        self._scope = Scope(self._scope.part)
        self.know(("given", self._scope.part), given)

    def know(self, key: Hashable, tensors: Sequence[torch.Tensor]) -> None:
        """Tensors that come from elsewhere. They may be one and the same in one evaluation, and not in another."""
        scope = self._scope
        if scope is None:
            return
        of, known = scope.of, self._names.setdefault(key, [])
        for i, t in enumerate(tensors):
            if i == len(known):  # that is met for the first time
                found = of.get(id(t))
                known.append(_origin(key, i) if found is None or found[0]() is not t else found[1])
            of[id(t)] = ref(t), known[i]

    def gives(self, result: Any) -> bool:
        """The part that is being evaluated gives this; whether it came about as in the first evaluation."""
        scope = self._scope
        assert scope is not None
        now = [Place("", origin or _UNKNOWN, self._read) for origin in map(scope.known, tree.tensors(result))]
        then = self._given.setdefault(scope.part, now)
        return all(a.same(b) or _UNKNOWN in (a.origin, b.origin) for a, b in zip(now, then, strict=False))

    def alias(self, tensor: torch.Tensor, of: torch.Tensor) -> None:
        """A tensor takes the place of another one, which may come from elsewhere."""
        scope = self._scope
        if scope is not None and (known := scope.known(of)) is not None:
            scope.of[id(tensor)] = ref(tensor), known

    def call(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> bool:
        """A call that begins; whether it is followed, and `made` is to be told what it gave."""
        scope = self._scope
        if scope is None or self.paused.depth or function.entry.asks != "no":
            return False
        steps: list[Hashable] = [function.func, scope.order, torch.is_grad_enabled()]
        fractions: list[Hashable] = []
        scope.spell(args, steps, fractions)
        if kwargs:
            scope.spell(kwargs, steps, fractions)
        number = hash(tuple(steps))
        scope.kinked = function.entry.piecewise
        scope.name, scope.now = function.name, (number, hash((number, *fractions)) if fractions else number)
        in_order = function.renews or function.inplace_at is not None or function.entry.draws is not False
        if in_order or (kwargs and ("out" in kwargs or "generator" in kwargs)):
            scope.order = number
        return True

    def made(self, result: Any) -> None:
        """What the last call gave."""
        scope = self._scope
        if scope is None:
            return
        if isinstance(result, torch.Tensor):
            scope.of[id(result)] = ref(result), scope.now
            return
        tensors = tree.tensors(result)
        for i, t in enumerate(tensors):
            origin = hash((scope.now[0], i)), hash((scope.now[1], i))
            scope.of[id(t)] = ref(t), origin
        self._read |= not tensors and not isinstance(result, _NO_FRACTIONS)


class Paused:
    """A context in which what is called and saved is none of the function's own doing."""

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *error: Any) -> None:
        self.depth -= 1


class Scope:
    """What is known in one part."""

    def __init__(self, part: int) -> None:
        self.part, self.saved = part, 0
        """Which part it is, and how many tensors it has saved."""
        self.of: dict[int, tuple[ref[torch.Tensor], Origin]] = {}
        self._outside = 0
        self.name, self.now, self.kinked = "", (0, 0), False
        """The last call."""
        self.order = 0
        """The last call that may have written or drawn: before it and after it calls are not the same."""

    def known(self, tensor: torch.Tensor) -> Origin | None:
        """That of a tensor, if there is one."""
        found = self.of.get(id(tensor))
        return found[1] if found is not None and found[0]() is tensor else None

    def spell(self, args: Any, steps: list[Hashable], fractions: list[Hashable]) -> None:
        """Add the arguments of a call."""
        if isinstance(args, dict):
            steps.extend(args)
            args = args.values()
        of = self.of
        for arg in args:
            found, kind = of.get(id(arg)), type(arg)
            known = found[1] if found is not None and found[0]() is arg else None
            if known or isinstance(arg, torch.Tensor):
                step, fraction = known or self._from_outside(arg)
                steps.append(step)
                if fraction != step:
                    fractions.append(fraction)
            elif kind in _PLAIN:
                steps.append(repr(arg))  # as hash(-1) == hash(-2)
            elif isinstance(arg, (float, complex)):
                steps.append(kind)
                fractions.append(repr(arg))
            elif isinstance(arg, (tuple, list, dict)):
                steps += (kind, len(arg))
                self.spell(arg, steps, fractions)
            elif kind is slice:
                steps.append(kind)
                self.spell((arg.start, arg.stop, arg.step), steps, fractions)
            else:
                steps.append(kind)
                if kind is torch.Generator:
                    steps.append(state_of(arg).numpy().tobytes())
                elif (held := _held(arg)) is not None:
                    (fractions if held[0] else steps).append(held[1])

    def _from_outside(self, tensor: torch.Tensor) -> Origin:
        """They are told apart by the order in which they are read first, as in `Recall`."""
        origin = _origin("outside", self._outside, tensor.requires_grad)
        self._outside += 1
        self.of[id(tensor)] = ref(tensor), origin
        return origin


def _held(arg: Any) -> tuple[bool, int] | None:
    """Whether an array (of numpy, or with its memory as a buffer) holds fractions, and a hash of what it holds."""
    try:
        view = memoryview(arg)
        return view.format.lstrip("@=<>!")[:1] in _FRACTIONS, hash((view.format, view.shape, view.tobytes()))
    except (TypeError, ValueError, BufferError, NotImplementedError):  # it has none, or not one of numbers
        return None


@lru_cache(1024)
def _origin(*key: Hashable) -> Origin:
    number = hash(key)
    return number, number


_PLAIN = {int, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format}
_FRACTIONS = {"e", "f", "d", "g", "Z"}
"""The formats of floats and complex numbers in a buffer."""
_NO_FRACTIONS = (int, str, tuple, type(None), torch.dtype, torch.device, torch.layout)
