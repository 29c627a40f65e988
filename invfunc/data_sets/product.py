"""Products of the samples of all batches, of one process or of several."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from invfunc import tree
from invfunc.data_sets.part import PARAMETERS, Begun, ProcessPart
from invfunc.errors import ArgumentError
from invfunc.evaluation.batches import no_samples
from invfunc.evaluation.checkpoint import Checkpoint, StreamWork, described, named
from invfunc.evaluation.processes import bits, same
from invfunc.evaluation.rounds import Rounds, parts
from invfunc.evaluation.sweep import one_scale
from invfunc.evaluation.weights import BatchWeights
from invfunc.loss.drawn import key_of
from invfunc.plans.batches import PlansOfProducts, product_of_batch
from invfunc.products.given import ProductArguments
from invfunc.products.maps import Vectors
from invfunc.products.product import Linearised, OfAll, Product, space_of
from invfunc.reductions import Reduction
from invfunc.reductions.exchange import Exchange, Sums
from invfunc.transform import Transform

Found = tuple[ProductArguments, list[torch.Tensor], Any]
"""The arguments with a batch, the product with it, and aux."""


@dataclass(frozen=True, repr=False)
class StreamedProduct(Transform):
    """A function `(params, v, loader) -> tree like params`, the sum of a product over batches, and over processes."""

    product: Product
    part: ProcessPart
    plans: PlansOfProducts | None = None
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
        own, identity = (*PARAMETERS, self.vector), partial(identity_of, self.product, args[:2], kwargs)
        sums, space = self._begun(args, own, kwargs, names, identity)
        leaves = space.leaves(args[1], self.vector, self.lead)
        with sums.begun.course:
            found = space.tree(self._parts(sums.along(leaves, self.lead), args[0], self.lead))
        return found, sums.aux if self.part.feed is not None else sums.aux[0] if sums.aux else None

    def _linearized(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        check_linearized(self.part.file)
        sums, space = self._begun(args, PARAMETERS, kwargs, names, again="it is gone through for every vector")
        shown = f"{self!r}.linearize({', '.join(names)})"

        def at(vectors: list[torch.Tensor], lead: int) -> list[torch.Tensor]:
            if sums.begun.rounds is None or not lead:
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
    ) -> tuple[SumOfProducts, OfAll]:
        """The linear map, before the first batch is seen, and the space of its vectors."""
        product = self.product
        alike = {"the product": f"{product!r} {product.degree}"}
        keys = [] if product.drawing is None else [key_of(product.drawing.generator)]
        whole = bool(self.lead) or self.plans is not None
        begun = self.part.begun(args, own, names, alike, keys, identity, again, whole_first=whole)
        space = OfAll(**vars(space_of(args[:1], names)), processes=begun.processes, rounds=begun.rounds)
        return SumOfProducts(product, kwargs, begun, self.plans, self.part.reduction), space


class SumOfProducts(StreamWork):
    """The linear map of a data set, the sum of the products of its batches, which are gone through for each vector, or
    for several at once."""

    vectors: list[torch.Tensor]
    sums: list[torch.Tensor]
    """Those of the parameters at `places`; of the others, `parts` takes them."""
    places: list[int]
    lead: int
    n: int
    """Number of samples that were seen."""

    def __init__(
        self,
        product: Product,
        kwargs: dict[str, Any],
        begun: Begun,
        plans: PlansOfProducts | None,
        reduction: str | None,
    ) -> None:
        self.product, self.kwargs, self.begun, self.reduction = product, kwargs, begun, reduction
        rounds, takes = begun.rounds, not begun.course.keeps
        self.leaves = None if rounds is None else tree.tensors((begun.params,))
        self.parts = None if rounds is None else InParts(rounds, takes)
        self.plans = plans
        self.expected = begun.counted
        """The number of samples the first time."""
        self.apart, self.has_aux, self.loss = False, product.has_aux, product.loss
        """True if f has been seen to keep samples apart."""
        self.aux: list[Any] = []

    @torch.no_grad()
    def along(self, vectors: list[torch.Tensor], lead: int) -> list[torch.Tensor]:
        """The products with a vector, or with several."""
        work = copy(self)  # others may go on at once
        found = work._along(vectors, lead)
        self.expected, self.apart, self.aux = work.n, work.apart, work.aux
        return found

    def _along(self, vectors: list[torch.Tensor], lead: int) -> list[torch.Tensor]:
        begun, parts, leaves = self.begun, self.parts, self.leaves or vectors
        self.vectors, self.lead, self.n, self.aux = vectors, lead, 0, []
        self.weights = BatchWeights(self.reduction)
        self.places = [i for i, p in enumerate(leaves) if not (parts and parts.takes_at(p))]
        own = [vectors[i] for i in self.places]
        self.sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in own]

        def seen() -> tuple[None, tuple[int, bool | None, dict[str, str]]]:
            begun.course.begin(self)
            begun.through()
            return None, (self.n, self.weights.seen, bits(self.product.vector, vectors))

        _, each = begun.processes.told("samples", seen)
        self.n = sum(own for own, _, _ in each)
        same([vector for _, _, vector in each])  # their products are added
        if not self.n:
            raise no_samples()
        if self.expected not in (None, self.n):
            raise ArgumentError(
                f"the loader gave {self.n} samples, and {self.expected} before; a matrix needs the same ones."
            )
        one_scale(self.weights, begun.processes, [mean for _, mean, _ in each])
        sums = begun.processes.exchanged([_summed(self.sums)])[0]
        if parts is not None:
            sums = parts.joined(leaves, sums)
        by = self.n**-self.product.degree if self.weights.mean else 1
        return begun.told("result", lambda: [(by * x).to(v.dtype) for x, v in zip(sums, vectors, strict=True)])

    def visit(self, args: tuple, n: int) -> int:
        given, found, aux = self._of_batch(args, n)
        by = self._weight(given) ** self.product.degree
        own = [found[i] for i in self.places]
        self.sums = [torch.add(total, x, alpha=by) for total, x in zip(self.sums, own, strict=True)]
        self.n += given.n
        self.aux.append(aux if self.parts is None else self.parts.rounds.present(aux))
        return given.n

    def _of_batch(self, args: tuple, n: int) -> Found:
        """The product of a batch behind n samples of this process."""
        product = self.product
        if (drawing := product.drawing) is not None:
            (key,), first = self.begun.course.record.keys, self.begun.before + n
            product = replace(product, drawing=replace(drawing, key=key, first=first))

        evaluated = self.plans or (product_of_batch if self.parts is None else partial(self._in_parts, self.parts))

        def compute(args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Found, None]:
            given, found, aux = evaluated(product, self.vectors, self.lead, args, kwargs, names)
            if not self.apart and given.n > 1:
                self.apart = given.check_apart()
            return (given, found, aux), None

        return product.told(compute, product.names_of_f, args, self.kwargs)[0]

    def _in_parts(
        self,
        parts: InParts,
        product: Product,
        vectors: list[torch.Tensor],
        lead: int,
        args: tuple,
        kwargs: dict[str, Any],
        names: Any,
    ) -> Found:
        """The arguments, the product of one vector but for what `parts` take of it, and aux."""
        given, _ = product.given(args, kwargs, names)
        given.scope.parts = parts
        linear, aux = product.recorded(given)
        parts.weight = self._weight(given) ** product.degree
        pairs = zip(linear.taken(vectors), vectors, strict=True)
        return given, [v.new_zeros(()).expand_as(v) if x is None else x for x, v in pairs], aux

    def _weight(self, given: ProductArguments) -> int:
        """The factor by which the loss of a batch is a sum over its samples."""
        scalar = not given.losses.ndim
        return self.weights.of_batch(given.loss_part if scalar and given.loss is not None else None, given.n, scalar)

    # In a checkpoint

    def kept(self) -> dict[str, Any]:
        return {"sums": self.sums, "n": self.n}

    def keep(self, kept: dict[str, Any]) -> None:
        self.sums, self.n = kept["sums"], kept["n"]


class Summed(Reduction):
    """A reduction that keeps the sum of the products of a parameter."""

    entrywise = True


class InParts:
    """Takes what is pulled back to parameters that are nowhere as a whole: it is added up, and each process keeps its
    part."""

    def __init__(self, rounds: Rounds, takes: bool) -> None:
        """Without `takes`, products are pulled back as a whole, as they are wanted in one file."""
        self.rounds, self.takes, self.weight = rounds, takes, 1
        """With what products are multiplied."""
        rounds.reductions = [Summed()]

    def takes_at(self, leaf: torch.Tensor) -> bool:
        """True if the product with a parameter is taken."""
        return self.takes and self.rounds.place_of(leaf) is not None

    def through(self, inputs: Sequence[Any], graph: bool, pull: Callable[[], Vectors]) -> Vectors:
        own = [graph and self.rounds.place_of(x) is not None or self.takes_at(x) for x in inputs]
        arrived = _Blank.apply if graph else self._take
        handles = [
            x.register_hook(partial(arrived, x.detach())) for x, of_own in zip(inputs, own, strict=True) if of_own
        ]
        try:
            found = pull()
        finally:
            for handle in handles:
                handle.remove()
        return found if graph else [None if of_own else x for x, of_own in zip(found, own, strict=True)]

    def joined(self, leaves: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The sums at all parameters: the parts of this process, and, in their order, the `others`."""
        kept, left = self.rounds.kept(0).get(0, {}), iter(others)

        def one(leaf: torch.Tensor) -> torch.Tensor:
            place = self.rounds.place_of(leaf) if self.takes else None
            if place is None:
                return next(left)
            return kept[place][0] if place in kept else torch.zeros_like(self.rounds.own[place].to_local())

        return [*map(one, leaves)]

    def _take(self, leaf: torch.Tensor, product: torch.Tensor) -> torch.Tensor:
        place = self.rounds.place_of(leaf)
        assert place is not None
        wide = product.to(torch.promote_types(product.dtype, torch.float32))
        self.rounds.keep(0, place, leaf, (wide if self.weight == 1 else self.weight * wide,), 0)
        return leaf.detach()


class _Blank(torch.autograd.Function):
    """A gradient of which the graph alone is wanted: a tensor without numbers is in its place."""

    @staticmethod
    def forward(ctx: Any, leaf: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
        return leaf.detach()

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor) -> tuple:
        return None, cotangents[0]


def options_of(product: Product) -> str:
    """A text that tells a product from others, in every process."""
    drawn = product.drawing and (product.drawing.count, product.drawing.sample)
    return f"{described(product)} {described([product.degree, drawn, product.in_dims, product.out_dims])}"


def identity_of(product: Product, given: tuple, kwargs: dict[str, Any]) -> dict[str, str]:
    """The parts of a call, with its parameters and vector, that it has to share with one before that it goes on from,
    beside its batches."""
    (params, v), own = given, {"the product": options_of(product), "keyword arguments": described(kwargs)}
    return {**own, **named("params", params), **named(product.vector, v)}


def check_linearized(file: Checkpoint | None) -> None:
    """Check that there is no file, which would be of another vector than the first one that comes again."""
    if file is not None:
        raise ArgumentError(
            f"checkpoint={str(file.path)!r} belongs to one product, but a linearisation gives many: a call that starts "
            "again starts with its first vector, which may not be that of the file. Leave checkpoint out, or compute "
            "each product in a call with a file of its own: streamed(t, checkpoint=file)(params, v, loader)."
        )


def _summed(tensors: list[torch.Tensor]) -> Exchange:
    return tuple((yield Sums(tensors)))
