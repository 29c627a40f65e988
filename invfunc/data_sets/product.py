"""Products of the samples of all batches, of one process or of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc.data_sets.visits import PARAMETERS, Begun, ProcessPart, VisitWork, identity_of
from invfunc.errors import ArgumentError
from invfunc.evaluation.processes import described, parts
from invfunc.plans.batches import PlansOfBatches
from invfunc.products.product import Linearised, OfAll, Product, WithVector, space_of
from invfunc.transform import Transform


@dataclass(frozen=True, repr=False)
class StreamedProduct(Transform):
    """A function `(params, v, loader) -> tree like params`, the sum of a product over batches, and over processes."""

    product: Product
    part: ProcessPart
    plans: PlansOfBatches | None = None
    """Evaluates the product of a batch, if it is `compiled`."""
    outermost = True

    def __repr__(self) -> str:
        return self.part.shown(self.plans or self.product)

    @property
    def has_aux(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.product.has_aux

    @property
    def vector(self) -> str:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.product.vector

    @property
    def lead(self) -> int:
        return self.product.lead

    def names(self, count: int) -> Any:
        return self.part.names(["params", self.vector], self.product.names(count), count)

    def names_of_f(self, count: int) -> Any:
        """Names of so many arguments that are all but the vector."""
        return self.part.names(["params"], self.product.names_of_f(count), count)

    def linearize(self, *args: Any, **kwargs: Any) -> Any:
        """The product at some parameters and data, `(params, loader) -> (v -> product)`, of the same draws for all v.

        The loader is gone through for each v. With `has_aux`, the pair of that function and of an empty list, as there
        was no batch yet. Of several processes, all have to call it, and what it returns, with the same vectors in the
        same order.
        """
        return self.run(self._linearized, self.names_of_f, args, kwargs, ".linearize")

    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        said = options_of(self.product)
        identity = partial(identity_of, {"the product": said}, kwargs, {"params": args[0], self.vector: args[1]})
        begun, space = self._begun(args, (*PARAMETERS, self.vector), names, identity)
        leaves = space.leaves(args[1], self.vector, self.lead)
        with begun.course:
            found, aux = self._along(begun, kwargs, leaves, self.lead).done()
            found = space.tree(parts(tree.tensors((found,)), tree.tensors(args[:1]), self.lead))
        return found, aux if self.part.feed is not None else aux[0] if aux else None

    def _linearized(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        if self.part.file is not None:
            raise ArgumentError(
                f"checkpoint={str(self.part.file.path)!r} belongs to one product, but a linearisation gives many: a "
                "call that starts again starts with its first vector, which may not be that of the file. Leave "
                "checkpoint out, or compute each product in a call with a file of its own: "
                "streamed(t, checkpoint=file)(params, v, loader)."
            )
        begun, space = self._begun(args, PARAMETERS, names, again="it is gone through for every vector")
        shown, known = f"{self!r}.linearize({', '.join(names)})", list[int]()

        def at(vectors: list[torch.Tensor], lead: int) -> list[torch.Tensor]:
            work = self._along(begun, kwargs, vectors, lead, *known)
            found, _ = work.done()
            known[:] = [work.seen]
            return parts(tree.tensors((found,)), tree.tensors(args[:1]), lead)

        return Linearised(shown, at, space, space, self.vector, self.lead, (args, kwargs)), []

    def _begun(
        self,
        args: tuple,
        own: tuple[str, ...],
        names: Any,
        identity: Callable[[], dict[str, str]] = dict,
        again: str = "",
    ) -> tuple[Begun, OfAll]:
        """Facts before the first batch is seen, and the space of the vectors."""
        product = self.product
        alike = {"the product": f"{product!r} {product.degree}"}
        begun = self.part.begun(WithVector(product, [], 0), args, own, names, alike, identity, again)
        return begun, OfAll(**vars(space_of(args[:1], names)), processes=begun.processes)

    def _along(
        self, begun: Begun, kwargs: dict[str, Any], vectors: list[torch.Tensor], lead: int, *known: int
    ) -> VisitWork:
        """Work that adds up the products of all batches with a vector, or with several."""
        t = WithVector(self.product, vectors, lead)
        return VisitWork(t, kwargs, begun, self.plans, self.part.reduction, *known)


def options_of(product: Product) -> str:
    """A text that tells a product from others, in every process."""
    drawn = product.drawing and (product.drawing.count, product.drawing.sample)
    return f"{described(product)} {described([product.degree, drawn, product.in_dims, product.out_dims])}"
