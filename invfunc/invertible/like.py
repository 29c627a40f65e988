"""What tensors are like, and how they lie in memory."""

from __future__ import annotations

from itertools import pairwise
from typing import NamedTuple

import torch


def laid_out(tensor: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """The tensor with the strides it had: kernels are chosen by them, and with these what autograd saves."""
    if tensor.stride() == stride or tensor.numel() == 0:
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


class Like(NamedTuple):
    """What a tensor is like that is computed again."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Like:
        """What a tensor is like."""
        return cls(tensor.shape, tensor.dtype, tensor.device, tensor.stride())

    def given_to(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor in the dtype, where that may be, and with the strides."""
        return laid_out(tensor.to(self.dtype) if self.is_like(tensor) else tensor, self.stride)

    def is_like(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor may be it; one of a wider dtype has all of its digits."""
        wider = self.dtype.is_floating_point and torch.promote_types(tensor.dtype, self.dtype) == tensor.dtype
        right = wider and tensor.dtype.is_floating_point or tensor.dtype == self.dtype
        return right and (tensor.shape, tensor.device) == (self.shape, self.device)
