"""The Hessian with the second derivatives of the model's own operations made positive, as a linear map."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from invfunc._torch.functorch import gradient_edge
from invfunc._torch.graphs import node_of, nodes_of
from invfunc.core.marks import Unsupported, named, option
from invfunc.core.split import CRITERIA, MOVES, SCALES, Finder, named_node
from invfunc.core.tables import POINTWISE
from invfunc.errors import ArgumentError
from invfunc.products.curvature import Jacobian, sandwich, split_of
from invfunc.products.given import Following, Given
from invfunc.products.maps import Linear, Pull, Vectors

PIECES = (
    "Relu LeakyRelu Hardtanh Threshold Abs Clamp ClampMin ClampMax Hardshrink Softshrink Maximum Minimum Where "
    "MaskedFill Max Min Amax Amin Sort Topk AvgPool1D AvgPool2D AvgPool3D AdaptiveAvgPool2D AdaptiveAvgPool3D "
    "MaxPool2DWithIndices MaxPool3DWithIndices Detach Sgn Constant UpsampleNearest2D"
).split()
"""Nodes of autograd that are linear piece by piece."""


@dataclass
class Bend:
    """A nonlinear call of the model: what it read, the edge of the graph at its result, and how it is run again."""

    name: str
    input: torch.Tensor
    edge: Any
    again: Callable[[torch.Tensor], torch.Tensor] | None
    """None where the call is not element by element."""


class Bends(Following):
    """A run that notes the calls that are nonlinear in what depends on samples and parameters."""

    bends: list[Bend] | None = None

    def dispatched(self, func: Any, args: tuple, kwargs: dict, found: tuple[list, ...]) -> Any:
        active = {id(x): x for x, _ in (*found[0], *found[3], *found[4]) if x.requires_grad}
        flat = func is F.batch_norm and not option(args, kwargs, 5, "training", False)
        if not active or func in CRITERIA or flat:
            return super().dispatched(func, args, kwargs, found)
        x, copies = next(iter(active.values())), [y.clone() for y in active.values()]
        self.bends = [] if self.bends is None else self.bends
        before, starts = len(self.bends), {node_of(y).next_functions[0][0] for y in copies}
        out = super().dispatched(func, args, kwargs, found)
        if not isinstance(out, torch.Tensor) or not out.requires_grad or len(self.bends) > before:
            return out
        if not _leads(node_of(out), starts, {})[1]:

            def again(y: torch.Tensor) -> torch.Tensor:
                return func(*[y if a is x else a for a in args], **{k: y if a is x else a for k, a in kwargs.items()})

            alone = func in POINTWISE and len(active) == 1
            self.bends.append(Bend(named(func).strip("_"), copies[0], gradient_edge(out), again if alone else None))
        return out


def _leads(node: Any, starts: set[Any], known: dict[Any, tuple[bool, bool]]) -> tuple[bool, bool]:
    """Whether a way leads from a node to one of the starts, and whether the node is linear in what is there."""
    if node in starts or node is None:
        return node is not None, True
    if node not in known:
        known[node] = False, True
        below = [_leads(p, starts, known) for p, _ in node.next_functions]
        ways, name = sum([leads for leads, _ in below]), named_node(node)
        scaled = name in SCALES and ways == 1 and (name != "Div" or below[0][0])
        straight = not ways or scaled or name in MOVES or name in PIECES
        known[node] = ways > 0, straight and all([linear for _, linear in below])
    return known[node]


def of_positive_hessian(given: Given, blocks: bool, modify: str) -> Linear:
    """`J^T H J v` of the outputs and of the inputs of all nonlinear calls."""
    run = Bends(given.scope, given.n, Finder())
    try:
        split = given.split_in(run)
    except Unsupported as error:
        Jacobian.recorded(given, split_of(given))  # which tells what else is wrong
        raise ArgumentError(f"the nonlinear operations of f are not seen: {error}.") from None
    scope, roots, ends = given.scope, split.values, {node_of(z) for z in split.values}
    bends = [b for b in run.bends or [] if ends.isdisjoint(nodes_of([b.input]))]
    for bend in bends:
        if bend.again is None:
            raise ArgumentError(
                f"`{bend.name}` is nonlinear and not element-wise, so its second derivative has no "
                "sign to be changed. `ggnvp(f, loss, blocks=True)` does without it."
            )
    weights, ones = [], [torch.ones_like(split.result)]
    with given.mode.back(split.result.device):
        slopes = split.slopes()
        split.check_convex(slopes)
        pulled = scope.grad([split.result], [b.edge for b in bends], ones, batched=False)
    for bend, slope in zip(bends, pulled, strict=True):
        x = scope.enter(scope.leave(bend.input))
        with given.mode:
            y = bend.again(x.clone()) if bend.again else x
        first = Pull(scope, graph=True)([y], [x], [slope])
        (h,) = scope.grad(first, [x], [torch.ones_like(x)], batched=False)
        if h is not None:
            h = scope.leave(h)
            weights.append((bend.input, h.abs() if modify == "abs" else h.clamp(min=0)))
    split.values = [*roots, *(x for x, _ in weights)]

    def middle(t: Vectors, pull: Pull) -> Vectors:
        inner = [None if x is None else x * h for x, (_, h) in zip(t[len(roots) :], weights, strict=True)]
        return [*pull(slopes, roots, t[: len(roots)]), *inner]

    return sandwich(given, split, middle, blocks)
