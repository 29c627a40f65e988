"""The tensors that autograd saves in an evaluation of f, and in one that is done again."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import saved_tensors_hooks

from invfunc import thresholds
from invfunc._torch.functorch import pointer, version
from invfunc.errors import ModifiedError, ReplayError
from invfunc.recomputation.call import Call
from invfunc.recomputation.origins import OUTSIDE, Key, Origins, Place
from invfunc.recomputation.outside import SHARDED
from invfunc.recomputation.probe import Probe
from invfunc.recomputation.report import CHANGES
from invfunc.recomputation.rounding import Error


class Saved(NamedTuple):
    """What is known of a saved tensor, whatever its values: it is that one of its call."""

    shape: torch.Size
    dtype: torch.dtype
    argument: int | None
    """Which of the further arguments it is, if it is one."""
    call: Place


class Found(NamedTuple):
    """A tensor that was saved again, as it was then."""

    tensor: torch.Tensor
    version: int

    def get(self, call: Call) -> torch.Tensor:
        """The tensor, for the one who asks: as in plain autograd only what is asked for may not be written."""
        if version(self.tensor) != self.version:
            with call.named():
                raise ModifiedError(
                    f"a tensor of shape {list(self.tensor.shape)} that is needed for the gradient of the function has "
                    "been modified by an inplace operation, within it or since. Write y = y + z in place of y += z."
                )
        return self.tensor


class Enough(Exception):
    """Raised when all that was saved is there, so that the evaluation need not go on."""


class Recording:
    """Saved tensors of an evaluation that is done again.

    Args:
        like: what is known of them.
        probes: some of their values.
        places: which further arguments are where in memory.
        to_the_end: whether the evaluation goes on when all are there.
        origins: how they come about.
    """

    def __init__(
        self,
        like: dict[Key, Saved],
        probes: dict[Key, Probe],
        places: dict[int, int],
        to_the_end: bool,
        origins: Origins,
    ) -> None:
        self.origins = origins
        self._like = like
        self._probes = probes
        self._places = places
        self._to_the_end = to_the_end
        self.found: dict[Key, Found] = {}
        self._apart: dict[Key, tuple[Error, Probe]] = {}
        """How far saved tensors are from what they were, and what they are."""
        self._crossed = self._looked_at = 0
        """How many entries are on another side of a kink than they were, of how many."""
        self._kink = ""
        self._stopped: tuple[type[Exception], tuple] | None = None
        """The error that ends an evaluation; it is not kept itself, as it knows what it came from."""

    def apart(self, most: float) -> dict[Key, float]:
        """The errors above some of what was saved. What an operation of torch writes afterwards is left out."""
        return {
            key: float(error)
            for key, (error, probe) in self._apart.items()
            if error > most and not any(probe.errors((self.found[key].tensor,)))
        }

    def gives(self, result: Any) -> Any:
        """What a shared function gives, if it came about as the first time, whatever of it autograd saves."""
        if not self.origins.gives(result):
            raise ReplayError(
                "evaluated again, the function computes other numbers: a function that forward and inverse share has "
                f"other arguments than the first time, such as a number that it reads. {CHANGES} {SHARDED}"
            )
        return result

    def given_back(self, tensor: torch.Tensor) -> None:
        """Nothing: a statistic looked on the first time."""

    def _compare(self, key: Key, tensor: torch.Tensor, call: Place) -> None:
        compared = self._probes[key].compare((tensor,))
        if error := compared.errors()[0]:
            self._apart[key] = error, Probe((tensor,), thresholds.PROBED_SAVED)
            if call.kinked:
                crossed, looked_at = compared.crossed()
                self._kink = call.call if crossed else self._kink
                self._crossed += crossed
                self._looked_at += looked_at

    def kink(self) -> str | None:
        """The call whose derivative is that of another side of a kink, for many entries; None where there is none."""
        return self._kink if self._crossed >= max(2, _MANY * self._looked_at) else None

    def misses(self) -> bool:
        return len(self.found) < len(self._like)

    @contextmanager
    def keeping(self) -> Iterator[None]:
        """A context in which what is saved is kept."""
        try:
            with saved_tensors_hooks(self._pack, never):
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
        key, call = self.origins.save()
        like = self._like.get(key)
        if like is None or like[:3] != (tensor.shape, tensor.dtype, self._places.get(pointer(tensor))):
            then = "nothing" if like is None else f"{list(like.shape)} {like.dtype}"
            raise ReplayError(
                f"autograd saves a tensor {list(tensor.shape)} {tensor.dtype} where it saved {then} the first time: "
                f"the function does not do the same thing twice. {CHANGES}"
            )
        if not call.same(like.call):
            instead = call.instead_of(like.call)
            raise ReplayError(f"evaluated again, the function computes other numbers: {instead}. {CHANGES} {SHARDED}")
        if key in self._probes:
            self._apart.pop(key, None)
            self._compare(key, tensor, like.call)
        with self.origins.paused:  # hooks are called between the calls of f
            found = tensor.detach()  # of another, where an evaluation around puts one in its place
        self.found[key] = Found(found, version(found))
        if key[0] == OUTSIDE and not self._to_the_end and not self.misses():
            raise Enough


def never(packed: None) -> torch.Tensor:
    """The hook of what is not asked for."""
    raise AssertionError("this graph is never run backwards")


_MANY = 0.03
"""The share of entries that does not cross a kink by chance."""
