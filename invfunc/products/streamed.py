"""Sums of the products of batches, as a linear map of vectors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from invfunc.errors import ArgumentError
from invfunc.evaluation.batches import Batches, no_samples, not_scalar
from invfunc.evaluation.checkpoint import Checkpoint, Course, Record, State, check_loadable, described, named
from invfunc.evaluation.processes import ALONE, Processes, bits, same
from invfunc.evaluation.rounds import Rounds
from invfunc.evaluation.sweep import one_scale
from invfunc.evaluation.weights import BatchWeights
from invfunc.loss.drawn import key_of
from invfunc.products.given import ProductArguments
from invfunc.products.maps import Vectors
from invfunc.products.product import Product
from invfunc.reductions import Reduction
from invfunc.reductions.exchange import Exchange, Sums


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


def evaluated(
    product: Product, vectors: list[torch.Tensor], lead: int, args: tuple, kwargs: dict[str, Any], names: Any
) -> tuple[ProductArguments, list[torch.Tensor], Any]:
    """The arguments with a batch, the product with it, and aux."""
    given, _ = product.given(args, kwargs, names)
    return given, *product.directly(given, vectors, lead)


Evaluated = Callable[[Product, list[torch.Tensor], int, tuple, dict[str, Any], Any], tuple[ProductArguments, list, Any]]


Done = Callable[[str, Callable[[], list[torch.Tensor]]], list[torch.Tensor]]
"""Does a named step, behind which no file is needed any more."""


def _done(at: str, step: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    return step()


class DataSetMap:
    """The linear map of a data set: its batches are gone through for each vector, or for several at once."""

    def __init__(
        self,
        product: Product,
        kwargs: dict[str, Any],
        batches: Batches,
        keys: list[int],
        processes: Processes = ALONE,
        before: int = 0,
        counted: int | None = None,
        plans: Evaluated | None = None,
        divided: tuple[Rounds, list[torch.Tensor]] | None = None,
        reduction: str | None = None,
    ) -> None:
        """`keys` are those of drawn columns; `processes` before this one have so many samples, and all `counted`;
        `divided` is what brings parameters that are, and all parameters."""
        self.product, self.kwargs, self.batches, self.keys = product, kwargs, batches, keys
        self.evaluated, self.reduction = plans or evaluated, reduction
        self.processes, self.before, self.divided = processes, before, divided
        self.n = counted
        """The number of samples the first time."""
        self.apart = False
        """True if f has been seen to keep samples apart."""
        self.aux: list[Any] = []

    def along(self, vectors: list[torch.Tensor], lead: int) -> list[torch.Tensor]:
        """The products with one of many vectors, or with several."""
        return self(vectors, Course(Record({}, self.keys)), lead)

    @torch.no_grad()
    def __call__(
        self, vectors: list[torch.Tensor], course: Course, lead: int, done: Done = _done
    ) -> list[torch.Tensor]:
        through = partial(course.through, self.batches)
        rounds, leaves = self.divided or (None, vectors)
        parts = None if rounds is None else InParts(rounds, takes=not course.keeps)
        work = BatchProducts(
            self, vectors, lead, [i for i, p in enumerate(leaves) if not (parts and parts.takes_at(p))], parts
        )

        def seen() -> tuple[None, tuple[int, bool | None, dict[str, str]]]:
            course.begin(work)
            through() if rounds is None else rounds.through(through)
            return None, (work.n, work.weights.seen, bits(self.product.vector, vectors))

        _, each = self.processes.told("samples", seen)
        n, self.aux = sum(own for own, _, _ in each), work.aux
        same([vector for _, _, vector in each])  # their products are added
        if not n:
            raise no_samples()
        if self.n not in (None, n):
            raise ArgumentError(f"the loader gave {n} samples, and {self.n} before; a matrix is that of the same ones.")
        self.n = n
        one_scale(work.weights, self.processes, [mean for _, mean, _ in each])
        sums = self.processes.exchanged([_summed(work.sums)])[0]
        if parts is not None:
            sums = parts.joined(leaves, sums)
        by = n**-self.product.degree if work.weights.mean else 1
        return done("result", lambda: [(by * total).to(x.dtype) for total, x in zip(sums, vectors, strict=True)])

    def behind(self, n: int) -> Product:
        """The product of a batch behind so many samples of this process."""
        drawing = self.product.drawing
        if drawing is None:
            return self.product
        return replace(self.product, drawing=replace(drawing, key=self.keys[0], first=self.before + n))


class BatchProducts:
    """Adds up the products of the batches with some vectors."""

    phase = 0

    def __init__(
        self, of: DataSetMap, vectors: list[torch.Tensor], lead: int, places: list[int], parts: InParts | None = None
    ) -> None:
        """At these places sums are kept here, at others by `parts`."""
        self.of, self.vectors, self.lead, self.weights = of, vectors, lead, BatchWeights(of.reduction)
        self.places, self.parts = places, parts
        own = [vectors[i] for i in places]
        self.sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in own]
        self.n = 0
        self.aux: list[Any] = []
        self.weighed = False

    def visit(self, args: tuple, n: int) -> int:
        (given, found), aux = self._of_batch(args, n)
        by = self._weight(given) ** self.of.product.degree
        own = [found[i] for i in self.places]
        self.sums = [torch.add(total, x, alpha=by) for total, x in zip(self.sums, own, strict=True)]
        self.n += given.n
        self.aux.append(aux if self.parts is None else self.parts.rounds.present(aux))
        return given.n

    def _of_batch(self, args: tuple, n: int) -> tuple[tuple[ProductArguments, list[torch.Tensor]], Any]:
        """The arguments behind n samples, and the product with it; aux."""
        product = self.of.behind(n)

        def compute(
            args: tuple, kwargs: dict[str, Any], names: Any
        ) -> tuple[tuple[ProductArguments, list[torch.Tensor]], Any]:
            evaluated = self.of.evaluated if self.parts is None else partial(self._in_parts, self.parts)
            given, found, aux = evaluated(product, self.vectors, self.lead, args, kwargs, names)
            if not self.of.apart and given.n > 1:
                self.of.apart = given.check_apart()
            return (given, found), aux

        return product.told(compute, product.names_of_f, args, self.of.kwargs)

    def _in_parts(
        self,
        parts: InParts,
        product: Product,
        vectors: list[torch.Tensor],
        lead: int,
        args: tuple,
        kwargs: dict[str, Any],
        names: Any,
    ) -> tuple[ProductArguments, list[torch.Tensor], Any]:
        """The arguments, the product of one vector but for what `parts` take of it, and aux."""
        given, _ = product.given(args, kwargs, names)
        given.scope.parts = parts
        linear, aux = product.recorded(given)
        parts.weight = self._weight(given) ** product.degree
        found = linear.taken(vectors)
        return (
            given,
            [v.new_zeros(()).expand_as(v) if x is None else x for x, v in zip(found, vectors, strict=True)],
            aux,
        )

    def _weight(self, given: ProductArguments) -> int:
        """The factor by which the loss of a batch is a sum over its samples."""
        if given.losses.ndim:
            if self.weights.reduction is not None:
                raise not_scalar(self.weights.reduction)
            return 1
        return self.weights.of_batch(None if given.loss is None else given.loss_part, given.n)

    # In a checkpoint

    def state(self) -> State:
        kept = {"sums": self.sums, "n": self.n, "weighed": self.weights.first is not None}
        count = len(self.aux)
        if self.of.product.has_aux:
            check_loadable("aux", self.aux[-1:])
        return lambda: {**kept, "aux": self.aux[:count]}

    def resume(self, state: dict[str, Any]) -> None:
        self.sums, self.n, self.weighed, self.aux = (state[name] for name in ("sums", "n", "weighed", "aux"))

    def weigh(self, args: tuple) -> None:
        if self.weighed and self.weights.first is None:
            (given, _), _ = self._of_batch(args, 0)
            self._weight(given)


def keys_of(product: Product) -> list[int]:
    """The key of what a product draws for each sample, if it does."""
    return [] if product.drawing is None else [key_of(product.drawing.generator)]


def options_of(product: Product) -> str:
    """A text that tells a product from others, in every process."""
    drawn = product.drawing and (product.drawing.count, product.drawing.sample)
    return f"{described(product)} {described([product.degree, drawn, product.in_dims, product.out_dims])}"


def identity_of(product: Product, params: Any, v: Any, kwargs: dict[str, Any]) -> dict[str, str]:
    """The parts of a call that it has to share with one before that it goes on from, beside its batches."""
    given = {"the product": options_of(product), "keyword arguments": described(kwargs)}
    return {**given, **named("params", params), **named(product.vector, v)}


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
