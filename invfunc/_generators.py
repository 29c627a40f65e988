"""States of random number generators, read and set by one thread at a time.

Torch holds a lock of the generator meanwhile. Python may collect garbage there and change to another thread, which
would wait for that lock and keep Python from ever coming back.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from typing import Protocol

import torch


class Generator(Protocol):
    """What has a state, as `torch.Generator` has."""

    def get_state(self) -> torch.Tensor: ...

    def set_state(self, state: torch.Tensor, /) -> object: ...


_LOCK = threading.RLock()


def state_of(generator: Generator) -> torch.Tensor:
    """The state of a generator."""
    with _LOCK:
        return generator.get_state()


def set_states(states: Iterable[tuple[Generator, torch.Tensor]]) -> None:
    """Set the states of some generators."""
    with _LOCK:
        for generator, state in states:
            generator.set_state(state)
