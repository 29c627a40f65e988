"""Curvature matrices as linear maps: what is recorded once, and what each product evaluates.

Among them square roots by their rows, and the Hessian with the second derivatives of the model's own operations made
positive.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import reduce
from typing import Any

import torch

from invfunc import thresholds
from invfunc._torch.functorch import node_of, nodes_of
from invfunc.core.columns import CRITERIA, Finder
from invfunc.core.hessian import CallsRun
from invfunc.core.marks import Unsupported, spelled, tensors
from invfunc.core.tables import POINTWISE
from invfunc.errors import ArgumentError, unreached
from invfunc.loss.square_root import Columns
from invfunc.operations.axis import IN_FRONT, back, exposed
from invfunc.products.given import (
    Direction,
    Following,
    Kind,
    Linear,
    ProductArguments,
    Pull,
    ScopedSplit,
    Steps,
    Vectors,
)


class OutputRows:
    """Columns `R[v, n]` at the outputs, and their products there."""

    def __init__(self, split: ScopedSplit, columns: Sequence[Columns]) -> None:
        self.n, self.values = split.n, [Kind.of(z) for z in split.values]
        self.places = [(r.ordinal, r.axis) for r in split.roots] or [(0, IN_FRONT)]
        self.blocks = [made.block(0, made.count, slice(None)).left for made in columns if made.count]
        self.counts = [len(next(iter(left.values()))) for left in self.blocks]
        kinds = [c.dtype for left in self.blocks for c in left.values()] + [z.dtype for z in self.values]
        dtype = reduce(torch.promote_types, kinds)
        self.kind = Kind(torch.Size([sum(self.counts), self.n]), dtype, self.values[0].device)
        """The kind of a product with all of them."""

    def along(self, t: Vectors, pull: Pull) -> Vectors:
        """`R[v, n] . t[n]` of tangents at the outputs: `[V, N]`, or `[K, V, N]` of several."""
        several = [x if x is None or pull.batched else x.unsqueeze(0) for x in t]
        given = [(i, axis, x) for (i, axis), x in zip(self.places, several, strict=True) if x is not None]
        tangents = {i: self._flat(exposed(x, axis, self.n, 1)) for i, axis, x in given}
        if not tangents or not self.blocks:
            return [None]
        found = torch.cat([self._products(left, tangents) for left in self.blocks], 1)
        return [found if pull.batched else found.squeeze(0)]

    def sent(self, u: Vectors, pull: Pull) -> Vectors:
        """The transpose: the cotangents `sum_v u[v, n] R[v, n]` at the outputs."""
        if u[0] is None:
            return [None] * len(self.values)
        each = u[0] if pull.batched else u[0].unsqueeze(0)
        found: dict[int, torch.Tensor] = {}
        for left, part in zip(self.blocks, each.split(self.counts, 1), strict=True):
            for i, s in left.items():
                x = torch.einsum("kmn,mnx->knx", part.to(self.kind.dtype), self._flat(s))
                x = x.reshape(len(x), *s.shape[1:])
                found[i] = found[i] + x if i in found else x
        places = zip(self.places, self.values, strict=True)
        whole = [back(found[i], z.shape, axis, self.n).to(z.dtype) if i in found else None for (i, axis), z in places]
        return [x if x is None or pull.batched else x.squeeze(0) for x in whole]

    def _products(self, left: dict[int, torch.Tensor], exposed: dict[int, torch.Tensor]) -> torch.Tensor:
        """Products with one kind of columns."""
        met = [torch.einsum("mnx,knx->kmn", self._flat(s), exposed[i]) for i, s in left.items() if i in exposed]
        if met:
            return torch.stack(met).sum(0)
        one, other = next(iter(left.values())), next(iter(exposed.values()))
        return other.new_zeros(len(other), len(one), self.n)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], -1).to(self.kind.dtype)


def of_hessian(given: ProductArguments, blocks: bool) -> Linear:
    """`H v`, the gradient of `g . v`; with `blocks`, that of each parameter alone."""
    value, params = given.value(), given.params
    with given.mode.back(value.device):
        slopes = Pull(given.scope, graph=True)([value], params, [torch.ones_like(value)])
    check_reached(slopes)

    def steps(v: Vectors, pull: Pull) -> Vectors:
        if not blocks:
            return pull(slopes, params, v)
        return [pull([g], [p], [x])[0] for g, p, x in zip(slopes, params, v, strict=True)]

    return _symmetric(given, steps)


def of_ggn(given: ProductArguments, blocks: bool) -> Linear:
    """`J^T H J v`, with the H of a convex loss; with `blocks`, in each parameter alone."""
    split = given.split(each=False)
    with given.mode.back(split.result.device):
        middle = split.middle()
        given.let_go(split.result)
    return sandwich(given, split, middle, blocks)


def of_fisher(given: ProductArguments, blocks: bool) -> Linear:
    """`sum_mn S[m, n] (S[m, n] . v)`: S are the shares of the gradient, or of gradients at targets that are drawn."""
    split = given.split(each=True, losses=given.drawing is None)
    if not split.roots:
        return sandwich(given, split, lambda t, others, pull: t, blocks)
    with given.mode.back(split.result.device):
        rows = OutputRows(split, [split.gradient()] if given.drawing is None else split.drawn(given.drawing, "ggnvp"))
    return sandwich(given, split, lambda t, others, pull: rows.sent(rows.along(t, pull), pull), blocks)


def of_root(given: ProductArguments, split: ScopedSplit, rows: OutputRows) -> Linear:
    """`v -> S v` `[V, N]` for the rows S of a square root of a matrix."""
    jacobian = Jacobian.recorded(given, split)

    def forth(v: Vectors, pull: Pull) -> Vectors:
        return rows.along(jacobian.forth(v, pull), pull)

    def back(u: Vectors, pull: Pull) -> Vectors:
        return jacobian.back(rows.sent(u, pull), pull)

    return Linear(given.scope, given.mode, Direction(forth, [rows.kind]), Direction(back, given.kinds))


def of_jacobian(given: ProductArguments) -> tuple[Linear, list[torch.Tensor], Any]:
    """`J v` with its transpose, the outputs and their structure."""
    values, structure = given.outputs()
    jacobian = Jacobian.recorded(given, values)
    there = Direction(jacobian.forth, [Kind.of(z) for z in values])
    return Linear(given.scope, given.mode, there, Direction(jacobian.back, given.kinds)), values, structure


def _symmetric(given: ProductArguments, steps: Steps) -> Linear:
    way = Direction(steps, given.kinds)
    return Linear(given.scope, given.mode, way, way)


@dataclass(frozen=True)
class Jacobian:
    """The Jacobian of some values in the parameters."""

    values: list[torch.Tensor]
    params: list[torch.Tensor]
    dummies: list[torch.Tensor]
    rows: Vectors
    """`J^T u` of the dummies u: what is linear in u has `v -> J v` for the transpose of its derivative."""

    @staticmethod
    def recorded(given: ProductArguments, of: ScopedSplit | list[torch.Tensor]) -> Jacobian:
        scope, values = given.scope, of if isinstance(of, list) else of.values
        dummies = [scope.enter(scope.leave(_ones(z))) for z in values]
        found = Jacobian(values, given.params, dummies, [])
        with given.mode.back(values[0].device):
            found = replace(found, rows=found.back([*dummies], Pull(scope, graph=True)))
        check_reached(found.rows)
        return found

    def forth(self, v: Vectors, pull: Pull) -> Vectors:
        return pull(self.rows, self.dummies, v)

    def back(self, cotangents: Vectors, pull: Pull) -> Vectors:
        return pull(self.values, self.params, cotangents)

    def of(self, i: int) -> Jacobian:
        """The Jacobian in one of the parameters."""
        return replace(self, params=self.params[i : i + 1], rows=self.rows[i : i + 1])


def _ones(z: torch.Tensor) -> torch.Tensor:
    """Ones like a tensor, which have no memory of their own if they are many."""
    return torch.ones_like(z) if z.numel() < thresholds.LOGITS else z.detach().new_ones(()).expand_as(z)


def sandwich(
    given: ProductArguments,
    split: ScopedSplit,
    middle: Callable[[Vectors, Sequence[torch.Tensor], Pull], Vectors],
    blocks: bool,
) -> Linear:
    """`J^T (...) J v`; with `blocks`, in each parameter alone."""
    pushed = given.pushed(split)
    if pushed is not None:  # of the one vector that there is
        jacobian = Jacobian(split.values, given.params, [], [])

        def one(v: Vectors, pull: Pull) -> Vectors:
            cotangents = middle([*pushed], [*given.leaves, *tensors(v)], pull)
            found = jacobian.back(cotangents, pull)
            if any([x is not None for x in cotangents]):
                check_reached(found)
            return found

        return _symmetric(given, one)
    jacobian = Jacobian.recorded(given, split)

    def product(jacobian: Jacobian, v: Vectors, pull: Pull) -> Vectors:
        others = [*given.leaves, *tensors(v)]
        return jacobian.back(middle(jacobian.forth(v, pull), others, pull), pull)

    def steps(v: Vectors, pull: Pull) -> Vectors:
        if not blocks:
            return product(jacobian, v, pull)
        return [product(jacobian.of(i), [x], pull)[0] for i, x in enumerate(v)]

    return _symmetric(given, steps)


def check_reached(pulled: Vectors) -> None:
    """Check that what was pulled back has come to a parameter."""
    for x in pulled:
        if x is not None:
            return
    raise unreached()


class Bends(Following, CallsRun):
    """A run that notes the calls that are nonlinear in what depends on samples and parameters."""

    def __init__(self, given: ProductArguments) -> None:
        super().__init__(given.scope, given.n, Finder())
        self.deep, self._enter, self.strip = given.scope.create_graph, given.scope.enter, given.scope.leave


def of_positive_hessian(given: ProductArguments, blocks: bool, modify: str) -> Linear:
    """`J^T H J v` of the outputs and of the inputs of all nonlinear calls."""
    run = Bends(given)
    try:
        split = given.split_in(run)
        ends = {node_of(z) for z in split.values}
        calls = [c for c in run.calls if c.func not in CRITERIA and ends.isdisjoint(nodes_of(c.inputs))]
        for call in calls:
            if call.func not in POINTWISE or len(call.inputs) > 1:
                raise ArgumentError(
                    f"`{spelled(call.func)}` is nonlinear and not element-wise, so its second derivative has no "
                    "sign to be changed. `ggnvp(f, loss, blocks=True)` does without it."
                )
            if call.written is not None:
                raise Unsupported(f"`{spelled(call.func)}` writes what it reads")
        again = [call.again(run) for call in calls]
    except Unsupported as error:
        Jacobian.recorded(given, given.split(each=False))  # which tells what else is wrong
        raise ArgumentError(f"the nonlinear operations of f are not seen: {error}.") from None
    roots = split.values
    inner, ones = list[tuple[torch.Tensor, torch.Tensor]](), [torch.ones_like(split.result)]
    with given.mode.back(split.result.device):
        slopes = split.slopes()
        split.check_convex(slopes)
        pulled = given.scope.grad([split.result], [c.results[0].edge for c in calls], ones, batched=False)
    for call, (copies, results), slope in zip(calls, again, pulled, strict=True):
        first = Pull(given.scope, graph=True)(results, copies, [slope])
        (h,) = given.scope.grad(first, copies, [torch.ones_like(copies[0])], batched=False)
        if h is not None:
            h = given.scope.leave(h)
            inner.append((call.inputs[0], h.abs() if modify == "abs" else h.clamp(min=0)))
    split.values = [*roots, *(x for x, _ in inner)]

    def middle(t: Vectors, others: Sequence[torch.Tensor], pull: Pull) -> Vectors:
        bent = [None if x is None else x * h for x, (_, h) in zip(t[len(roots) :], inner, strict=True)]
        return [*pull(slopes, roots, t[: len(roots)]), *bent]

    return sandwich(given, split, middle, blocks)
