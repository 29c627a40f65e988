"""One step of a contraction: the product of two tensors, element by element or of matrices.

torch.einsum would make batched products of length-one vectors of an element-wise product.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch

from invfunc._torch.functorch import transforming


class _Layout(NamedTuple):
    """The layout of a tensor for a product element by element: its dimensions in an order, with new ones between."""

    order: tuple[int, ...] | None
    places: tuple[slice | None, ...] | None

    @classmethod
    def of(cls, labels: str, wanted: str) -> _Layout:
        order = [labels.index(c) for c in wanted if c in labels]
        places = tuple(slice(None) if c in labels else None for c in wanted)
        return cls(_moved(order), places if None in places else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.order is None else x.permute(self.order)
        return x if self.places is None else x[self.places]


def _moved(places: list[int]) -> tuple[int, ...] | None:
    """An order of dimensions, None if it is the one that they have."""
    return tuple(places) if places != sorted(places) else None


@lru_cache(maxsize=4096)
def _elementwise(equation: str) -> tuple[_Layout, _Layout, tuple[int, ...]] | None:
    """The layouts of both tensors, and the dimensions to be summed; None for a product of matrices, in which labels of
    one tensor alone meet a sum."""
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    summed = "".join(c for c in left if c in right and c not in output)
    own = {*left} ^ {*right}
    if not own <= {*output} or (own and summed):
        return None
    wanted = output + summed
    return _Layout.of(left, wanted), _Layout.of(right, wanted), tuple(range(len(output), len(wanted)))


def product(equation: str, operands: list[torch.Tensor]) -> torch.Tensor:
    """One step of a contraction."""
    if len(operands) == 1:
        return _reduced(equation, operands[0])
    if (found := _elementwise(equation)) is None:
        return torch.einsum(equation, *operands)
    first, second, summed = found
    product = first(operands[0]) * second(operands[1])
    return product.sum(summed) if summed else product


def _reduced(equation: str, x: torch.Tensor) -> torch.Tensor:
    """A sum over some labels, in an order of the others; x itself where there is nothing to do."""
    outer, rest, order = _sums(equation, x.stride())
    x = x.sum(outer) if outer else x
    x = x.sum(rest) if rest else x
    return x if order is None else x.permute(order)


@lru_cache(maxsize=4096)
def _sums(equation: str, strides: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...] | None]:
    """The dimensions to sum over, first those in the outer loops of memory, where whole rows are added; the order of
    what is left."""
    labels, output = equation.split("->")
    largest = max((s for c, s in zip(labels, strides, strict=True) if c in output), default=0)
    outer = [d for d, c in enumerate(labels) if c not in output and strides[d] > largest]
    left = [c for d, c in enumerate(labels) if d not in outer]
    rest = tuple(d for d, c in enumerate(left) if c not in output)
    order = _moved([[c for c in left if c in output].index(c) for c in output])
    return tuple(outer), rest, order


def in_place(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Tells whether a result of them can be written to memory that is there: of one dtype, and nobody differentiates
    it."""
    return not (x.requires_grad or y.requires_grad or x.dtype != y.dtype or transforming())
