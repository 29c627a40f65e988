"""What tensors are like, and how they lie in memory."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch

from invfunc._torch.functorch import storage, unwatched, unwrapped
from invfunc.errors import InverseError
from invfunc.recomputation.sparse import is_sparse


def laid_out(tensor: torch.Tensor, stride: tuple[int, ...] | None) -> torch.Tensor:
    """The tensor with the strides it had: kernels are chosen by them, and with these what autograd saves."""
    if stride is None or tensor.stride() == stride or tensor.numel() == 0:
        return tensor
    expanded = [dim for dim, (step, size) in enumerate(zip(stride, tensor.shape, strict=True)) if step == 0 < size - 1]
    if expanded:
        shape = tensor.shape
        for dim in expanded:
            tensor = tensor.narrow(dim, 0, 1)
        return laid_out(tensor, tuple(step or 1 for step in stride)).expand(shape)
    apart = sorted((step, size) for step, size in zip(stride, tensor.shape, strict=True) if size > 1)
    if any(step < before * size for (before, size), (step, _) in pairwise([(1, 1), *apart])):  # they overlap
        return tensor
    return tensor.new_empty_strided(tensor.shape, stride).copy_(tensor)


class Memory:
    """Which memory a tensor is in; it is not kept."""

    def __init__(self, x: torch.Tensor) -> None:
        self._storage = weakref.ref(storage(x))

    def holds(self, x: torch.Tensor) -> bool:
        """Whether a tensor is in it."""
        return self._storage() is storage(x)


Geometry = tuple[torch.Size, tuple[int, ...], int, bool]


def geometry(tensor: torch.Tensor) -> Geometry:
    """How a tensor lies in its memory."""
    if is_sparse(tensor):
        return tensor.shape, (), 0, False
    return tensor.shape, tensor.stride(), int(tensor.storage_offset()), tensor.is_contiguous()


def same_memory(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two plain tensors are the same numbers in the same memory."""
    with unwatched():
        if not all(type(t) is torch.Tensor and t.layout is torch.strided and unwrapped(t) is None for t in (a, b)):
            return False
        first, second = ((t.dtype, geometry(t), t.is_conj(), t.is_neg()) for t in (a, b))
        return first == second and storage(a) is storage(b)


def all_of(tensor: torch.Tensor, laid: Geometry) -> bool:
    """Whether a tensor has the same entries in the same order, in another shape."""
    shape, _, offset, contiguous = laid
    same = tensor.numel() == shape.numel() and tensor.storage_offset() == offset
    return same and contiguous and tensor.is_contiguous()


class Like(NamedTuple):
    """What a tensor is like that is computed again."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...] | None
    """None of a sparse tensor, which has none."""

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Like:
        """What a tensor is like."""
        return cls(tensor.shape, tensor.dtype, tensor.device, None if is_sparse(tensor) else tensor.stride())

    def given_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the dtype, where that may be, and with the strides."""
        if tensor.dtype != self.dtype and self.is_like(tensor):
            tensor = tensor.to(self.dtype)
        return laid_out(tensor, self.stride)

    def checked(self, came: Any, place: int, names: Callable[[], list[str]]) -> torch.Tensor:
        """What the inverse gives for the tensor of x at a place, as that was."""
        if isinstance(came, torch.Tensor) and self.is_like(came):
            return self.given_to(came)
        raise self._instead(came, names()[place], place)

    def _instead(self, came: Any, name: str, place: int) -> InverseError:
        was = f"{list(self.shape)} {self.dtype} on {self.device}"
        if not isinstance(came, torch.Tensor):
            return InverseError(
                f"the inverse gives {name} as {type(came).__name__}, where it was {was}. To keep it in memory, "
                f"and not compute it by the inverse, pass keep=({place},)."
            )
        text = f"the inverse gives {name} as {list(came.shape)} {came.dtype} on {came.device}, where it was {was}."
        if came.shape == self.shape and came.dtype != self.dtype:
            text += f" To keep in memory what the function rounds to another dtype, pass keep=({place},)."
        return InverseError(text)

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may be it; one of a wider dtype has all of its digits."""
        if (tensor.shape, tensor.device) != (self.shape, self.device):
            return False
        return tensor.dtype == self.dtype or (
            self.dtype.is_floating_point
            and tensor.dtype.is_floating_point
            and torch.promote_types(tensor.dtype, self.dtype) == tensor.dtype
        )
