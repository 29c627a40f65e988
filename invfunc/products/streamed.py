"""A product with the matrix of a data set, which comes batch by batch."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.evaluation.across import one_scale
from invfunc.evaluation.batches import Batches, Feed, batches_of, check_loader, no_samples, unscaled
from invfunc.evaluation.checkpoint import Checkpoint, Record, State, check_loadable
from invfunc.evaluation.course import Course, course_of
from invfunc.evaluation.fingerprint import described, named
from invfunc.evaluation.processes import ALONE, Processes, bits, same
from invfunc.evaluation.rounds import Rounds
from invfunc.evaluation.weights import Weights
from invfunc.loss.drawn import key_of
from invfunc.products.along import space_of
from invfunc.products.given import Given
from invfunc.products.in_parts import InParts
from invfunc.products.product import Linearised, Product, SummedProduct
from invfunc.reductions.exchange import Exchange
from invfunc.reductions.exchange import Sums as OfAll


def evaluated(
    product: Product, vectors: list[torch.Tensor], lead: int, args: tuple, kwargs: dict[str, Any], names: Any
) -> tuple[Given, list[torch.Tensor], Any]:
    """What is given with a batch, the product with it, and aux."""
    given, _ = product.given(args, kwargs, names)
    return given, *product.directly(given, vectors, lead)


Evaluated = Callable[[Product, list[torch.Tensor], int, tuple, dict[str, Any], Any], tuple[Given, list, Any]]


@dataclass(frozen=True, repr=False)
class StreamedProduct(SummedProduct):
    """A function `(params, v, loader) -> tree like params`, the sum of a product over the batches."""

    feed: Feed = Feed()
    checkpoint: Checkpoint | None = None
    plans: Evaluated | None = None
    """What evaluates the product of a batch, if it is `compiled`."""

    def __repr__(self) -> str:
        return f"streamed({self.plans or self.product!r})"

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
        leaves = space.leaves(v, self.vector, self.lead)
        identity = partial(identity_of, self.product, params, v, kwargs)
        with course_of(self.checkpoint, identity, keys_of(self.product), self.feed.goal(params)) as course:
            sums = Sums(self.product, kwargs, self._batches(params, loader), course.record.keys, plans=self.plans)
            return space.tree(sums(leaves, course, self.lead)), sums.aux

    def _linearized(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        if len(args) != 2:
            raise ArgumentTypeError(f"it takes the parameters and a loader, and got {len(args)} positional arguments.")
        check_linearized(self.checkpoint)
        check_loader(args[1], sweeps="it is gone through for every vector")
        space = space_of(args, names)
        sums = Sums(self.product, kwargs, self._batches(*args), keys_of(self.product), plans=self.plans)
        shown = f"{self!r}.linearize({', '.join(names)})"
        return Linearised(shown, sums.along, space, space, self.vector, self.lead, (args, kwargs)), []

    def _batches(self, params: Any, loader: Any) -> Batches:
        return batches_of(loader, params, self.product.in_dims, self.feed)


Done = Callable[[str, Callable[[], list[torch.Tensor]]], list[torch.Tensor]]
"""Does a named step, behind which no file is needed any more."""


def _done(at: str, step: Callable[[], list[torch.Tensor]]) -> list[torch.Tensor]:
    return step()


class Sums:
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
    ) -> None:
        """`keys` are those of drawn columns; `processes` before this one have so many samples, and all `counted`;
        `divided` is what brings parameters that are, and all parameters."""
        self.product, self.kwargs, self.batches, self.keys = product, kwargs, batches, keys
        self.evaluated = plans or evaluated
        self.processes, self.before, self.divided = processes, before, divided
        self.n = counted
        """How many samples there were the first time."""
        self.apart = False
        """Whether f has been seen to keep samples apart."""
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
        work = Products(
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


class Products:
    """Adds up the products of the batches with some vectors."""

    phase = 0

    def __init__(
        self, of: Sums, vectors: list[torch.Tensor], lead: int, places: list[int], parts: InParts | None = None
    ) -> None:
        """At these places sums are kept here, at others by `parts`."""
        self.of, self.vectors, self.lead, self.weights = of, vectors, lead, Weights()
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

    def _of_batch(self, args: tuple, n: int) -> tuple[tuple[Given, list[torch.Tensor]], Any]:
        """What is given behind n samples, and the product with it; aux."""
        product = self.of.behind(n)

        def compute(args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[tuple[Given, list[torch.Tensor]], Any]:
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
    ) -> tuple[Given, list[torch.Tensor], Any]:
        """What is given, the product of one vector but for what `parts` take of it, and aux."""
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

    def _weight(self, given: Given) -> int:
        """What the loss of a batch has to be multiplied with so that it is a sum over its samples."""
        if given.losses.ndim:
            return 1
        if given.loss is None:
            raise unscaled(given.n)
        return self.weights.of(given.loss_part)

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
    """What tells a product from others, in every process."""
    drawn = product.drawing and (product.drawing.count, product.drawing.sample)
    return f"{described(product)} {described([product.degree, drawn, product.in_dims, product.out_dims])}"


def identity_of(product: Product, params: Any, v: Any, kwargs: dict[str, Any]) -> dict[str, str]:
    """What a call has to have like one before that it goes on from, beside its batches."""
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
    return tuple((yield OfAll(tensors)))
