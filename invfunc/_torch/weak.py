"""Notes on tensors, by their identity or their memory, for as long as they are alive.

`torch.utils.weak` has such a dictionary, too; a look-up takes it ten times as long, and each call of f makes several.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Generic, TypeVar
from weakref import ref

import torch

from invfunc._torch.functorch import memory_of, unwatched

V = TypeVar("V")


class WeakIdMap(Generic[V]):
    """Values of tensors; None is that of every tensor of which nothing is known."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[ref[torch.Tensor], V]] = {}
        self._room = _FEW

    def get(self, x: Any) -> V | None:
        found = self._of.get(id(x))
        return found[1] if found is not None and found[0]() is x else None  # the id of one that is gone is given anew

    def set(self, x: Any, value: V | None) -> None:
        if value is None:
            self._of.pop(id(x), None)
            return
        self._of[id(x)] = ref(x), value
        if len(self._of) > self._room:
            self._make_room()

    def __contains__(self, x: torch.Tensor) -> bool:
        found = self._of.get(id(x))
        return found is not None and found[0]() is x

    def __iter__(self) -> Iterator[torch.Tensor]:
        return (x for known, _ in self._of.copy().values() if (x := known()) is not None)

    def items(self) -> Iterator[tuple[torch.Tensor, V]]:
        return ((x, value) for known, value in self._of.copy().values() if (x := known()) is not None)

    def _make_room(self) -> None:
        """Forget what is gone; copied first, as other threads and the collection of garbage may write meanwhile."""
        self._of = {key: known for key, known in self._of.copy().items() if known[0]() is not None}
        self._room = max(2 * len(self._of), _FEW)


def memory_ref(x: torch.Tensor) -> ref[Any]:
    """A weak reference of the memory of a tensor, which is there as long as anybody has a view of it."""
    with unwatched():
        return ref(memory_of(x))


_FEW = 200
"""Number of tensors that are known before the first look at which of them are gone."""
