"""The bytes that are alive while something runs, counted storage by storage: the same on every machine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch.utils._python_dispatch import TorchDispatchMode

from invfunc import tree


class Meter(TorchDispatchMode):
    """Counts the bytes of the storages that are made while it is active, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, tuple[int, weakref.ref]] = {}
        """The storages that are alive, by their address: their numbers."""
        self._sizes: list[int] = []
        self._steps: list[tuple[int, int]] = []
        """Storages in the order in which they came, with their bytes, or went, with them negated."""

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._see((args, kwargs), new=False)
        result = func(*args, **kwargs)
        self._see(result, new=True)
        return result

    def _see(self, found: Any, new: bool) -> None:
        for t in tree.tensors(found):
            storage = t.untyped_storage()
            key, number = storage._cdata, len(self._sizes)
            if key not in self._known:
                gone = weakref.ref(storage, lambda _, key=key: self._gone(key))
                self._known[key] = number, gone
                self._sizes.append(storage.nbytes() if new else 0)
                self._steps.append((number, self._sizes[number]))

    def _gone(self, key: int) -> None:
        number, _ = self._known.pop(key)
        self._steps.append((number, -self._sizes[number]))

    def live(self) -> int:
        return sum(size for _, size in self._steps)

    def peak(self, without: Any = ()) -> int:
        """The most that was alive at once, not counting the storages of a result."""
        known = (self._known.get(t.untyped_storage()._cdata) for t in tree.tensors(without))
        own = {entry[0] for entry in known if entry is not None}
        most = now = 0
        for number, size in self._steps:
            now += 0 if number in own else size
            most = max(most, now)
        return most


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Without the garbage collector: what is freed is freed at once."""
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
