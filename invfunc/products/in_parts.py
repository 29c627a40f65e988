"""Products with parameters of which each process has a part."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from invfunc.evaluation.rounds import Rounds
from invfunc.products.maps import Vectors
from invfunc.reductions import Reduction


class Summed(Reduction):
    """What is kept of a parameter is the sum of its products."""

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
        """Whether the product with a parameter is taken."""
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
