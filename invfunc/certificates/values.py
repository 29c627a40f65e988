"""What f gives as it is, beside what it gives in the form in which both ways differentiate it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.generators import state_of
from invfunc.arguments.problem import with_aux
from invfunc.certificates.draws import States, rewound
from invfunc.certificates.look import Look
from invfunc.certificates.rounding import Numbers
from invfunc.certificates.run import wide
from invfunc.operations.second_derivatives import TwiceDifferentiable
from invfunc.products.product import Product
from invfunc.statistic import Statistic


class Value(Look):
    """Numbers of f itself, which are of no entries."""


@dataclass
class Values:
    """The outputs and the loss of the function of a statistic or of a product."""

    t: Statistic | Product
    before: States
    """Of the generators, before the result was computed."""

    def looks(self, args: tuple, kwargs: dict[str, Any]) -> list[Look]:
        """The values of f as it is, if an operation has another form, which draws no random numbers."""
        mode = TwiceDifferentiable()
        self._of(args, kwargs, mode)
        if not mode.used:
            return []
        found = self._of(args, kwargs, nullcontext())
        if any(not torch.equal(then, state_of(g)) for g, then in self.before):
            return []
        return [
            Value(
                wide(x),
                _by_no_entries,
                lambda *at, name=name: f"{name}[{', '.join(map(str, at))}]" if at else name,
                x.dtype,
                "in the form in which it is differentiated",
            )
            for name, x in found
        ]

    def expected(self, args: tuple, kwargs: dict[str, Any]) -> list[Numbers]:
        """The same values, where operations are replaced by forms that have a second derivative."""
        return [(wide(x), 0.0) for _, x in self._of(args, kwargs, TwiceDifferentiable())]

    def _of(
        self, args: tuple, kwargs: dict[str, Any], mode: AbstractContextManager[Any]
    ) -> list[tuple[str, torch.Tensor]]:
        t, first = self.t, (self.t.argnums if isinstance(self.t, Statistic) else 0)
        params = first if isinstance(first, tuple) else (first,)
        args = args if isinstance(t, Statistic) else (args[0], *args[2:])
        args = tuple(tree.map_tensors(_leaf, x) if i in params else x for i, x in enumerate(args))
        rewound(self.before)
        with torch.enable_grad(), mode:  # some layers take another way where nothing is differentiated
            result = t.f(*(args if t.loss is None else args[:-1]), **kwargs)
            result = with_aux(result)[0] if t.has_aux else result
            both = [("f", result)] if t.loss is None else [("f", result), ("the loss", t.loss(result, args[-1]))]
        named = [(name + path, x) for name, z in both for path, x in tree.named_leaves(z)]
        return [(name, x) for name, x in named if isinstance(x, torch.Tensor) and x.is_floating_point()]


def _by_no_entries(_: Any) -> Numbers:
    raise NotImplementedError


def _leaf(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_(x.is_floating_point())
