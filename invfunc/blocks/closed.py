"""Tensors and modules that functions close over: where they stand, what they were, and others in their place.

By the contract of f these are its only inputs beside its arguments and torch's random numbers. They are found by
structure, once for a block, and narrowed to those whose memory the first call reads: a lambda over `self` reaches the
whole network.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import compress
from operator import is_
from typing import Any

import torch
from torch import nn

from invfunc import tree
from invfunc._torch.functorch import TorchDispatchMode, storage_of, untraced
from invfunc.pairs.places import Place, put, reached, read_all
from invfunc.pairs.places import read as there

_MOST = 64
"""The most keys of calls of one block; with more of them, as where a counter is given, all places are kept."""
_PLAIN = (torch.Tensor, nn.Parameter, nn.Buffer)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)


class Closed:
    """What functions close over.

    Args:
        functions: the functions.
    """

    def __init__(self, functions: Sequence[Any]) -> None:
        self.places: list[Place] = []
        """Where tensors stand that a call reads."""
        self.modules = [fn for fn in functions if isinstance(fn, nn.Module)]
        self.generators: list[torch.Generator] = []
        seen = set[tuple[int, Any]]()
        for _, place, inner in reached(functions):
            if type(inner) in _PLAIN and type(place[0]) is not tuple and (at := (id(place[0]), place[1])) not in seen:
                seen.add(at)
                self.places.append(place)
            elif isinstance(inner, nn.Module) and inner not in self.modules:
                self.modules.append(inner)
            elif isinstance(inner, torch.Generator):
                self.generators.append(inner)
        with_buffers = [m for m in self.modules if any(b is not None for b in m._buffers.values())]
        self.norms = [m for m in with_buffers if type(m) in _BATCH_NORMS and m.track_running_stats]
        """Modules whose buffers do not influence what they compute in train mode."""
        self.stateful = [m for m in with_buffers if m not in self.norms]
        """Modules whose buffers may do so."""
        self.scratch: dict[int, tuple[list, dict[str, torch.Tensor | None]]] = {}
        """Buffers for the norms to write to in another evaluation, with what they are like."""
        self.all = self.places
        """Where tensors stand that some call may read."""
        self._learned = set[Any]()
        """Keys of calls that are known to read nothing else."""
        self.quiet = set[Any]()
        """Keys of calls that drew nothing the last time."""
        self._inner = [(m._modules, [*m._modules.values()]) for m in self.modules if m._modules]

    def moved(self) -> bool:
        """Whether a tensor stands elsewhere by now, as where a weight was parametrized or a submodule replaced."""
        replaced = any([[*now.values()] != then for now, then in self._inner])
        return replaced or any([t is None for t in read_all(self.places)])

    def tensors(self) -> list[torch.Tensor]:
        """The tensors in their places."""
        return read_all(self.places)

    def standing(self) -> list[Place]:
        """Those of all places where a tensor still stands."""
        return [place for place in self.all if there(place) is not None]

    def learned(self, key: Any) -> bool:
        """Whether it is known what calls with a key read, or no longer looked at."""
        return key in self._learned or not self.all or len(self._learned) > _MOST

    def learn(self, read: set[int], key: Any) -> None:
        """Keep the places of those tensors whose memory was read by a call with a key, and by those before.

        Args:
            read: the memory.
            key: the training flags and the flags among the arguments, by which f chooses what it reads.
        """
        known = {(id(c), k) for c, k in self.places} if self._learned else set()
        self._learned.add(key)
        self.all = self.standing()
        keep = [(id(p[0]), p[1]) in known or storage_of(there(p)) in read for p in self.all]
        self.places = self.all if len(self._learned) > _MOST else [*compress(self.all, keep)]

    def written_by(self, module: nn.Module) -> dict[str, torch.Tensor | None]:
        """Buffers for a norm to write to."""
        now = [*module._buffers.values()]
        found = self.scratch.get(id(module))
        if found is None or not all(map(is_, found[0], now)):
            copies = {k: None if b is None else b.detach().clone() for k, b in module._buffers.items()}
            found = self.scratch[id(module)] = now, copies
        return found[1]


class Reading(TorchDispatchMode):
    """Notes which memory is read."""

    def __init__(self) -> None:
        super().__init__()
        self.read: set[int] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler at the first call, which takes seconds

    @untraced
    def __torch_dispatch__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        for t in tree.tensors((args, kwargs)):
            self.read.add(storage_of(t))
        return func(*args, **(kwargs or {}))


@contextmanager
def swapped(places: Sequence[Place], tensors: Sequence[Any]) -> Iterator[None]:
    """A context with other tensors in some places."""
    before = read_all(places)
    try:
        for place, t in zip(places, tensors, strict=True):
            put(place, t)
        yield
    finally:
        for place, t in zip(places, before, strict=True):
            put(place, t)
