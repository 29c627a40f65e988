"""Plans of the batches of a data set: of what each brings to a statistic, or adds to a product."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc.data_sets.visits import VisitWork
from invfunc.evaluation.batches import size_of
from invfunc.evaluation.engine import Engine, bring, brought
from invfunc.plans.calls import Calls
from invfunc.products.product import Product, WithVector
from invfunc.reductions.reduction import Drawing
from invfunc.statistic import Statistic

Each = tuple[torch.Generator, ...]
"""The generators of the samples of a batch."""


def _each(drawings: list[Drawing], n: int) -> list[Each]:
    """For each drawing, the generators of n samples at their places in the data set."""
    return [tuple(d.source(n)) for d in dict.fromkeys(drawings)]  # pyright: ignore[reportArgumentType]: it has a key


def _aside(d: Drawing) -> Drawing:
    """A drawing by a generator that nobody draws from: those of the samples are given, and the caller's may go on."""
    return replace(d, generator=torch.Generator(d.generator.device))


@dataclass(frozen=True, eq=False)
class StatisticOfBatch:
    """The function that gives what a batch brings to a statistic, or to a product with vectors, in a phase, given what
    is known of those before."""

    t: Statistic | WithVector

    def __call__(
        self, phase: int, known: list[list[Any]], each: list[Each], vectors: Any, args: tuple, kwargs: dict
    ) -> Any:
        sources = dict(zip(dict.fromkeys(self.t.drawings), each, strict=True))
        t = self.t.drawn_by(lambda d: replace(d, each=sources[d]))
        t = replace(t, vectors=vectors[0], lead=vectors[1]) if isinstance(t, WithVector) else t
        engine = t.engine(args, kwargs, t.names(len(args)))
        engine.fold.phase = phase
        for of_all, learned in zip(engine.fold.accumulators, known, strict=True) if known else ():
            for part, own in zip(of_all.line, learned, strict=True):
                if own is not None:
                    part.know(own)
        return brought(engine, phase)


class PlansOfBatches:
    """The evaluation of batches of a statistic or a product, each by the plan of those of its shape."""

    def __init__(self, t: Statistic | Product, calls: Calls) -> None:
        """`calls` are those of t alone."""
        added = WithVector(t, [], 0) if isinstance(t, Product) else t
        own = {d: _aside(d) for d in added.drawings}
        self.calls = Calls(StatisticOfBatch(added.drawn_by(own.__getitem__)), calls.called, calls.backend)

    def __repr__(self) -> str:
        return self.calls.called

    def __call__(self, t: Any, work: VisitWork, args: tuple, kwargs: dict[str, Any], engine: Engine) -> Any:
        """Have an evaluation of a batch keep what it brings; aux."""
        vectors = (t.vectors, t.lead) if isinstance(t, WithVector) else None
        found = self.calls((work.phase, work.known, _each(t.drawings, engine.problem.n), vectors, args, kwargs), {})
        return bring(engine, work.phase, found)

    def explained(self, t: Statistic, args: tuple, kwargs: dict[str, Any]) -> tuple[str, str]:
        """The description of the plan of a batch, and its operations."""
        drawings = t.keyed(dict.fromkeys(t.drawings, 0), 0).drawings
        return self.calls.explained((0, [], _each(drawings, size_of(args, t.in_dims)), None, args, kwargs), {})
