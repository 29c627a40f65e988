"""What the functions of a call close over, for its backward pass: as it was, though others may be there by then."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from operator import is_
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from invfunc import tree
from invfunc._torch.levels import Forms, versions
from invfunc.errors import ModifiedError, ReplayError
from invfunc.recomputation.outside import SHARDED, freed
from invfunc.recomputation.report import CHANGES
from invfunc.recomputation.straight import Read


class Closed:
    """That of one call, or of some that nothing happens between.

    Args:
        read: what the functions are, and read.
        forms: those of the tensors.
    """

    def __init__(self, read: Read, forms: Forms) -> None:
        self._purity, self._tensors, self._forms = read.purity, read.tensors, forms
        self._versions = versions(read.tensors)
        self._held = [t.detach() for t in read.tensors]
        """Their memory, which they may have no more by then."""

    def again(self) -> AbstractContextManager:
        """A context in which the functions read it as it was; raises where they cannot."""
        if not self._purity.unchanged():
            raise _exchanged("a function")
        tensors = self._tensors
        if not tensors:
            return _AS_IT_IS
        if versions(tensors) != self._versions:
            raise ModifiedError(
                "a tensor that an invertible block closes over, such as a weight of a module, has been modified by an "
                "inplace operation since its call. Call backward before the optimiser makes its step."
            )
        now = self._purity.tensors()
        if now is None:
            raise _exchanged("a tensor")
        same = all(map(is_, now, tensors)) and self._forms.fit(now)
        if same and [t.data_ptr() for t in now] == [t.data_ptr() for t in self._held]:
            return _AS_IT_IS
        return _Instead(self._instead_of(now))

    def _instead_of(self, now: Sequence[torch.Tensor]) -> dict[int, torch.Tensor]:
        """The tensors of the call, for those that have taken their places, or whose memory is another one."""
        stand: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for t, then, held, need in zip(now, self._tensors, self._held, self._forms.needs, strict=True):
            if stand.setdefault(id(t), (then, held.requires_grad_(need)))[0] is not then:
                raise _exchanged("a tensor")
            if freed(held):
                raise ReplayError(
                    f"the memory of a tensor of shape {list(held.shape)} that the function reads from outside was "
                    f"freed after it was evaluated. {SHARDED}"
                )
        return {key: instead for key, (_, instead) in stand.items()}


_AS_IT_IS = nullcontext()


def _exchanged(what: str) -> ReplayError:
    return ReplayError(f"{what} that the block evaluates has been exchanged since its call. {CHANGES}")


class _Instead(TorchFunctionMode):
    """Puts tensors in the place of others."""

    def __init__(self, instead: Mapping[int, torch.Tensor]) -> None:
        super().__init__()
        self._instead = instead

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        given: Any = tree.map_tensors(lambda t: self._instead.get(id(t), t), (args, kwargs or {}))
        return func(*given[0], **given[1])
