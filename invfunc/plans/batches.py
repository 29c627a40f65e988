"""Plans of the batches of a data set: of what each brings to a statistic, or adds to a product."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from invfunc import tree
from invfunc.evaluation.batches import size_of
from invfunc.evaluation.brought import bring, brought
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.sweep import Sweep
from invfunc.loss.drawn import seeded
from invfunc.plans.calls import Calls
from invfunc.products.given import Given
from invfunc.products.product import Product
from invfunc.products.streamed import evaluated
from invfunc.reductions.quantity import Drawing
from invfunc.statistic import Statistic

Each = tuple[torch.Generator, ...]
"""The generators of the samples of a batch."""


@dataclass
class Pools:
    """Generators for the samples of a batch, which are the same ones for the next batch: a plan draws from them.

    A call has a pool by itself, so that several threads do not seed each other's.
    """

    free: list[dict[tuple[int, torch.device], list[torch.Generator]]] = field(default_factory=list)

    @contextmanager
    def seeded(self, drawings: Iterable[Drawing], n: int) -> Iterator[list[Each]]:
        """For each drawing, those of n samples at its place in the data set."""
        pool, found = self.free.pop() if self.free else {}, list[Each]()
        for k, d in enumerate(drawings):
            device = d.generator.device
            own = pool.setdefault((k, device), [])
            own += [torch.Generator(device) for _ in range(n - len(own))]
            assert d.key is not None
            found.append(tuple(seeded(own[:n], d.key, d.first)))
        yield found
        self.free.append(pool)


class Plans(ABC):
    """Evaluates batches, each by the plan of those of its shape."""

    def __init__(self, t: Any, calls: Calls) -> None:
        """`calls` are those of t alone."""
        self.t, self.pools = t, Pools()
        self.calls = Calls(self.step(t), calls.called, calls.backend)

    @staticmethod
    @abstractmethod
    def step(t: Any) -> Callable[..., Any]:
        """What is done with a batch, as a function of tensors."""

    def __repr__(self) -> str:
        return self.calls.called

    def __reduce__(self) -> tuple:
        return type(self), (self.t, self.calls)

    @abstractmethod
    def __call__(self, *args: Any) -> Any:
        """What evaluates a batch in place of the statistic or the product itself."""


def _apart(d: Drawing) -> Drawing:
    """A drawing by a generator that nobody draws from: those of the samples are there, and the caller's may go on."""
    return replace(d, generator=torch.Generator(d.generator.device))


@dataclass(frozen=True, eq=False)
class StatisticOfBatch:
    """What a batch brings to a statistic in a phase of which something is known, by generators of its samples."""

    t: Statistic

    def __call__(self, phase: int, known: list[list[Any]], each: list[Each], args: tuple, kwargs: dict) -> Any:
        sources = dict(zip(dict.fromkeys(self.t.drawings), each, strict=True))
        t = self.t.drawn_by(lambda d: replace(d, each=sources[d]))
        engine = t.engine(args, kwargs, t.names(len(args)))
        engine.fold.phase = phase
        for of_all, learned in zip(engine.fold.accumulators, known, strict=True) if known else ():
            for part, own in zip(of_all.line, learned, strict=True):
                if own is not None:
                    part.know(own)
        return brought(engine, phase)


class PlansOfBatches(Plans):
    """Of a statistic."""

    @staticmethod
    def step(t: Statistic) -> StatisticOfBatch:
        own = {d: _apart(d) for d in t.drawings}
        return StatisticOfBatch(t.drawn_by(own.__getitem__))

    def __call__(self, t: Statistic, sweep: Sweep, args: tuple, kwargs: dict[str, Any], engine: Engine) -> Any:
        """Have an evaluation of a batch keep what it brings; aux."""
        engine.check_joined()
        with self.pools.seeded(dict.fromkeys(t.drawings), engine.problem.n) as each:
            found = self.calls((sweep.phase, sweep.known, each, args, kwargs), {})
        return bring(engine, sweep.phase, found)

    def explained(self, t: Statistic, args: tuple, kwargs: dict[str, Any]) -> tuple[str, str]:
        """What is said of the plan of a batch, and its operations."""
        t = t.keyed(dict.fromkeys(t.drawings, 0), 0)
        with self.pools.seeded(dict.fromkeys(t.drawings), size_of(args, t.in_dims)) as each:
            return self.calls.explained((0, [], each, args, kwargs), {})


@dataclass(frozen=True, eq=False)
class ProductOfBatch:
    """The product of a batch with some vectors, what f and the loss return, and aux."""

    product: Product

    def __call__(self, vectors: list, lead: int, each: list[Each], args: tuple, kwargs: dict) -> Any:
        product = self.product
        if product.drawing is not None:
            product = replace(product, drawing=replace(product.drawing, each=each[0]))
        given, found, aux = evaluated(product, vectors, lead, args, kwargs, product.names_of_f(len(args)))
        return found, tree.map_tensors(torch.Tensor.detach, (given.result, given.losses)), aux


class PlansOfProducts(Plans):
    """Of a product."""

    @staticmethod
    def step(t: Product) -> ProductOfBatch:
        return ProductOfBatch(t if t.drawing is None else replace(t, drawing=_apart(t.drawing)))

    def __call__(
        self, product: Product, vectors: list[torch.Tensor], lead: int, args: tuple, kwargs: dict[str, Any], names: Any
    ) -> tuple[Given, list[torch.Tensor], Any]:
        given, _ = product.given(args, kwargs, names)
        with self.pools.seeded([product.drawing] if product.drawing else [], given.n) as each:
            found, (given.result, given.losses), aux = self.calls((vectors, lead, each, args, kwargs), {})
        return given, found, aux
