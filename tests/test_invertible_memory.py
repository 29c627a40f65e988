"""What is alive while a checkpointed network runs: counted in bytes of storages, so the same on every machine."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import pytest
import torch
from torch.func import grad, jacrev, vjp, vmap
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from invfunc import additive_coupling, chain, invertible_checkpoint, tree
from invfunc.testing import assert_trees_close
from tests.invertible_cases import FORMS, RTOL, Sizes, Twins, branch, branch_params, stacked, twins
from tests.networks import total
from tests.strategies import Numbers

SHALLOW, DEEP = 6, 24
STACKED = ["additive", "affine", "functions of a dict", "functions of a tensor", "leapfrog", "nested"]
WHOLE = ["repeated", "repeated, stacked"]


class Meter(TorchDispatchMode):
    """Counts the storages that are made while it is active, until they are freed."""

    def __init__(self) -> None:
        super().__init__()
        self._known: dict[int, weakref.ref] = {}
        self._steps: list[tuple[int, int]] = []
        """Which storage came, with its bytes, or went, with them negated."""

    def __torch_dispatch__(self, func: Callable, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self._see((args, kwargs), new=False)
        result = func(*args, **kwargs)
        self._see(result, new=True)
        return result

    def _see(self, found: Any, new: bool) -> None:
        for t in tree.tensors(found):
            storage = t.untyped_storage()
            key, number = storage._cdata, len(self._steps)
            if key in self._known:
                continue
            size = storage.nbytes() if new else 0
            self._known[key] = weakref.ref(storage, lambda _, key=key, number=number: self._gone(key, number))
            self._steps.append((number, size))

    def _gone(self, key: int, number: int) -> None:
        del self._known[key]
        self._steps.append((number, -self._steps[number][1]))

    def live(self) -> int:
        return sum(size for _, size in self._steps)

    def peak(self, without: Any = ()) -> int:
        """The most that was alive at once, not counting the storages of a result."""
        keys = {t.untyped_storage()._cdata for t in tree.tensors(without)}
        own = {number for number, _ in enumerate(self._steps) if self._of(number) in keys}
        most = now = 0
        for number, size in self._steps:
            now += 0 if number in own else size
            most = max(most, now)
        return most

    def _of(self, number: int) -> int | None:
        return self._numbers().get(number)

    def _numbers(self) -> dict[int, int]:
        return self._places


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Without the garbage collector: what is freed is freed at once."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
