"""What a step of a training reads from outside, so that another evaluation can be seen to read the same."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any
from weakref import ref

import torch
from torch.overrides import TorchFunctionMode

from invfunc._torch.functorch import version

Seen = dict[int, tuple["ref[torch.Tensor]", int]]
"""Tensors by their number, with their versions."""


class Outside(TorchFunctionMode):
    """Looks at the tensors that calls of torch read: those that are still there when a step is done, and that it was
    not given and does not give, are from outside."""

    def __init__(self) -> None:
        super().__init__()
        self._read: dict[int, ref[torch.Tensor]] = {}

    def __torch_function__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        self._note(args)
        if not kwargs:
            return func(*args)
        self._note(kwargs.values())
        return func(*args, **kwargs)

    def _note(self, values: Iterable[Any]) -> None:
        for x in values:
            if isinstance(x, torch.Tensor):
                self._read[id(x)] = ref(x)
            elif isinstance(x, (list, tuple)):
                self._note(x)

    def seen(self, inside: Iterable[torch.Tensor]) -> Seen:
        """What was read from outside, as it is now; not from there are those that the step was given, or gives."""
        own = {id(t) for t in inside}
        alive = ((k, held, t) for k, held in self._read.items() if k not in own and (t := held()) is not None)
        return {k: (held, version(t)) for k, held, t in alive}


def all_among(found: Seen, before: Seen) -> bool:
    """Whether what was read was read before, as it is."""
    return all(k in before and before[k][0]() is held() and before[k][1] == then for k, (held, then) in found.items())
