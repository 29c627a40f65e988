"""Products of the samples of all batches, of one process or of several."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from invfunc import tree
from invfunc.data_sets.part import PARAMETERS, Asked, Begun, ProcessPart
from invfunc.evaluation.rounds import parts
from invfunc.products.product import Linearised, OfAll, SummedProduct, space_of
from invfunc.products.streamed import DataSetMap, Evaluated, check_linearized, identity_of, keys_of


@dataclass(frozen=True, repr=False)
class StreamedProduct(SummedProduct):
    """A function `(params, v, loader) -> tree like params`, the sum of a product over batches, and over processes."""

    part: ProcessPart
    plans: Evaluated | None = None
    """Evaluates the product of a batch, if it is `compiled`."""

    def __repr__(self) -> str:
        return self.part.shown(self.plans or self.product)

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
        begun, sums, space = self._begun(
            args, (*PARAMETERS, self.vector), kwargs, names, lambda: identity_of(self.product, args[0], args[1], kwargs)
        )
        leaves = space.leaves(args[1], self.vector, self.lead)
        with begun.course as course:
            found = self._parts(sums(leaves, course, self.lead, begun.told), args[0], self.lead)
            return space.tree(found), self._aux(sums)

    def _linearized(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        check_linearized(self.part.file)
        begun, sums, space = self._begun(args, PARAMETERS, kwargs, names, again="it is gone through for every vector")
        shown = f"{self!r}.linearize({', '.join(names)})"

        def at(vectors: list[torch.Tensor], lead: int) -> list[torch.Tensor]:
            if begun.rounds is None or not lead:
                return self._parts(sums.along(vectors, lead), args[0], lead)
            each = [sums.along([*one], 0) for one in zip(*vectors, strict=True)]
            return self._parts([torch.stack(x) for x in zip(*each, strict=True)], args[0], lead)

        return Linearised(shown, at, space, space, self.vector, self.lead, (args, kwargs)), []

    @staticmethod
    def _parts(found: list[torch.Tensor], params: Any, lead: int) -> list[torch.Tensor]:
        """A product laid out as the parameters are."""
        return parts(found, tree.tensors((params,)), lead)

    def _begun(
        self,
        args: tuple,
        own: tuple[str, ...],
        kwargs: dict[str, Any],
        names: Any,
        identity: Callable[[], dict[str, str]] = dict,
        again: str = "",
    ) -> tuple[Begun, DataSetMap, OfAll]:
        """The beginning of all processes, the linear map, and the space of its vectors."""
        alike, keys = {"the product": f"{self.product!r} {self.product.degree}"}, keys_of(self.product)
        whole = bool(self.lead) or self.plans is not None
        begun = self.part.begun(Asked(args, own, names, alike, keys, identity, again, whole=whole))
        keys, p = begun.course.record.keys, begun.processes
        divided = None if begun.rounds is None else (begun.rounds, tree.tensors((begun.params,)))
        sums = DataSetMap(
            self.product,
            kwargs,
            begun.batches,
            keys,
            p,
            begun.before,
            begun.counted,
            self.plans,
            divided,
            self.part.reduction,
        )
        return begun, sums, OfAll(**vars(space_of(args[:1], names)), processes=p, rounds=begun.rounds)

    def _aux(self, sums: DataSetMap) -> Any:
        return sums.aux if self.part.feed is not None else sums.aux[0] if sums.aux else None
