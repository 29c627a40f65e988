"""The operations of a call as they are written down; of parts that do the same, as chunks do, those of one part."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeVar

from invfunc import thresholds

T = TypeVar("T")
NUMBERS = (int, float, complex)
"""Types of numbers that may differ from part to part."""


class Item:
    """What operations are given."""

    __slots__ = ()


class Step(Item):
    """An operation, or an input, which has no target."""

    __slots__ = ("args", "kwargs", "of", "outs", "place", "target")

    def __init__(self, of: Part, place: int, target: Any, args: Any, kwargs: Any) -> None:
        self.of, self.place, self.target, self.args, self.kwargs = of, place, target, args, kwargs
        self.outs: dict[Any, Out] | None = None

    def out(self, at: tuple[int, Any]) -> Out:
        """What one of the passes of a loop gives: its number, and the place in it."""
        if self.outs is None:
            self.outs = {}
        return self.outs.get(at) or self.outs.setdefault(at, Out(self, at))


class Out(Item):
    """What a pass of a loop gives."""

    __slots__ = ("at", "call")

    def __init__(self, call: Step, at: tuple[int, Any]) -> None:
        self.call, self.at = call, at

    @property
    def of(self) -> Part:
        return self.call.of

    @property
    def place(self) -> Hashable:
        return self.call.place, self.at


class Given(Item):
    """What a pass is given, by its number."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number


@dataclass(eq=False)
class Part:
    """What was done since it has begun."""

    outer: Part | None
    steps: list[Step] = field(default_factory=list)
    call: Step | None = None
    """The loop in the outer part of which it is a pass, once it has ended."""
    row: int = 0
    """Which one."""


@dataclass(eq=False)
class Known:
    """The operations of parts that differ in tensors and numbers alone, which are given to each."""

    number: int
    steps: list[Step]
    """With `Given` in the place of those."""


@dataclass(eq=False)
class Loop:
    """The target of a step: parts one after the other. The arguments are columns of what they are given: a list where
    it differs, and else what all of them take, or the first one, if it is `carried` from each to the next."""

    known: Known
    count: int = 1
    carried: dict[int, Any] = field(default_factory=dict)
    """For such columns the place in the part before."""

    @property
    def key(self) -> Hashable:
        return self.known, self.count, tuple(self.carried.items())


class Tape:
    """Writes the operations of a call down, one after the other."""

    def __init__(self) -> None:
        self.root = self.part = Part(None)
        self.inputs: list[Step] = []
        self.known: dict[Hashable, Known] = {}
        self.fewest = thresholds.REPEATED
        """Parts from which on there is a loop over them."""
        self.operations = 0
        """How many have been written down, in parts that do the same once."""
        self.differ = 0
        """How many tensors and numbers there are that differ in those."""

    @property
    def size(self) -> int:
        """How much is kept, in operations."""
        return self.operations + self.differ // 64

    @property
    def within(self) -> bool:
        """Whether a part has begun."""
        return self.part is not self.root

    def input(self, name: str) -> Step:
        """A new input."""
        self.inputs.append(Step(self.root, -1, None, name, {}))
        return self.inputs[-1]

    def write(self, target: Callable[..., Any] | Loop, args: Any, kwargs: Any = None) -> Step:
        """Write an operation down."""
        own, self.operations = self.part, self.operations + 1
        step = Step(own, len(own.steps), target, args, kwargs or {})
        own.steps.append(step)
        return step

    def insert(self, behind: Step, target: Callable[..., Any], args: Any) -> Step:
        """Write an operation down that comes right behind another one, or an input; not within parts."""
        step, steps = Step(self.root, -1, target, args, {}), self.root.steps
        steps.insert(0 if behind.target is None else steps.index(behind) + 1, step)
        return step

    def each(self, parts: Iterable[T]) -> Iterator[T]:
        """The parts, one after the other, unless they are few."""
        parts = list(parts)
        for part in parts:
            own = Part(self.part) if len(parts) > self.fewest else None
            self.part = own or self.part
            yield part
            if own is not None and own in self._open():
                while self.part is not own:  # one that was left before its end
                    self._dissolve()
                self._end(own)

    def spill(self) -> None:
        """Write the operations of parts one by one: these are none that could come again."""
        while self.part.outer is not None:
            self._dissolve()

    def _open(self) -> list[Part]:
        found: list[Part] = [self.part]
        while (outer := found[-1].outer) is not None:
            found.append(outer)
        return found

    def _dissolve(self) -> None:
        own, outer = self.part, self.part.outer
        assert outer is not None
        for step in own.steps:
            step.of, step.place = outer, len(outer.steps)
            outer.steps.append(step)
        own.steps, self.part = [], outer

    def _end(self, own: Part) -> None:
        outer, given = own.outer, list[Any]()
        assert outer is not None
        self.part = outer
        if not own.steps:
            return

        def leaf(x: Any) -> Hashable:
            kind = type(x)
            if kind is Step or kind is Out:
                if x.of is own:
                    return Item, x.place
                kind = Item
            elif kind not in NUMBERS:
                return kind, x
            given.append(x)
            return kind

        key = tuple([(_target(step), form(leaf, step.args), form(leaf, step.kwargs)) for step in own.steps])
        known = self.known.get(key)
        if known is None:
            known = self.known[key] = Known(len(self.known), _lifted(own))
        else:
            self.operations -= len(own.steps)
        last = outer.steps[-1] if outer.steps else None
        if last is None or not self._continues(last, known, given):
            last = self.write(Loop(known), given)
        own.call, own.row = last, last.target.count - 1
        for step in own.steps:
            step.args = step.kwargs = None  # which have others in them
        own.steps = []

    def _continues(self, call: Step, known: Known, given: list[Any]) -> bool:
        """Write a part down as the next pass of a loop, if it is one."""
        loop = call.target
        if not isinstance(loop, Loop) or loop.known is not known:
            return False
        carried, differ, count = dict(loop.carried), list[int](), loop.count
        for i, (x, y) in enumerate(zip(call.args, given, strict=True)):
            if isinstance(y, Out) and y.call is call:
                row, place = y.at
                if row != count - 1 or (count > 1 and carried.get(i) != place):
                    return False
                carried[i] = place
            elif i in carried:
                return False
            elif type(x) is list or not same(x, y):
                differ.append(i)
        for i in differ:
            if type(call.args[i]) is not list:
                call.args[i] = [call.args[i]] * count
            call.args[i].append(given[i])
        loop.count, loop.carried, self.differ = count + 1, carried, self.differ + len(differ)
        return True


def outward(x: Item) -> Any:
    """An item, as what comes behind the parts that have ended may take it."""
    while isinstance(x, (Step, Out)) and (call := x.of.call) is not None:
        x = call.out((x.of.row, x.place))
    return x


def same(x: Any, y: Any) -> bool:
    """Whether they are one item, or the same number to the bit."""
    return x is y or (type(x) is type(y) and not isinstance(x, Item) and repr(x) == repr(y))


def _target(step: Step) -> Hashable:
    return step.target.key if isinstance(step.target, Loop) else step.target


def _lifted(own: Part) -> list[Step]:
    """The operations of a part, by themselves."""
    found, part, count = list[Step](), Part(None), iter(range(2**62))

    def leaf(x: Any) -> Any:
        if isinstance(x, Out) and x.of is own:
            return found[x.call.place].out(x.at)
        if isinstance(x, Step) and x.of is own:
            return found[x.place]
        return Given(next(count)) if isinstance(x, Item) or type(x) in NUMBERS else x

    for step in own.steps:
        found.append(Step(part, step.place, step.target, mapped(leaf, step.args), mapped(leaf, step.kwargs)))
    return found


def mapped(leaf: Callable[[Any], Any], x: Any) -> Any:
    """Arguments of an operation, with others in the place of what is in them."""
    kind = type(x)
    if kind is tuple or kind is list:
        return kind([mapped(leaf, y) for y in x])
    return {key: mapped(leaf, y) for key, y in x.items()} if kind is dict else leaf(x)


def form(leaf: Callable[[Any], Hashable], x: Any) -> Hashable:
    """What arguments of an operation are made of, to be compared."""
    kind = type(x)
    if kind is tuple or kind is list:
        return kind, *[form(leaf, y) for y in x]
    return (dict, *[(key, form(leaf, y)) for key, y in x.items()]) if kind is dict else leaf(x)
