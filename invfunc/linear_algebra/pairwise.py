"""One step of a contraction: the product of two tensors, element by element or of matrices.

torch.einsum would make batched products of length-one vectors of an element-wise product, and knows one order of a
batched matrix product.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import torch

from invfunc import thresholds
from invfunc._torch.functorch import transforming
from invfunc.linear_algebra.pages import room


@dataclass(frozen=True)
class _Layout:
    """How a tensor is laid out for a product: its dimensions in an order, then as a shape."""

    order: tuple[int, ...] | None
    shape: tuple[int, ...]

    @classmethod
    def of(cls, labels: str, order: Sequence[str], shape: Sequence[int]) -> _Layout:
        places = [labels.index(c) for c in order if c in labels]
        return cls(tuple(places) if places != sorted(places) else None, tuple(shape))

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.order is None else x.permute(self.order)
        return x if x.shape == self.shape else x.reshape(self.shape)


@dataclass(frozen=True)
class _Matrix:
    """How a tensor becomes a matrix, or one for each of a batch: where it has to be copied, along its memory."""

    plain: _Layout
    turned: _Layout
    """As its transpose."""
    last: tuple[int, int] | None
    """The last dimension of its rows and that of its columns, if there are both."""

    @classmethod
    def of(cls, labels: str, groups: Sequence[Sequence[str]], shape: Sequence[int]) -> _Matrix:
        """Of the labels of a batch, of rows and of columns, which become a shape."""
        batch, rows, columns = groups
        *lead, r, c = shape
        plain = _Layout.of(labels, [*batch, *rows, *columns], shape)
        turned = _Layout.of(labels, [*batch, *columns, *rows], [*lead, c, r])
        return cls(plain, turned, (labels.index(rows[-1]), labels.index(columns[-1])) if rows and columns else None)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        if self.last is not None and x.stride(self.last[0]) < x.stride(self.last[1]):
            return self.turned(x).mT
        return self.plain(x)


@dataclass(frozen=True)
class _Step:
    """A product of two tensors, element by element or of matrices, with what has to be done before and after."""

    kind: Literal["mul", "mm", "bmm"]
    swapped: bool
    first: _Layout | _Matrix
    second: _Layout | _Matrix
    room: tuple[int, ...]
    shape: tuple[int, ...]
    order: tuple[int, ...] | None
    summed: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Labels:
    """What the labels of a product of two tensors are in it, as one of matrices."""

    left: str
    right: str
    output: str
    sizes: dict[str, int]
    batch: list[str]
    summed: list[str]
    rows: list[str]
    columns: list[str]

    @classmethod
    def of(cls, left: str, right: str, output: str, sizes: dict[str, int]) -> _Labels:
        shared = [c for c in left if c in right]
        batch, summed = [c for c in shared if c in output], [c for c in shared if c not in output]
        rows, columns = [c for c in left if c not in right], [c for c in right if c not in left]
        return cls(left, right, output, sizes, batch, summed, rows, columns)

    @property
    def elementwise(self) -> bool:
        """Whether it is not a product of matrices: nothing is summed, or no tensor has a label of its own."""
        return not self.summed or not (self.rows or self.columns)

    def transposed(self) -> _Labels:
        return replace(self, left=self.right, right=self.left, rows=self.columns, columns=self.rows)

    def size(self, labels: Sequence[str]) -> int:
        return math.prod(self.sizes[c] for c in labels)

    def shape(self, labels: Sequence[str]) -> tuple[int, ...]:
        return tuple(self.sizes[c] for c in labels)

    def by_elements(self) -> _Step:
        order = [*self.output, *self.summed]
        first, second = (
            _Layout.of(x, order, [self.sizes[c] if c in x else 1 for c in order]) for x in (self.left, self.right)
        )
        full = self.shape(order)
        return _Step("mul", False, first, second, full, full, None, tuple(range(len(self.output), len(order))))

    def by_matrices(self) -> _Step:
        rows, columns = self.rows, self.columns
        # in the order of the result, unless the matrix on the right would be narrow, and the product more than a copy
        ordered = not columns or bool(rows and self.output.index(rows[0]) < self.output.index(columns[0]))
        narrow = min(thresholds.NARROW, self.size(self.summed))
        if ordered is (self.size(columns if ordered else rows) < narrow):
            return self.transposed()._by_matrices(swapped=True)
        return self._by_matrices(swapped=False)

    def _by_matrices(self, swapped: bool) -> _Step:
        batch, summed, rows, columns = self.batch, self.summed, self.rows, self.columns
        b, k, r, c = map(self.size, (batch, summed, rows, columns))
        lead = [b] if b > 1 else []
        order = [*batch, *rows, *columns]
        result = _Layout.of("".join(order), self.output, self.shape(order))
        return _Step(
            "bmm" if b > 1 else "mm",
            swapped,
            _Matrix.of(self.left, [batch, rows, summed], [*lead, r, k]),
            _Matrix.of(self.right, [batch, columns, summed], [*lead, c, k]),
            (*lead, r, c),
            result.shape,
            result.order,
        )


@lru_cache(maxsize=4096)
def _step(equation: str, shape: torch.Size, other: torch.Size) -> _Step | None:
    """How to compute a step; None leaves it to torch.einsum."""
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    if not set(left) ^ set(right) <= set(output):  # one tensor alone is summed over a label
        return None
    labels = _Labels.of(left, right, output, dict(zip(left + right, (*shape, *other), strict=True)))
    return labels.by_elements() if labels.elementwise else labels.by_matrices()


def product(equation: str, operands: list[torch.Tensor]) -> torch.Tensor:
    """One step of a contraction."""
    step = _step(equation, operands[0].shape, operands[1].shape) if len(operands) == 2 else None
    if len(operands) == 1:
        return _reduced(equation, operands[0])
    if step is None:
        return torch.einsum(equation, *operands)
    x, y = reversed(operands) if step.swapped else operands
    x, y = step.first(x), step.second(y)
    out = room_for(step.room, x, y)
    if step.kind == "mul":
        product = torch.mul(x, y, out=out)
        return product.sum(step.summed) if step.summed else product
    product = (torch.bmm if step.kind == "bmm" else torch.mm)(x, y.mT, out=out)
    product = product if product.shape == step.shape else product.reshape(step.shape)
    return product if step.order is None else product.permute(step.order)


def _reduced(equation: str, x: torch.Tensor) -> torch.Tensor:
    """A sum over some labels: first over those in the outer loops of memory, where whole rows are added."""
    labels, output = equation.split("->")
    largest = max((s for c, s in zip(labels, x.stride(), strict=True) if c in output), default=0)
    outer = [d for d, c in enumerate(labels) if c not in output and x.stride(d) > largest]
    if outer and len(outer) < len(labels) - len(output):
        x, labels = x.sum(outer), "".join(c for d, c in enumerate(labels) if d not in outer)
    return torch.einsum(f"{labels}->{output}", x)


def room_for(shape: Sequence[int], x: torch.Tensor, y: torch.Tensor) -> torch.Tensor | None:
    """Where a large result that nobody differentiates can be written."""
    if math.prod(shape) < thresholds.HUGE_PAGES // 8:  # of any dtype
        return None
    return room(list(shape), x) if in_place(x, y) else None


def in_place(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether a result of them can be written to memory that is there: of one dtype, and nobody differentiates it."""
    return not (x.requires_grad or y.requires_grad or x.dtype != y.dtype or transforming())
