"""A function that is evaluated again uses the tensors from outside that it used the first time."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import leaf, level_of, plainly, under, unwatched, unwrapped, version
from invfunc.errors import ReplayError
from invfunc.operations.heard import Function
from invfunc.recomputation.left import Left
from invfunc.recomputation.like import Memory
from invfunc.recomputation.origins import Origins
from invfunc.recomputation.outside import SHARDED, Outside, State, bare, freed, rewrapped
from invfunc.recomputation.sight import Sight
from invfunc.recomputation.slots import Held, Hooks


class Other:
    """A tensor from outside that a function used, with what it held if it was written, or the number of the argument
    that it was made, if it was."""

    def __init__(self, used: Outside, state: State | None, hooks: Hooks | None) -> None:
        tensor = used.tensor
        self.tensor = weakref.ref(tensor)
        self.number = id(used)
        """A number that all states of a tensor share."""
        self.lift, self.written, self.wrapped = used.lift, used.written, used.wrapped
        self.state = used.written and used.read
        """Whether what it holds matters, and changes."""
        held = tensor if used.lift is None and not used.written else None if state is None else state.value
        self._needs = tensor.requires_grad if state is None else state.needs
        self._held = None if held is None else Held(held, hooks=hooks)
        self._like = tensor.shape, tensor.dtype, tensor.device
        self.version = version(tensor)
        with unwatched():
            care = hooks is not None and held is tensor and level_of(tensor) is None
            self._memory = Memory(tensor) if care else None

    def is_(self, tensor: torch.Tensor) -> bool:
        """Whether it is this very tensor."""
        return self.tensor() is tensor

    def only_read(self) -> torch.Tensor | None:
        """The tensor, if it was used as it is and not written."""
        return None if self.written or self.wrapped or self.lift is not None else self.tensor()

    def like(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may have taken its place."""
        return self._like == (tensor.shape, tensor.dtype, tensor.device)

    def again(self, instead: torch.Tensor) -> torch.Tensor:
        """The tensor as it was; a copy if it is written, of another one if what it held was not kept."""
        with plainly() if level_of(instead) is None else nullcontext():  # not of a transform that f uses itself
            if self._held is None:
                return instead.detach().clone()
            tensor = (instead if self._has_not_changed(instead) else self._held.get()).detach()
            if freed(tensor):
                raise ReplayError(
                    f"the memory of a tensor of shape {list(tensor.shape)} that the function reads from outside was "
                    f"freed after it was evaluated. {SHARDED}"
                )
            tensor = leaf(tensor) if self._needs else tensor
            return tensor.clone() if self.written else tensor

    def _has_not_changed(self, tensor: torch.Tensor) -> bool:
        """Whether what hooks hold, which may not give it back yet, is there as it was."""
        if self._memory is None or not self.is_(tensor) or version(tensor) != self.version:
            return False
        with unwatched():
            return self._memory.holds(tensor)


Use = tuple[Other, Callable]
"""A state that is read or written, and the operation that does it."""
Exchanged = Mapping[int, tuple[torch.Tensor, Other]]
"""Tensors, by their ids, that have taken the place of others."""


class Recall(Sight):
    """Puts the tensors from outside in place that were used the first time, by the order in which each part uses them.

    They may be others by now: `torch.func.functional_call` puts parameters into a module for the time of a call.

    Args:
        given: the tensors that the function is given.
        others: what each part used. The inverse beside shared functions is given what it asks for, as it was.
        followed: whether a statistic looked on the first time, which writes some operations out.
        uses: in which order states were read and written beside shared functions; the inverse, which may evaluate the
            same module several times, starts from the same states each time.
        exchanged: what the inverse finds in the place of what the function used.
        left: what the call has left behind.
    """

    def __init__(
        self,
        given: Sequence[torch.Tensor],
        others: Mapping[int, Sequence[Other]],
        followed: bool,
        uses: Sequence[Use],
        exchanged: Exchanged,
        origins: Origins | None,
        left: Left,
    ) -> None:
        self._left = left
        self.active = followed or bool(others)
        """Whether it puts anything in place."""
        super().__init__(given if self.active else (), origins)
        self._on = self.active or origins is not None
        self._followed = followed
        self._others = others
        self._found: dict[int, dict[int, tuple[torch.Tensor, torch.Tensor]]] = {part: {} for part in others}
        self._all = [other for order in others.values() for other in order]
        self._wrapped = [other for other in self._all if other.wrapped]
        self._lifted = [other for other in self._all if other.lift is not None]
        self._met: set[tuple[int, int | None]] = set()
        self._calls: Callable  # the operation that is called
        self._uses = uses
        self._at = 0
        """At which of them the inverse is."""
        self._states: dict[int, torch.Tensor] = {}
        self._names: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """Copies, and the tensors that they are of."""
        self._exchanged = exchanged
        self.exchanged: dict[int, tuple[torch.Tensor, Other]] = {}
        """Where other tensors were there than the first time."""
        self.unfamiliar: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        """What the inverse read that is none of what the function used, but may have taken its place; with copies."""

    def heard(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        if not self.active:
            return self.called(function, args, kwargs)
        func = function.func
        looks = function.called == "__get__"
        read = tree.tensors((args, kwargs))
        outer = [t for t in read if (self._lifted and self._is_lifted(t)) or not self.knows(t)]
        if looks and all(unwrapped(t) is None for t in outer):
            if not isinstance(result := func(*args, **kwargs), torch.Tensor):
                return result
        if outer:
            self._calls = func
            instead = {i: self._instead(t) for i, t in {id(t): t for t in outer}.items()}
            if self.origins is not None:
                for t in outer:
                    self.origins.alias(instead[id(t)], t)
            args, kwargs = tree.map_tensors(lambda t: instead.get(id(t), t), (args, kwargs))
        result = self._run(function, args, kwargs)
        copy, name = self._names.get(id(result), (None, None))
        if copy is not None and copy is result:
            return name  # which a module may take for its new state
        self.know_all(result, outer, not outer and self.new(read))
        return result

    def _run(self, function: Function, args: tuple, kwargs: dict[str, Any]) -> Any:
        body = function.composed() if self._followed else None
        if body is not None:
            return self.called(function, args, kwargs, partial(self._composed, body))
        once = function.forms.once if self._followed else None
        return self.called(function, args, kwargs, once and partial(once, function.func))

    def _composed(self, body: Callable, *args: Any, **kwargs: Any) -> Any:
        origins, self.origins = self.origins, None  # what an operation is written out in is not followed
        try:
            with self:
                return body(*args, **kwargs)
        finally:
            self.origins = origins

    def aside(self) -> AbstractContextManager:
        return nullcontext() if self.active else super().aside()  # what is given to shared functions is put in place

    def __enter__(self) -> Recall:
        return super().__enter__() if self._on else self

    def __exit__(self, *error: Any) -> None:
        if self._on:
            super().__exit__(*error)

    def came(self, part: int, result: Any) -> None:
        super().came(part, result)
        self.know_all(result)

    def know_all(self, result: Any, outer: Sequence[torch.Tensor] = (), new: bool = False) -> None:
        """Note that what a call gave, which read these from outside, is of the function."""
        if self.active:
            for t in (result,) if isinstance(result, torch.Tensor) else tree.tensors(result):
                self.make(t, outer, new)

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
        instead = tensor
        if other.lift is not None:
            self._met.add((self.part, other.lift))
            instead = self.lifts[other.lift]
            if not other.written:
                return instead
        again = self.know(other.again(instead))
        if other.written:
            self._names[id(again)] = again, tensor
        return again

    def _of_inverse(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor as it was. A state goes through what it went through in f, which may be evaluated repeatedly."""
        _, other = self._exchanged.get(id(tensor), (None, None))
        other = other or next((other for other in self._all if other.is_(tensor)), None)
        if other is None:
            return self._of_unfamiliar(tensor) if any(other.like(tensor) for other in self._all) else tensor
        if not other.state:
            return self._again(other, tensor)
        number = other.number
        other, func = self._uses[self._at] if self._uses else (other, None)
        if func != self._calls or other.number != number:
            raise ReplayError(
                f"the inverse, by `{_name(self._calls)}`, uses a tensor of shape {list(tensor.shape)} that f reads and "
                "writes, in another order than f. Pass it as an argument and return its new value; of a module in "
                "train mode, use eval mode."
            )
        self._states = self._states if self._at else {}
        self._at = (self._at + 1) % len(self._uses)
        if id(tensor) not in self._states:
            self._states[id(tensor)] = self._again(other, tensor)
        return self._states[id(tensor)]

    def _of_unfamiliar(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy, as the tensor may not be written in the place of another."""
        self._left.refuse(tensor)
        if id(tensor) not in self.unfamiliar:
            copy = self.know(tensor.detach().clone())
            self.unfamiliar[id(tensor)] = tensor, copy
            self._names[id(copy)] = copy, tensor
        return self.unfamiliar[id(tensor)][1]

    def _within_its_own(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """What takes the place of a tensor that a transform of the function's own was given; None for others."""
        source = bare(tensor)
        if source is tensor or self._is_lifted(tensor) or not any(o.like(source) for o in self._wrapped):
            return None
        again = self._instead(source)
        if any(other.is_(source) for other in self._wrapped):
            return tensor  # which holds what it held, as it was not written since
        wrapped = None if self._calls is torch.Tensor.requires_grad_ else rewrapped(again, tensor)
        if wrapped is None:
            raise ReplayError(
                f"evaluated again, the function differentiates in another tensor of shape {list(tensor.shape)} from "
                "outside than the first time. Pass it as an argument."
            )
        return self.know(wrapped)

    def _instead(self, tensor: torch.Tensor) -> torch.Tensor:
        if self._wrapped and (own := self._within_its_own(tensor)) is not None:
            return own
        found = self._found.get(self.part)
        if found is None:
            return self._of_inverse(tensor)
        if id(tensor) not in found:
            order = self._others[self.part]
            if len(found) == len(order) or not order[len(found)].like(tensor):
                self._left.refuse(tensor)
                raise ReplayError(
                    f"evaluated again, `{_name(self._calls)}` reads a tensor of shape {list(tensor.shape)} from "
                    "outside that the function did not read at this place the first time. Was a module put into eval "
                    "or train mode in between? Do that after the backward pass. Is anything computed once and kept? "
                    f"Do that before, by a call under torch.no_grad(). {SHARDED}"
                )
            other = order[len(found)]
            if not other.is_(tensor):
                self._left.refuse_to_replace(tensor)
                self.exchanged[id(tensor)] = tensor, other
            found[id(tensor)] = tensor, self._again(other, tensor)
        return found[id(tensor)][1]


def _name(func: Callable) -> str:
    return getattr(func, "__name__", repr(func))


def meant(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor that stands for another one where a block around us is evaluated again."""
    return tensor.view_as(tensor) if under(Recall, lambda recall: recall.active) else tensor
