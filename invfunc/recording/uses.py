"""Where a run uses its parameters."""

from __future__ import annotations

from typing import Any

import torch

from invfunc._functorch import version
from invfunc.operations.axis import Axis
from invfunc.operations.batch_axis import Call
from invfunc.operations.batch_axis.orders import Order
from invfunc.operations.factors import Recipe
from invfunc.recording.follower import Follower
from invfunc.recording.hidden import hidden
from invfunc.recording.tags import Derived, ParameterUse


class ParameterUses:
    """The parameter uses of a run, and its sites: the outputs of the operations that have parameter uses."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.n = n
        self.uses: list[ParameterUse] = []
        self.edges: list[Any] = []
        self.axes: list[Axis] = []
        self.sizes: list[int] = []  # of the output at each site, for one sample
        self.complex = False  # whether complex numbers depend on parameters and samples
        self.orders: dict[Order, str] = {}  # those in which samples meet parameters, and a call where they do
        self.moved = False  # whether data were put in another order
        self.by_rows = False  # whether they are followed there, row by row
        self.pattern: Follower | None = None

    def use(
        self, param: torch.Tensor, tag: Derived, recipe: Recipe, out: torch.Tensor, axis: Axis, call: Call | None = None
    ) -> None:
        if not out.requires_grad:  # it lies in a transform that f itself uses
            raise hidden(out, ())
        edge = torch.autograd.graph.get_gradient_edge(out)
        at = next((i for i, e in enumerate(self.edges) if e == edge and self.axes[i] == axis), None)
        if at is None:
            at = len(self.edges)
            self.edges.append(edge)
            self.axes.append(axis)
            self.sizes.append(max(1, out.numel() // self.n))
        versions = tuple((x, version(x)) for x in (param, *recipe.reads))
        self.uses.append(ParameterUse(param, tag, recipe, at, call, axis, versions))
        if self.pattern is not None:
            self.pattern.used(at, out, recipe)
