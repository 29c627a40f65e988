"""What a function reads and writes that is none of its arguments."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from invfunc import tree
from invfunc._functorch import level_of, storage_of, version
from invfunc._uncompiled import compiled_within, here
from invfunc.errors import ClosedOverError, ReplayError
from invfunc.invertible.recall import Other, Sight
from invfunc.invertible.report import Known
from invfunc.invertible.slots import Hooks

_RUNNING = {torch.nn.functional.batch_norm: (1, 2, 5), torch.batch_norm: (3, 4, 5)}
"""Which arguments are running statistics, and which says that they are written: their versions do not tell."""
_NOISY = {torch.nn.functional.rrelu, torch.rrelu}
"""What saves a tensor before it is filled, which its version does not tell either."""


class Watch(Sight):
    """Notes what the function reads and writes from outside, when it is evaluated for the first time.

    Args:
        given: the tensors that the function is given.
        closed: whether no gradient reaches what is not given, so that reading a tensor that needs one is an error.
        generators: grows by the random number generators that the function draws from.
        known: where compiled parts are told of.
        closure: what the function is known to close over.
    """

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        closed: bool,
        generators: list[torch.Generator],
        known: Known,
        closure: Closure | None = None,
    ) -> None:
        super().__init__(given)
        self._closure = closure or Closure()
        self._copies: dict[int, torch.Tensor] = {}
        self._given = given
        self._closed = closed
        self._generators = generators
        self._known = known
        self._versions = [version(tensor) for tensor in given]
        self._outside: dict[int, _Outside] = {}
        self._order: dict[int, list[_Outside]] = {}
        self.noisy = False
        """Whether what is saved now is not yet what it will be."""
        self.drawn: list[tuple[torch.Generator, torch.Tensor]] = []
        """Generators that were not known, with their states before the first draw."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self._known.calls and compiled_within(self._entered):
            self._known.compiled()
        generator = kwargs.get("generator")
        if isinstance(generator, torch.Generator) and not any(generator is known for known in self._generators):
            self.drawn.append((generator, generator.get_state()))
            self._generators.append(generator)
        self.noisy = func in _NOISY
        looks = getattr(func, "__name__", "") == "__get__"
        if looks and not isinstance(result := func(*args, **kwargs), torch.Tensor):
            return result
        if self._closure.tensors:
            instead = {id(t): s for t in tree.tensors((args, kwargs)) if (s := self._instead(t)) is not None}
            if instead:
                args, kwargs = tree.map_tensors(lambda t: instead.get(id(t), t), (args, kwargs))
        read = tree.tensors((args, kwargs))
        outer = [t for t in read if not self.knows(t)]
        written = [t for t in _running_statistics(func, args, kwargs) if not any(t is c for c in self._copies.values())]
        if written:
            self._note_written(written)
        if not outer:
            result = func(*args, **kwargs)
            self._enter(result)
            return result
        if self._closed:
            self._refuse(func, outer)
        before = [version(t) for t in outer]
        result = func(*args, **kwargs)
        for t, then in zip(outer, before, strict=True):
            known = self._note(t)
            if version(t) != then:
                known.written = True
            elif not any(t is w for w in written) and not looks:
                known.read = True
        self._enter(result, outer)
        return result

    def __enter__(self) -> Watch:
        self._entered = 0 if self._known.calls else here()
        return super().__enter__()

    def _instead(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What stands for a tensor that the function is known to close over."""
        lift = self._closure.place(tensor)
        if lift is None:
            return None
        known = self._note(tensor)
        known.lift = lift
        if lift not in self._closure.written:
            return self.lifts[lift]
        known.written = True
        if lift not in self._copies:  # it was written when it was found out what is closed over
            self._copies[lift] = self.know(self.lifts[lift].detach().clone())
        return self._copies[lift]

    def closure(self) -> Closure:
        """What gradients may be asked for that the function was not given, and what it writes; after `outside`."""
        roots = [o for o in self._outside.values() if o.tensor is o.root]
        read = [o.root for o in roots if o.read and (o.root.requires_grad or level_of(o.root) is not None)]
        written = [o.root for o in roots if o.written]
        return Closure((*read, *written), frozenset(range(len(read), len(read) + len(written))))

    def _note(self, tensor: torch.Tensor) -> _Outside:
        known = self._outside.setdefault(id(tensor), _Outside(tensor, tensor))
        order = self._order.setdefault(self.part, [])
        if known.root is tensor and not any(known is o for o in order):
            order.append(known)
        return known

    def _enter(self, result: Any, outer: Iterable[torch.Tensor] = ()) -> None:
        for t in (result,) if isinstance(result, torch.Tensor) else tree.tensors(result):
            source = next((o for o in outer if o is t or storage_of(o) == storage_of(t)), None)
            if source is None:
                self.know(t)
            elif id(t) not in self._outside:  # another name of it
                self._outside[id(t)] = _Outside(t, self._outside[id(source)].root)

    def _note_written(self, written: Iterable[torch.Tensor]) -> None:
        for t in written:
            if any(t is given for given in self._given):
                raise _writes("a further argument", t)
            self._note(t).written = True

    def _refuse(self, func: Callable, outer: Iterable[torch.Tensor]) -> None:
        name = getattr(func, "__name__", repr(func))
        for t in outer:
            if t.requires_grad or level_of(t) is not None:
                why = "needs a gradient" if t.requires_grad else "belongs to a transform of torch.func"
                raise ClosedOverError(
                    f"`{name}` reads a tensor of shape {list(t.shape)} that {why} and is no argument. Inside of "
                    "torch.func only arguments get gradients: pass it as one (of a module: functional(model)), or "
                    "detach it."
                )

    def wrote(self) -> bool:
        """Whether anything was written that outlives the function."""
        own = any(version(t) != then for t, then in zip(self._given, self._versions, strict=True))
        return own or any(o.written for o in self._outside.values())

    def outside(self, number: int, hooks: Hooks | None) -> dict[int, list[Other]]:
        """What each part used from outside, in order. What is read and written would not be the same the next time,
        nor would the arguments if they were written, of which the first `number` are x."""
        for i, (t, then) in enumerate(zip(self._given, self._versions, strict=True)):
            if version(t) != then:
                raise _writes("x" if i < number else "a further argument", t)
        written = {id(o.root) for o in self._outside.values() if o.written}
        for o in self._outside.values():
            if o.read and id(o.root) in written:
                raise ReplayError(
                    f"the function reads and writes a tensor of shape {list(o.root.shape)} that is none of its "
                    "arguments, so that it would do something else when it is evaluated again. Pass it as an "
                    "argument and return its new value; of a module in train mode, use eval mode."
                )
        used = [o for order in self._order.values() for o in order]
        others = {id(o): Other(o.tensor, id(o.root) in written, hooks, o.lift) for o in used}
        return {part: [others[id(o)] for o in order] for part, order in self._order.items()}


@dataclass(frozen=True)
class Closure:
    """What a function closes over that is made an argument."""

    tensors: tuple[torch.Tensor, ...] = ()
    written: frozenset[int] = frozenset()
    """Which of them it writes; an argument is copied first."""

    def arguments(self) -> list[torch.Tensor]:
        """What stands for them; a view, as whoever looks on sees how it is made."""
        return [t.detach().clone() if i in self.written else t.view_as(t) for i, t in enumerate(self.tensors)]

    def place(self, tensor: torch.Tensor) -> int | None:
        """Which of them a tensor is."""
        return next((i for i, known in enumerate(self.tensors) if known is tensor), None)


class _Outside:
    """A tensor from outside, and the one of which it is another name."""

    def __init__(self, tensor: torch.Tensor, root: torch.Tensor) -> None:
        self.tensor, self.root = tensor, root
        self.read = self.written = False
        self.lift: int | None = None


def _writes(which: str, tensor: torch.Tensor) -> ReplayError:
    return ReplayError(
        f"the function writes into {which} (a tensor of shape {list(tensor.shape)}) in place, so that it cannot be "
        "evaluated again. Write x = x + z in place of x += z."
    )


def _running_statistics(func: Callable, args: tuple, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    if func not in _RUNNING:
        return []
    names = {1: "running_mean", 2: "running_var", 3: "running_mean", 4: "running_var", 5: "training"}
    *places, training = [args[i] if i < len(args) else kwargs.get(names[i]) for i in _RUNNING[func]]
    return [t for t in places if isinstance(t, torch.Tensor)] if training else []
