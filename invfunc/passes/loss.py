"""All the columns that a loss sends back, one list for each kind that is asked for."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable

import torch

from invfunc.loss.drawn import drawn
from invfunc.loss.hessian import gradient, hessian
from invfunc.loss.outputs import ModelOutput, OutputFinder
from invfunc.loss.square_root import Columns, Gradient, rooted
from invfunc.recording.scope import Scope
from invfunc.reductions.quantity import Drawing, Quantity

Made = dict[Hashable, list[Columns]]
"""The columns of each kind, by `Quantity.columns`."""


class Loss:
    """The loss part of a function, run once on all outputs: `result` as a function of `roots`."""

    def __init__(
        self, scope: Scope, n: int, result: torch.Tensor, roots: list[ModelOutput], finder: OutputFinder
    ) -> None:
        self.scope, self.n, self.result, self.roots, self.finder = scope, n, result, roots, finder

    def gradient(self) -> Gradient:
        return gradient(self.scope, self.result, self.roots, self.n)

    def hessian(self, convex: bool) -> list[Columns]:
        return hessian(self.scope, self.result, self.roots, self.finder.terms, self.n, convex)

    def made(self, quantities: Iterable[Quantity], sampled: Callable[[Drawing], list[Columns]]) -> Made:
        """The columns of each quantity; `sampled` draws those of a loss with a sampler of the user's."""
        made: Made = {}
        for q in quantities:
            if q.columns in made:
                continue
            if q.kind.first_order:
                made[q.columns] = [self.gradient()]
            elif q.drawing is None:
                columns = self.hessian(convex=q.kind.convex)
                made[q.columns] = [rooted(c, q.reduction.rooted) for c in columns]
            elif q.drawing.sample is not None:
                made[q.columns] = sampled(q.drawing)
            else:
                made[q.columns] = drawn(self.hessian(convex=True), q.drawing.count, q.drawing.generator)
        return made
