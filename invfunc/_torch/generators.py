"""States of random number generators, read and set by one thread at a time.

Torch holds a lock of the generator meanwhile. Python may collect garbage there and change to another thread, which
would wait for that lock and keep Python from ever coming back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from ctypes import string_at
from functools import cache
from typing import Protocol

import torch

from invfunc._torch.functorch import dispatched, listening, unwatched


class Generator(Protocol):
    """An object with a state, as `torch.Generator` has."""

    def get_state(self) -> torch.Tensor: ...

    def set_state(self, state: torch.Tensor, /) -> object: ...


_LOCK = threading.RLock()


_LAST: dict[int, tuple[bytes, torch.Tensor]] = {}
"""The last known states by the ids of generators; one that is gone may have given its id to another."""
_MOST = 64
"""So many are remembered."""


def state_of(generator: Generator) -> torch.Tensor:
    """The state of a generator: the same tensor as the last time, if nothing was drawn since."""
    with _LOCK:
        state = generator.get_state()
    if dispatched():
        return state
    value, known = _bytes(state), _LAST.get(id(generator))
    if known is not None and known[0] == value:
        return known[1]
    if len(_LAST) >= _MOST:
        _LAST.clear()
    _LAST[id(generator)] = value, state
    return state


def _bytes(state: torch.Tensor) -> bytes:
    """The numbers of a state; no mode around us sees that, and no transform of torch.func has a part in it."""
    if not listening():
        return string_at(state.data_ptr(), state.nbytes)
    with unwatched():
        return string_at(state.data_ptr(), state.nbytes)


def states_of(generators: Iterable[torch.Generator]) -> list[tuple[Generator, torch.Tensor]]:
    """The states of some generators, to be set again."""
    with _LOCK:
        return [(generator, generator.get_state()) for generator in generators]


def torchs_own() -> list[torch.Generator]:
    """The generators that torch draws from where none is given."""
    found = [torch.default_generator]
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        found += list(torch.cuda.default_generators)
    return found


def set_states(states: Iterable[tuple[Generator, torch.Tensor]]) -> None:
    """Set the states of some generators."""
    with _LOCK:
        for generator, state in states:
            generator.set_state(state)


def same_state(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Tells whether nothing was drawn between two states."""
    return a is b or _bytes(a) == _bytes(b)


class _Global:
    """The generator of an accelerator that draws what is not given one."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def get_state(self) -> torch.Tensor:
        return torch.get_device_module(self.device).get_rng_state(self.device)

    def set_state(self, state: torch.Tensor) -> None:
        torch.get_device_module(self.device).set_rng_state(state, self.device)


@cache
def global_generator(device: torch.device) -> _Global:
    """The generator of an accelerator where none is given."""
    return _Global(device)


def scattered(count: int, seed: int) -> torch.Tensor:
    """Different integers below 2**32 without a pattern: the same in each call, and from operations of torch alone, so
    that a plan repeats them where it could not repeat a draw from a generator of one call."""
    x = torch.arange(count) ^ (seed * 0x9E3779B9 & _WORD)
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        x = (x ^ (x >> shift)) * factor & _WORD
    return x ^ (x >> 16)


def uniform(count: int, seed: int) -> torch.Tensor:
    """The same as numbers between -1 and 1, in float32 whatever the default is: half precision does not reach 2**32."""
    return scattered(count, seed).float() / 2**31 - 1


_WORD = 2**32 - 1
