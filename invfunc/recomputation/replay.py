"""Random numbers, autocast, kept weights and the plain Python state of a function as they were at one moment."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from copy import copy
from operator import is_
from typing import Any

import torch

from invfunc._torch.generators import Generator, global_generator, set_states, state_of
from invfunc._torch.parametrized import keeping, weights
from invfunc.recomputation.attributes import Attributes, same


class Replay:
    """What a function reads besides its arguments: the states of random number generators, autocast, attributes, and
    the weights that parametrizations gave before it.

    Used as a context, the moment of its making comes back for as long; the caller's states are left as they were.
    """

    def __init__(
        self,
        tensors: Iterable[torch.Tensor],
        generators: Iterable[torch.Generator],
        random: bool,
        attributes: Attributes,
    ) -> None:
        self._attributes, self.held = attributes, attributes.state()
        self._weights = weights()
        devices = {tensor.device for tensor in tensors} - _WITHOUT
        self._autocast = [(kind, _autocast(kind)) for kind in {"cpu", *(device.type for device in devices)}]
        self._generators: list[Generator] = []
        if random:
            self._generators = [torch.default_generator, *map(global_generator, devices), *generators]
        self._states = [state_of(generator) for generator in self._generators]

    def later(self) -> Replay:
        """What the generators and the attributes of this moment are by now; else it is this moment."""
        held, states = self._attributes.state(), [state_of(generator) for generator in self._generators]
        if all(map(is_, states, self._states)) and same(held, self.held):
            return self
        made = copy(self)
        made.held, made._generators, made._states = held, list(self._generators), states
        return made

    def add(self, generator: torch.Generator, state: torch.Tensor) -> None:
        """One more generator, of which it was not known that it would be drawn from."""
        if not any(generator is known for known in self._generators):
            self._generators.append(generator)
            self._states.append(state)

    def rewind(self) -> None:
        """The random numbers and the attributes go on from the moment."""
        self._set(self._states)
        self._attributes.set(self.held)

    def dtypes(self) -> list[torch.dtype]:
        """Those that autocast computes in."""
        return [dtype for _, (enabled, dtype, _) in self._autocast if enabled]

    @contextmanager
    def again(self) -> Iterator[None]:
        """The moment comes back."""
        others = [(kind, then) for kind, then in self._autocast if then != _autocast(kind)]
        with keeping(self._weights), _autocasting(others) if others else _AS_IT_IS:
            before = [state_of(generator) for generator in self._generators]
            everything = self._attributes.everything()
            try:
                self.rewind()
                yield
            finally:
                self._set(before)
                self._attributes.restore(everything)
                if self.dtypes():  # autocast around us would keep what was cast here
                    torch.clear_autocast_cache()

    def _set(self, states: Iterable[torch.Tensor]) -> None:
        set_states(zip(self._generators, states, strict=True))


_AS_IT_IS = nullcontext()
_WITHOUT = {torch.device("cpu"), torch.device("meta")}
"""Devices that have no generator beside the default one."""
_Autocast = tuple[bool, Any, bool]


def _autocast(kind: str) -> _Autocast:
    """Whether autocast is on for a kind of device, to which dtype, and whether it caches."""
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return False, None, False
    return True, torch.get_autocast_dtype(kind), torch.is_autocast_cache_enabled()


@contextmanager
def _autocasting(kinds: list[tuple[str, _Autocast]]) -> Iterator[None]:
    """Autocast as it was for some kinds of devices."""
    with ExitStack() as stack:
        for kind, (enabled, dtype, cache) in kinds:
            stack.enter_context(torch.autocast(kind, dtype=dtype, enabled=enabled, cache_enabled=cache))
        yield
