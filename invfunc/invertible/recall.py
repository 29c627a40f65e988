"""A function that is evaluated again uses the tensors from outside that it used the first time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from invfunc import tree
from invfunc._functorch import unwrapped
from invfunc.errors import ReplayError
from invfunc.invertible.slots import Held, Hooks
from invfunc.jacobian.trace.compositions import composition

INVERSE = -2
OUTSIDE = -1
"""The part of a function that is in none of its shared functions; these are counted from 0."""


class Parts:
    """Knows which part of a function is being evaluated."""

    part = OUTSIDE

    @contextmanager
    def within(self, part: int) -> Iterator[None]:
        """Meanwhile a part is evaluated."""
        outer, self.part = self.part, part
        try:
            yield
        finally:
            self.part = outer


class Sight(Parts, TorchFunctionMode):
    """Sees every call of torch while a function runs, and which tensors it made or was given."""

    lifts: Sequence[torch.Tensor] = ()
    """The arguments that stand, at the moment, for tensors that the function closes over."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._inside: dict[int, weakref.ref[torch.Tensor]] = {}
        for t in given:
            self.know(t)

    def know(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor is of the function, and so is what it wraps."""
        inner: torch.Tensor | None = tensor
        while inner is not None:
            self._inside[id(inner)] = weakref.ref(inner)
            inner = unwrapped(inner)
        return tensor

    def knows(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor, or what it wraps, is of the function."""
        inner: torch.Tensor | None = tensor
        while inner is not None:
            known = self._inside.get(id(inner))
            if known is not None and known() is inner:
                return True
            inner = unwrapped(inner)
        return False

    @contextmanager
    def lifting(self, lifts: Sequence[torch.Tensor]) -> Iterator[None]:
        """Meanwhile these arguments stand for what is closed over."""
        outer, self.lifts = self.lifts, lifts
        for t in lifts:
            self.know(t)
        try:
            yield
        finally:
            self.lifts = outer

    def lifted(self, fn: Callable, lifts: Sequence[torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        """A function of what it closes over, too."""
        with self.lifting(lifts):
            return fn(*args, **kwargs)


class Other:
    """A tensor from outside that a function used, and the number of the argument that it was made, if it was."""

    def __init__(self, tensor: torch.Tensor, written: bool, hooks: Hooks | None, lift: int | None = None) -> None:
        self._tensor = weakref.ref(tensor)
        self._needs = tensor.requires_grad
        self.lift, self.written = lift, written
        self._held = None if written or lift is not None else Held(tensor, hooks=hooks)
        self._like = tensor.shape, tensor.dtype, tensor.device

    def is_(self, tensor: torch.Tensor) -> bool:
        """Whether it is this very tensor."""
        return self._tensor() is tensor

    def like(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may have taken its place."""
        return self._like == (tensor.shape, tensor.dtype, tensor.device)

    def again(self, instead: torch.Tensor) -> torch.Tensor:
        """The tensor as it was; if it is only written, a copy of the one there is now, whose values do not matter."""
        if self._held is None:
            return instead.detach().clone()
        tensor = self._held.get().detach()
        return tensor.requires_grad_() if self._needs else tensor


class Recall(Sight):
    """Puts the tensors from outside in place that were used the first time, by the order in which each part uses them.

    They may be others by now: `torch.func.functional_call` puts parameters into a module for the time of a call.

    Args:
        given: the tensors that the function is given.
        others: what each part used. The inverse beside shared functions is given what it asks for, as it was.
        followed: whether a statistic looked on the first time, which writes some operations out.
    """

    def __init__(self, given: Iterable[torch.Tensor], others: Mapping[int, Sequence[Other]], followed: bool) -> None:
        super().__init__(given)
        self._followed = followed
        self._active = followed or bool(others)
        self._others = others
        self._found: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {part: {} for part in others}
        self._all = [other for order in others.values() for other in order]
        self._lifted = [other for other in self._all if other.lift is not None]
        self._met: set[tuple[int, int | None]] = set()
        self._calls = ""
        """The operation that is called."""
        self.exchanged = False
        """Whether beside the shared functions other tensors were there than the first time."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        looks = getattr(func, "__name__", "") == "__get__"
        read = tree.tensors((args, kwargs))
        outer = [
            t for t in read if (self._lifted and self._is_lifted(t)) or (unwrapped(t) is None and not self.knows(t))
        ]
        if outer and not (looks and not isinstance(func(*args, **kwargs), torch.Tensor)):
            self._calls = getattr(func, "__name__", repr(func))
            instead = {id(t): self._instead(t) for t in outer}
            args, kwargs = tree.map_tensors(lambda t: instead.get(id(t), t), (args, kwargs))
        body = composition(func) if self._followed else None
        if body is not None:
            with self:
                return body(*args, **kwargs)
        result = func(*args, **kwargs)
        self.know_all(result)
        return result

    def __enter__(self) -> Recall:
        return super().__enter__() if self._active else self

    def __exit__(self, *error: Any) -> None:
        if self._active:
            super().__exit__(*error)

    def know_all(self, result: Any) -> None:
        """What a call gave is of the function."""
        if self._active:
            for t in (result,) if isinstance(result, torch.Tensor) else tree.tensors(result):
                self.know(t)

    def check(self, part: int) -> None:
        """What was made an argument was read again; what was read in its place would get no gradient."""
        wanted = [o for o in self._others.get(part, ()) if o.lift is not None and (part, o.lift) not in self._met]
        if wanted:
            raise ReplayError(
                f"evaluated again, the function does not read {len(wanted)} of the tensors that it closes over, but "
                "others of another transform of torch.func. Pass them as arguments."
            )

    def _is_lifted(self, tensor: torch.Tensor) -> bool:
        return any(other.is_(tensor) for other in self._lifted)

    def _again(self, other: Other, tensor: torch.Tensor) -> torch.Tensor:
        if other.lift is None:
            return self.know(other.again(tensor))
        self._met.add((self.part, other.lift))
        lift = self.lifts[other.lift]
        return self.know(lift.detach().clone()) if other.written else lift

    def _instead(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self._found.get(self.part)
        if found is None:
            known = next((other for other in self._all if other.is_(tensor)), None)
            return tensor if known is None else self._again(known, tensor)
        if id(tensor) not in found:
            order = self._others[self.part]
            if len(found) == len(order) or not order[len(found)].like(tensor):
                raise ReplayError(
                    f"evaluated again, `{self._calls}` reads a tensor of shape {list(tensor.shape)} from outside that "
                    "the function did not read at this place the first time. Was a module put into eval or train mode "
                    "between forward and backward? Do that after the backward pass. Are parameters gathered anew for "
                    "each call, as by fully_shard of a part of the block? Shard the whole block."
                )
            other = order[len(found)]
            self.exchanged |= self.part == OUTSIDE and not other.is_(tensor)
            found[id(tensor)] = tensor, self._again(other, tensor)
        return found[id(tensor)][1]
