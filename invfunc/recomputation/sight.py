"""A look at every call of torch that a function makes while it is evaluated."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn

from invfunc import tree
from invfunc._torch.functorch import base_of, unwatched, unwrapped
from invfunc._torch.scripted import Watcher
from invfunc._torch.weak import WeakMemories
from invfunc.operations.heard import Function, Listener
from invfunc.recomputation.origins import OUTSIDE, Origins

_AS_IT_IS = nullcontext()


class Sight(Watcher, Listener):
    """Sees every call of torch while a function runs, and which tensors it made or was given.

    Args:
        given: the tensors that it is given.
        origins: are told of the calls, where what autograd saves is compared.
    """

    part = OUTSIDE
    """Which part of the function is being evaluated."""
    lifts: Sequence[torch.Tensor] = ()
    """The arguments that stand, at the moment, for tensors that the function closes over."""

    def __init__(self, given: Sequence[torch.Tensor], origins: Origins | None = None) -> None:
        super().__init__()
        self.origins = origins
        self._given = given
        self._inside: dict[int, weakref.ref[torch.Tensor]] = {}
        self._made = WeakMemories()
        """The memory of what it has made within a transform of torch.func, or out of nothing that it was given: in the
        latter are the parameters of a module that it makes, whose making no call tells."""
        self._foreign: WeakMemories | None = None
        """The memory of what it was given, or has met from outside."""
        for t in given:
            self.know(t)

    def aside(self) -> AbstractContextManager:
        """A context for what is none of the function's doing, which ends where a shared one is `evaluated`."""
        return unwatched()

    @contextmanager
    def within(self, part: int) -> Iterator[None]:
        """A context in which a part is evaluated."""
        outer, self.part, origins = self.part, part, self.origins
        scope = None if origins is None else origins.enter(part)
        try:
            yield
        finally:
            self.part = outer
            if origins is not None:
                origins.leave(scope)

    def came(self, part: int, result: Any) -> None:
        """Note that the part gave a result."""
        if self.origins is not None:
            self.origins.know(("result", part), tree.tensors(result))

    def called(self, function: Function, args: tuple, kwargs: dict[str, Any], run: Callable | None = None) -> Any:
        """The result of a call, perhaps run in another way, of which the origins are told."""
        origins, run = self.origins, run or function.func
        if origins is None or not origins.call(function, args, kwargs):
            return run(*args, **kwargs)
        result = run(*args, **kwargs)
        origins.made(result)
        return result

    def know(self, tensor: torch.Tensor) -> torch.Tensor:
        """Note that a tensor is of the function, and with it what it wraps."""
        inner: torch.Tensor | None = tensor
        while inner is not None:
            self._inside[id(inner)] = weakref.ref(inner)
            inner = unwrapped(inner)
        return tensor

    def new(self, read: Sequence[torch.Tensor]) -> bool:
        """Whether a call that reads these, all of the function, makes something out of nothing that it was given."""
        return not read or (read[0] in self._made and all(t in self._made for t in read))

    def make(self, tensor: torch.Tensor, outer: Iterable[torch.Tensor] = (), new: bool = False) -> None:
        """Note that the function has made a tensor, in a call that reads these from outside. Within a vmap its memory
        is noted too, as another view of that comes out of the vmap, which no call tells of (out_dims=1)."""
        self._inside[id(tensor)] = weakref.ref(tensor)
        if new:
            self._made.update((tensor,))
        if (inner := unwrapped(tensor)) is None:
            return
        self.know(inner)
        if self._foreign is None:
            self._foreign = WeakMemories(self._given)
        self._foreign.update(outer)
        if tensor not in self._foreign:
            self._made.update((tensor,))

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or what it wraps, is of the function."""
        known = self._inside.get(id(tensor))
        if known is not None and known() is tensor:
            return True
        inner = tensor
        while (inner := unwrapped(inner)) is not None:
            known = self._inside.get(id(inner))
            if known is not None and known() is inner:
                return True
        if tensor in self._made or self._comes_out_of_vmap(tensor):
            self.know(tensor)
            return True
        return False

    def _comes_out_of_vmap(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor repeats one that the function has made, as a vmap gives it out for all its entries."""
        base = base_of(tensor)
        if base is None or 0 not in tensor.stride():
            return False
        known = self._inside.get(id(base))
        return known is not None and known() is base and all(base is not t for t in self._given)

    def made(self, outputs: Iterable[torch.Tensor] = ()) -> list[torch.Tensor]:
        """What the function has made that somebody still has, but these outputs, and parameters, which are no state."""
        known = set(map(id, given := (*self._given, *outputs)))
        made = [t for found in self._inside.values() if (t := found()) is not None and id(t) not in known]
        for t in given if made else ():
            while (t := unwrapped(t)) is not None:
                known.add(id(t))
        return [t for t in made if id(t) not in known and not isinstance(t, nn.Parameter)]

    def lifting(self, lifts: Sequence[torch.Tensor]) -> AbstractContextManager:
        """A context in which these arguments, if there are any, stand for what is closed over."""
        return self._lifting(lifts) if lifts else _AS_IT_IS

    @contextmanager
    def _lifting(self, lifts: Sequence[torch.Tensor]) -> Iterator[None]:
        outer, self.lifts = self.lifts, lifts
        for t in lifts:
            self.know(t)
        try:
            yield
        finally:
            self.lifts = outer

    def lifted(self, fn: Callable, lifts: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """The function as one of what it closes over, too."""
        with self.lifting(lifts):
            return fn(*args, **kwargs)
