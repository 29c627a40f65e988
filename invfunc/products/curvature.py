"""Curvature matrices as linear maps: what is recorded once, and what each product evaluates."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc.errors import SplitError, unreached
from invfunc.products.given import Given
from invfunc.products.maps import Kind, Linear, Pull, Steps, Vectors, Way
from invfunc.products.rows import Rows
from invfunc.products.split import Split


def of_hessian(given: Given, blocks: bool) -> Linear:
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


def of_ggn(given: Given, blocks: bool) -> Linear:
    """`J^T H J v`, with the H of a convex loss; with `blocks`, in each parameter alone."""
    split = split_of(given)
    with given.mode.back(split.result.device):
        slopes = split.slopes()
        split.check_convex(slopes)
    return sandwich(given, split, lambda t, pull: pull(slopes, split.values, t), blocks)


def split_of(given: Given) -> Split:
    """A function split at its outputs, whose samples may be mixed."""
    return given.found_split(each=False) if given.loss is None else given.given_split(each=False)


def of_fisher(given: Given, blocks: bool) -> Linear:
    """`sum_mn S[m, n] (S[m, n] . v)`: S are the shares of the gradient, or of gradients at targets that are drawn."""
    split = split_of_fisher(given)
    if not split.roots:
        return sandwich(given, split, lambda t, pull: t, blocks)
    with given.mode.back(split.result.device):
        rows = Rows(split, [split.gradient()] if given.drawing is None else split.drawn(given.drawing, "ggnvp"))
    return sandwich(given, split, lambda t, pull: rows.sent(rows.along(t, pull), pull), blocks)


def split_of_fisher(given: Given) -> Split:
    """A function split at its outputs, with the samples apart; `[N]` losses are taken as they are."""
    if given.loss is not None:
        return given.given_split(each=True)
    try:
        return given.found_split(losses=given.drawing is None)
    except SplitError as error:
        more = " Or return the [N] losses of the samples." if given.drawing is None else ""
        raise SplitError(f"{error}{more}") from None


def of_root(given: Given, split: Split, rows: Rows) -> Linear:
    """`v -> S v` `[V, N]` for the rows S of a square root of a matrix."""
    jacobian = Jacobian.recorded(given, split)

    def forth(v: Vectors, pull: Pull) -> Vectors:
        return rows.along(jacobian.forth(v, pull), pull)

    def back(u: Vectors, pull: Pull) -> Vectors:
        return jacobian.back(rows.sent(u, pull), pull)

    return Linear(given.scope, given.mode, Way(forth, [rows.kind]), Way(back, given.kinds))


def of_jacobian(given: Given) -> tuple[Linear, list[torch.Tensor], Any]:
    """`J v` with its transpose, the outputs and their structure."""
    values, structure = given.outputs()
    jacobian = Jacobian.recorded(given, values)
    there = Way(jacobian.forth, [Kind.of(z) for z in values])
    return Linear(given.scope, given.mode, there, Way(jacobian.back, given.kinds)), values, structure


def _symmetric(given: Given, steps: Steps) -> Linear:
    way = Way(steps, given.kinds)
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
    def recorded(given: Given, of: Split | list[torch.Tensor]) -> Jacobian:
        scope, values = given.scope, of if isinstance(of, list) else of.values
        dummies = [scope.enter(scope.leave(torch.ones_like(z))) for z in values]
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


def sandwich(given: Given, split: Split, middle: Steps, blocks: bool) -> Linear:
    """`J^T (...) J v`; with `blocks`, in each parameter alone."""
    pushed = given.pushed(split)
    if pushed is not None:  # of the one vector that there is
        jacobian = Jacobian(split.values, given.params, [], [])

        def one(v: Vectors, pull: Pull) -> Vectors:
            cotangents = middle([*pushed], pull)
            found = jacobian.back(cotangents, pull)
            if any([x is not None for x in cotangents]):
                check_reached(found)
            return found

        return _symmetric(given, one)
    jacobian = Jacobian.recorded(given, split)

    def product(jacobian: Jacobian, v: Vectors, pull: Pull) -> Vectors:
        return jacobian.back(middle(jacobian.forth(v, pull), pull), pull)

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
