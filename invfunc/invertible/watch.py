"""What a function reads and writes that is none of its arguments."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from invfunc import tree
from invfunc._functorch import level_of, version
from invfunc.errors import ClosedOverError, ReplayError


class Watch(TorchFunctionMode):
    """Sees every call of torch while a function runs, and which tensors come from outside.

    Args:
        given: the tensors that the function is given.
        closed: whether no gradient reaches what is not given, so that reading a tensor that needs one is an error.
    """

    def __init__(self, given: Iterable[torch.Tensor], closed: bool) -> None:
        super().__init__()
        self._closed = closed
        self._inside = {id(tensor): weakref.ref(tensor) for tensor in given}
        self._outside: dict[int, tuple[torch.Tensor, int]] = {}
        self._read: set[int] = set()
        self.written: list[torch.Tensor] = []
        """Tensors from outside that were written."""

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        outer = [t for t in tree.tensors((args, kwargs)) if not self._is_inside(t)]
        if not outer:
            result = func(*args, **kwargs)
            self._enter(result, ())
            return result
        looks = getattr(func, "__name__", "") == "__get__"
        if self._closed and not looks:
            self._refuse(func, outer)
        before = [version(t) for t in outer]
        result = func(*args, **kwargs)
        if looks and not isinstance(result, torch.Tensor):
            return result
        if self._closed and looks:
            self._refuse(func, outer)
        for t, then in zip(outer, before, strict=True):
            self._outside.setdefault(id(t), (t, then))
            if version(t) == then:
                self._read.add(id(t))
            elif not any(t is known for known in self.written):
                self.written.append(t)
        self._enter(result, outer)
        return result

    def read(self) -> list[tuple[weakref.ref[torch.Tensor], int]]:
        """Tensors from outside that were read, with their versions; what is only written may go on changing."""
        return [(weakref.ref(t), then) for key, (t, then) in self._outside.items() if key in self._read]

    def _is_inside(self, tensor: torch.Tensor) -> bool:
        known = self._inside.get(id(tensor))
        return known is not None and known() is tensor

    def _enter(self, result: Any, outer: Iterable[torch.Tensor]) -> None:
        for t in (result,) if isinstance(result, torch.Tensor) else tree.tensors(result):
            if not any(t is known for known in outer):
                self._inside[id(t)] = weakref.ref(t)

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

    def check(self) -> None:
        """Writing state is all right if it is only written, as running statistics are: what is read would change."""
        for t in self.written:
            if id(t) in self._read:
                raise ReplayError(
                    f"the function reads and writes a tensor of shape {list(t.shape)} that is none of its arguments, "
                    "so that it would do something else when it is evaluated again. Pass it as an argument and "
                    "return its new value."
                )


class Shield(TorchFunctionMode):
    """Calls that write tensors from outside write copies of them: state is updated by the first evaluation alone."""

    def __init__(self, written: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._copies = [(t, t.detach().clone()) for t in written]

    def __torch_function__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def shielded(leaf: torch.Tensor) -> torch.Tensor:
            return next((copy for t, copy in self._copies if t is leaf), leaf)

        args, kwargs = tree.map_tensors(shielded, (args, kwargs or {}))
        return func(*args, **kwargs)
