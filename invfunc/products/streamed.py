"""A product with the matrix of a data set, which comes batch by batch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.batches import Feed, check_loader, swept, unscaled
from invfunc.evaluation.weights import Weights
from invfunc.loss.drawn import key_of
from invfunc.products.along import space_of
from invfunc.products.given import Given
from invfunc.products.product import Linearised, Product
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
        sums = _Sums(self.product, self.feed, params, loader, kwargs)
        found = sums(space.leaves(v, self.vector, self.lead), self.lead)
        return space.tree(found), sums.aux

    def _linearized(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        if len(args) != 2:
            raise ArgumentTypeError(f"it takes the parameters and a loader, and got {len(args)} positional arguments.")
        check_loader(args[1], sweeps="it is gone through for every vector")
        space = space_of(args, names)
        sums = _Sums(self.product, self.feed, *args, kwargs)
        shown = f"{self!r}.linearize({', '.join(names)})"
        return Linearised(shown, sums, space, space, self.vector, self.lead, (args, kwargs)), []


class _Sums:
    """The linear map of a data set: the loader is gone through for each vector, or for several at once."""

    def __init__(self, product: Product, feed: Feed, params: Any, loader: Any, kwargs: dict[str, Any]) -> None:
        self.product, self.feed, self.params, self.loader, self.kwargs = product, feed, params, loader, kwargs
        self.key = None if product.drawing is None else key_of(product.drawing.generator)
        self.n: int | None = None
        """How many samples there were the first time."""
        self.apart = False
        """Whether f has been seen to keep samples apart."""
        self.aux: list[Any] = []

    @torch.no_grad()
    def __call__(self, vectors: list[torch.Tensor], lead: int = 0) -> list[torch.Tensor]:
        check_loader(self.loader)
        wide = [torch.promote_types(x.dtype, torch.float32) for x in vectors]
        sums = [torch.zeros_like(x, dtype=to) for x, to in zip(vectors, wide, strict=True)]
        weights, self.aux = Weights(), []

        def visit(args: tuple, first: int) -> int:
            product = self._behind(first)
            of_batch = partial(self._of_batch, product, vectors)
            (given, found), aux = product.told(of_batch, product.names_of_f, args, self.kwargs)
            by = self._weight(given, weights) ** product.degree
            for total, x in zip(sums, found, strict=True):
                total.add_(x, alpha=by)
            self.aux.append(aux)
            return given.n

        n = swept(self.loader, self.params, self.product.in_dims, visit, self.feed)
        if self.n not in (None, n):
            raise ArgumentError(
                f"the loader gave {n} samples, and {self.n} for the first vector; a matrix is that of the same ones."
            )
        self.n = n
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

    @staticmethod
    def _weight(given: Given, weights: Weights) -> int:
        """What the loss of a batch has to be multiplied with so that it is a sum over its samples."""
        if given.losses.ndim:
            return 1
        if given.loss is None:
            raise unscaled()
        return weights.of(given.loss_part)
