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


@dataclass(frozen=True)
class _Layout:
    """The layout of a tensor for a product: its dimensions in an order, then as a shape, perhaps transposed."""

    order: tuple[int, ...] | None
    shape: tuple[int, ...] | None
    turned: bool

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        x = x if self.order is None else x.permute(self.order)
        x = x if self.shape is None else x.reshape(self.shape)
        return x.mT if self.turned else x


@dataclass(frozen=True)
class _Operand:
    """A tensor of a product, as far as that depends on it: labels with their sizes, and with their steps in memory."""

    sizes: dict[str, int]
    steps: dict[str, int]

    @classmethod
    def of(cls, labels: str, shape: Sequence[int], strides: Sequence[int]) -> _Operand:
        return cls(dict(zip(labels, shape, strict=True)), dict(zip(labels, strides, strict=True)))

    def laid_out(self, order: Sequence[str], shape: Sequence[int], turned: bool = False) -> _Layout:
        places = [[*self.sizes].index(c) for c in order if c in self.sizes]
        same = [self.sizes[c] for c in order if c in self.sizes] == [*shape]
        return _Layout(_moved(places), None if same else tuple(shape), turned)

    def matrix(self, batch: Sequence[str], rows: Sequence[str], columns: Sequence[str]) -> _Layout:
        """As a matrix, or one for each of a batch: where it has to be copied, along its memory."""
        b, r, c = (math.prod(self.sizes[label] for label in group) for group in (batch, rows, columns))
        lead = [] if b == 1 else [b]
        if rows and columns and self.steps[rows[-1]] < self.steps[columns[-1]]:
            return self.laid_out([*batch, *columns, *rows], [*lead, c, r], turned=True)
        return self.laid_out([*batch, *rows, *columns], [*lead, r, c])


def _moved(places: Sequence[int]) -> tuple[int, ...] | None:
    """An order of dimensions, None if it is the one that they have."""
    return tuple(places) if [*places] != sorted(places) else None


@dataclass(frozen=True)
class _Step:
    """A product of two tensors, element by element or of matrices, with what has to be done before and after."""

    kind: Literal["mul", "mm", "bmm"]
    swapped: bool
    first: _Layout
    second: _Layout
    shape: tuple[int, ...] | None = None
    order: tuple[int, ...] | None = None
    summed: tuple[int, ...] = ()


@dataclass(frozen=True)
class _Pair:
    """The tensors of a product, and what their labels are in it, as one of matrices."""

    left: _Operand
    right: _Operand
    output: str
    batch: list[str]
    summed: list[str]
    rows: list[str]
    columns: list[str]

    @classmethod
    def of(cls, left: _Operand, right: _Operand, output: str) -> _Pair:
        shared = [c for c in left.sizes if c in right.sizes]
        batch, summed = [c for c in shared if c in output], [c for c in shared if c not in output]
        rows, columns = ([c for c in x.sizes if c not in shared] for x in (left, right))
        return cls(left, right, output, batch, summed, rows, columns)

    @property
    def elementwise(self) -> bool:
        """Tells whether it is not a product of matrices: nothing is summed, or no tensor has a label of its own."""
        return not self.summed or not (self.rows or self.columns)

    def transposed(self) -> _Pair:
        return replace(self, left=self.right, right=self.left, rows=self.columns, columns=self.rows)

    def shape(self, labels: Sequence[str]) -> tuple[int, ...]:
        sizes = self.left.sizes | self.right.sizes
        return tuple(sizes[c] for c in labels)

    def size(self, labels: Sequence[str]) -> int:
        return math.prod(self.shape(labels))

    def by_elements(self) -> _Step:
        order = [*self.output, *self.summed]
        first, second = (x.laid_out(order, [x.sizes.get(c, 1) for c in order]) for x in (self.left, self.right))
        summed = tuple(range(len(self.output), len(order)))
        return _Step("mul", False, first, second, summed=summed)

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
        first, second = self.left.matrix(batch, rows, summed), self.right.matrix(batch, summed, columns)
        kind, lead = ("mm", []) if self.size(batch) == 1 else ("bmm", [self.size(batch)])
        room, order = (*lead, self.size(rows), self.size(columns)), [*batch, *rows, *columns]
        shape, back = self.shape(order), _moved([order.index(c) for c in self.output])
        return _Step(kind, swapped, first, second, None if shape == room else shape, back)


@lru_cache(maxsize=4096)
def _step(
    equation: str, shape: torch.Size, strides: tuple[int, ...], other: torch.Size, steps: tuple[int, ...]
) -> _Step | None:
    """The way to compute a step of tensors with these shapes and strides; None if one alone is summed over a label."""
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    if not set(left) ^ set(right) <= set(output):
        return None
    pair = _Pair.of(_Operand.of(left, shape, strides), _Operand.of(right, other, steps), output)
    return pair.by_elements() if pair.elementwise else pair.by_matrices()


def product(equation: str, operands: list[torch.Tensor]) -> torch.Tensor:
    """One step of a contraction."""
    if len(operands) == 1:
        return _reduced(equation, operands[0])
    x, y = operands
    step = _step(equation, x.shape, x.stride(), y.shape, y.stride())
    if step is None:
        return _of_summed(equation, x, y)
    x, y = (step.first(y), step.second(x)) if step.swapped else (step.first(x), step.second(y))
    if step.kind == "mul":
        product = x * y
        return product.sum(step.summed) if step.summed else product
    product = torch.mm(x, y) if step.kind == "mm" else torch.bmm(x, y)
    product = product if step.shape is None else product.reshape(step.shape)
    return product if step.order is None else product.permute(step.order)


def _of_summed(equation: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """A step of tensors of which each is summed before over the labels that it alone has."""
    inputs, output = equation.split("->")
    left, right = inputs.split(",")
    first, second = ("".join(c for c in own if c in others + output) for own, others in ((left, right), (right, left)))
    return product(f"{first},{second}->{output}", [_reduced(f"{left}->{first}", x), _reduced(f"{right}->{second}", y)])


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
