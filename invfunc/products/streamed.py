"""A product with the matrix of a data set, which comes batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.across import same_scale
from invfunc.evaluation.batches import Batches, Feed, Visit, check_loader, no_samples, swept, unscaled
from invfunc.evaluation.processes import ALONE, Processes, bits, same
from invfunc.evaluation.weights import Weights
from invfunc.loss.drawn import key_of
from invfunc.products.along import space_of
from invfunc.products.given import Given
from invfunc.products.product import Linearised, Product
from invfunc.reductions.exchange import Exchange
from invfunc.reductions.exchange import Sums as OfAll
from invfunc.transform import Transform


@dataclass(frozen=True, repr=False)
class StreamedProduct(Transform):
    """A function `(params, v, loader) -> tree like params`, the sum of a product over the batches."""

    product: Product
    feed: Feed = Feed()
    outermost = True

    def __repr__(self) -> str:
        return f"streamed({self.product!r})"

    @property
    def has_aux(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.product.has_aux

    @property
    def vector(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.product.vector

    @property
    def lead(self) -> int:
        return self.product.lead

    def names(self, count: int) -> Sequence[str]:
        return ["params", self.vector, "loader"][:count]

    def names_of_f(self, count: int) -> Sequence[str]:
        """What so many arguments are called that are all but the vector."""
        return ["params", "loader"][:count]

    def linearize(self, *args: Any, **kwargs: Any) -> Any:
        """The product at some parameters and data, `(params, loader) -> (v -> product)`, of the same draws for all v.

        The loader is gone through for each v. With `has_aux`, the pair of that function and of an empty list, as there
        was no batch yet.
        """
        return self.run(self._linearized, self.names_of_f, args, kwargs, ".linearize")

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        if len(args) != 3:
            given = f"{len(args)} positional arguments"
            raise ArgumentTypeError(f"it takes the parameters, {self.vector} and a loader, and got {given}.")
        params, v, loader = args
        space = space_of((params,), names)
        sums = Sums(self.product, kwargs, self._batches(params, loader), key_of_drawn(self.product))
        found = sums(space.leaves(v, self.vector, self.lead), self.lead)
        return space.tree(found), sums.aux

    def _linearized(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        if len(args) != 2:
            raise ArgumentTypeError(f"it takes the parameters and a loader, and got {len(args)} positional arguments.")
        check_loader(args[1], sweeps="it is gone through for every vector")
        space = space_of(args, names)
        sums = Sums(self.product, kwargs, self._batches(*args), key_of_drawn(self.product))
        shown = f"{self!r}.linearize({', '.join(names)})"
        return Linearised(shown, sums, space, space, self.vector, self.lead, (args, kwargs)), []

    def _batches(self, params: Any, loader: Any) -> Batches:
        def batches(visit: Visit) -> int:
            check_loader(loader)
            return swept(loader, params, self.product.in_dims, visit, self.feed)

        return batches


class Sums:
    """The linear map of a data set: its batches are gone through for each vector, or for several at once."""

    def __init__(
        self,
        product: Product,
        kwargs: dict[str, Any],
        batches: Batches,
        key: int | None,
        processes: Processes = ALONE,
        before: int = 0,
    ) -> None:
        """`key` is that of drawn columns. `processes` have batches each, and those before this one so many samples."""
        self.product, self.kwargs, self.batches, self.key = product, kwargs, batches, key
        self.processes, self.before = processes, before
        self.n: int | None = None
        """How many samples there were the first time."""
        self.apart = False
        """Whether f has been seen to keep samples apart."""
        self.aux: list[Any] = []

    @torch.no_grad()
    def __call__(self, vectors: list[torch.Tensor], lead: int = 0) -> list[torch.Tensor]:
        wide = [torch.promote_types(x.dtype, torch.float32) for x in vectors]
        sums = [torch.zeros_like(x, dtype=to) for x, to in zip(vectors, wide, strict=True)]
        weights, self.aux = Weights(), []

        def visit(args: tuple, first: int) -> int:
            product = self._behind(self.before + first)
            of_batch = partial(self._of_batch, product, vectors)
            (given, found), aux = product.told(of_batch, product.names_of_f, args, self.kwargs)
            by = self._weight(given, weights) ** product.degree
            for total, x in zip(sums, found, strict=True):
                total.add_(x, alpha=by)
            self.aux.append(aux)
            return given.n

        def seen() -> tuple[None, tuple[int, bool, dict[str, str]]]:
            return None, (self.batches(visit), weights.first is not None, bits(self.product.vector, vectors))

        _, each = self.processes.told("samples", seen)
        n = sum(own for own, _, _ in each)
        same([vector for _, _, vector in each])  # their products are added
        if not n:
            raise no_samples()
        if self.n not in (None, n):
            raise ArgumentError(
                f"the loader gave {n} samples, and {self.n} for the first vector; a matrix is that of the same ones."
            )
        self.n = n
        sums = self._of_all(sums, weights, [scalar and bool(own) for own, scalar, _ in each])
        by = n**-self.product.degree if weights.mean else 1
        return [(by * total).to(x.dtype) for total, x in zip(sums, vectors, strict=True)]

    def _behind(self, first: int) -> Product:
        """The product of a batch behind so many samples."""
        drawing = self.product.drawing
        if drawing is None:
            return self.product
        return replace(self.product, drawing=replace(drawing, key=self.key, first=first))

    def _of_batch(
        self, product: Product, vectors: list[torch.Tensor], args: tuple, kwargs: dict[str, Any], names: Any
    ) -> tuple[tuple[Given, list[torch.Tensor]], Any]:
        """What was given, and the product with it; aux."""
        given, _ = product.given(args, kwargs, names)
        linear, aux = product.recorded(given)
        if not self.apart and given.n > 1:
            given.check_apart()
            self.apart = True
        return (given, linear(vectors, product.lead, keep=False)), aux

    def _of_all(self, sums: list[torch.Tensor], weights: Weights, scalar: list[bool]) -> list[torch.Tensor]:
        """The sums of all processes, of which some have evaluated a loss that is one number."""
        if self.processes.size == 1:
            return sums
        if any(scalar):
            same_scale(weights, self.processes, scalar.index(True))
            weights.mean = self.processes.from_first(scalar.index(True), weights.mean)
        return [*self.processes.exchanged([_summed(sums)])[0]]

    @staticmethod
    def _weight(given: Given, weights: Weights) -> int:
        """What the loss of a batch has to be multiplied with so that it is a sum over its samples."""
        if given.losses.ndim:
            return 1
        if given.loss is None:
            raise unscaled()
        return weights.of(given.loss_part)


def key_of_drawn(product: Product) -> int | None:
    """The key of what a product draws for each sample, if it does."""
    return None if product.drawing is None else key_of(product.drawing.generator)


def _summed(tensors: list[torch.Tensor]) -> Exchange:
    return tuple((yield OfAll(tensors)))
