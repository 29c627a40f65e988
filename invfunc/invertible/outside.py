"""What a step of a training reads from outside, so that another evaluation can be seen to read the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch.overrides import TorchFunctionMode

from invfunc._functorch import version

Seen = dict[int, tuple["ref[torch.Tensor]", int]]
"""Tensors by their number, with their versions."""


class Outside(TorchFunctionMode):
    """Looks at the tensors that calls of torch read, and that no call in it has made."""

    def __init__(self, given: Iterable[torch.Tensor]) -> None:
        super().__init__()
        self._made: dict[int, ref[torch.Tensor]] = {id(t): ref(t) for t in given}
        self._read: Seen = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        for t in _tensors((*args, *kwargs.values())):
            if not _among(self._made, t) and id(t) not in self._read:
                self._read[id(t)] = ref(t), version(t)
        result = func(*args, **kwargs)
        for t in _tensors((result,)):
            if id(t) not in self._read or self._read[id(t)][0]() is not t:
                self._made[id(t)] = ref(t)
        return result

    def kept(self) -> tuple[Seen, Seen]:
        """What was read from outside and is still there, and what was made and is."""
        read = {k: (held, then) for k, (held, then) in self._read.items() if held() is not None}
        made = {k: (held, version(t)) for k, held in self._made.items() if (t := held()) is not None}
        return read, made

    def others(self, before: Seen) -> bool:
        """Whether something was read that is none of these, as it was."""
        for k, (held, _) in self._read.items():
            t, (known, then) = held(), before.get(k, (None, 0))
            if t is not None and (known is None or known() is not t or version(t) != then):
                return True
        return False


def _among(known: dict[int, ref[torch.Tensor]], t: torch.Tensor) -> bool:
    held = known.get(id(t))
    return held is not None and held() is t


def _tensors(values: Iterable[Any]) -> Iterable[torch.Tensor]:
    for x in values:
        if isinstance(x, torch.Tensor):
            yield x
        elif isinstance(x, (list, tuple)):
            yield from _tensors(x)
