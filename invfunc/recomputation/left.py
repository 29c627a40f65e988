"""What functions make beside what they return, and leave behind: in an attribute, or in a list.

A state that is replaced, as in `self.mean = 0.9 * self.mean + ...`, is replaced once more when the function is
evaluated again. It stays what it was if nothing but the same call has replaced it since; else that is refused.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from invfunc._torch.weak import WeakIdSet
from invfunc.errors import ReplayError
from invfunc.recomputation.sight import Sight


class LeftByAll:
    """What the calls of a block have left behind, which it may not read in another one."""

    def __init__(self) -> None:
        self._own = WeakIdSet()

    def add(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note what a call has left behind."""
        tensors = list(tensors)
        self._own.update(tensors)
        _LEFT.update(t for t in tensors if not t.requires_grad)

    def __contains__(self, tensor: torch.Tensor) -> bool:
        return tensor in self._own

    def refuse(self, tensor: torch.Tensor) -> None:
        """Raise if an earlier call made a tensor and left it behind: one of the block, or of another block that may
        read and replace the same state, which has no gradient."""
        if tensor in self._own or tensor in _LEFT:
            raise _made_before(tensor)


_LEFT = WeakIdSet()
"""What all blocks have left behind that needs no gradient."""


class Left:
    """What one call has left behind, each time it was evaluated.

    Args:
        by_all: what all calls of the block have left behind.
    """

    def __init__(self, by_all: LeftByAll) -> None:
        self._by_all = by_all
        self._own = WeakIdSet()
        self._kinds = set[tuple]()

    def first(self, tensors: Iterable[torch.Tensor]) -> None:
        """Note what the first evaluation has left behind."""
        tensors = list(tensors)
        self._kinds = set(map(_kind, tensors))
        self._own.update(tensors)
        self._by_all.add(tensors)

    @property
    def something(self) -> bool:
        """Whether the first evaluation has left anything behind."""
        return bool(self._kinds)

    @contextmanager
    def again(self, sight: Sight) -> Iterator[None]:
        """A context in which the function, or its inverse, is evaluated again and seen."""
        try:
            with sight:
                yield
        finally:
            self._own.update(sight.made())

    def may_not_be_read(self) -> None:
        """What evaluations again have left behind is that of a call that is yet to be differentiated."""
        self._by_all.add(self._own)

    def refuse(self, tensor: torch.Tensor) -> None:
        """Raise if the block has left a tensor behind that a function reads which is evaluated again."""
        if tensor in self._by_all:
            raise _made_before(tensor)

    def refuse_to_replace(self, tensor: torch.Tensor) -> None:
        """Raise if the function, evaluated again, may replace a state by an earlier one: it finds one that is not what
        it read the first time, nor what it left behind itself. Parameters are no states."""
        state = not isinstance(tensor, nn.Parameter) and not (tensor.is_leaf and tensor.requires_grad)
        if state and tensor not in self._own and _kind(tensor) in self._kinds:
            raise ReplayError(
                f"evaluated again, the function would replace a tensor of shape {list(tensor.shape)} by the one of the "
                "first time, but another one has come in between: by another call, or as functional_call has ended. "
                "Write a state in place (self.count.add_(1)), which is done once."
            )


def _kind(tensor: torch.Tensor) -> tuple:
    return tensor.shape, tensor.dtype, tensor.device


def _made_before(tensor: torch.Tensor) -> ReplayError:
    """What is told of a tensor that the function made in an earlier evaluation, and kept for a later one."""
    return ReplayError(
        f"the function reads a tensor of shape {list(tensor.shape)} that it made in an earlier call and left behind, "
        "in an attribute or a list: what is evaluated again in the backward pass would make it once more. Write a "
        "state in place (self.count.add_(1)), which is done once; fill what is computed once and kept before, by a "
        "call under torch.no_grad()."
    )
