"""The tensors that autograd saves in an evaluation of f, and in one that is done again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch.autograd.graph import saved_tensors_hooks

from invfunc import thresholds
from invfunc._functorch import pointer, version
from invfunc.errors import ModifiedError, ReplayError
from invfunc.invertible.probe import Error, Probe
from invfunc.invertible.recall import OUTSIDE, Parts
from invfunc.invertible.report import CHANGES

Saved = tuple[torch.Size, torch.dtype, int | None]
"""What is known of a saved tensor: its shape and dtype, and which of the further arguments it is, if it is one."""
Key = tuple[int, int]
"""Which saved tensor: of the evaluation of a shared function (-1: of f beside them), and which one there."""


class Tape(Parts):
    """The tensors that autograd saves in one evaluation of f, in order."""

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}

    def next(self) -> Key:
        """The key of the tensor that is saved now."""
        index = self.counts.get(self.part, 0)
        self.counts[self.part] = index + 1
        return self.part, index


class Enough(Exception):
    """All that was saved is there."""


class Recording:
    """Saved tensors of an evaluation that is done again."""

    def __init__(
        self, like: dict[Key, Saved], probes: dict[Key, Probe], places: dict[int, int], to_the_end: bool
    ) -> None:
        self._like = like
        self._probes = probes
        self._places = places
        self._to_the_end = to_the_end
        self._tape = Tape()
        self.found: dict[Key, torch.Tensor] = {}
        self._apart: dict[Key, tuple[Error, Probe]] = {}
        """How far saved tensors are from what they were, and what they are."""
        self._versions: list[tuple[torch.Tensor, int]] = []
        self._stopped: tuple[type[Exception], tuple] | None = None
        """The error that ends an evaluation; it is not kept itself, as it knows what it came from."""

    def check(self) -> None:
        """What was saved was not written afterwards."""
        for tensor, then in self._versions:
            if version(tensor) != then:
                raise ModifiedError(
                    f"a tensor of shape {list(tensor.shape)} that is needed for the gradient of the function has been "
                    "modified within it by an inplace operation."
                )

    def apart(self, most: float) -> dict[Key, float]:
        """The errors above some of what was saved. What an operation of torch writes afterwards is left out."""
        return {
            key: float(error)
            for key, (error, probe) in self._apart.items()
            if error > most and not any(probe.errors((self.found[key],)))
        }

    def given_back(self, tensor: torch.Tensor) -> None:
        """Nothing: a statistic looked on the first time."""

    def misses(self) -> bool:
        return len(self.found) < len(self._like)

    @contextmanager
    def part(self, index: int) -> Iterator[None]:
        self._tape.counts.pop(index, None)  # an inverse may be evaluated once more
        with self._tape.within(index), saved_tensors_hooks(self._pack, _never):
            try:
                yield
            except RuntimeError:
                if self._stopped is None:
                    raise
                kind, told = self._stopped
                raise kind(*told) from None  # of which torch.jit has made an error of its own

    def _pack(self, tensor: torch.Tensor) -> None:
        try:
            self._record(tensor)
        except Exception as error:
            self._stopped = type(error), error.args
            raise

    def _record(self, tensor: torch.Tensor) -> None:
        key = self._tape.next()
        like = self._like.get(key)
        if like != (tensor.shape, tensor.dtype, self._places.get(pointer(tensor))):
            then = "nothing" if like is None else f"{list(like[0])} {like[1]}"
            raise ReplayError(
                f"autograd saves a tensor {list(tensor.shape)} {tensor.dtype} where it saved {then} the first time: "
                f"the function does not do the same thing twice. {CHANGES}"
            )
        self._apart.pop(key, None)
        if key in self._probes and (error := self._probes[key].errors((tensor,))[0]):
            self._apart[key] = error, Probe((tensor,), thresholds.PROBED_SAVED)
        self.found[key] = found = tensor.detach()  # of another, where an evaluation around puts one in its place
        self._versions.append((found, version(found)))
        if key[0] == OUTSIDE and not self._to_the_end and not self.misses():
            raise Enough


def _never(packed: None) -> torch.Tensor:
    raise AssertionError("this graph is never run backwards")
