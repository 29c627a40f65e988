"""Kronecker factors of the curvature of a parameter, and the curvature in their eigenbasis."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc.jacobian.contract import Term, outer, summed
from invfunc.jacobian.measures.measure import Found, Measure, State
from invfunc.jacobian.rules import Part, Recipe
from invfunc.jacobian.shares import Shares
from invfunc.jacobian.shares.layers import Layer, Operands, Place
from invfunc.jacobian.trace.tags import Derived
from invfunc.kronecker import Kronecker


@dataclass
class Factors:
    """What is known of the factors of one parameter: sums of outer products, in the order of its dims."""

    b: torch.Tensor
    a: torch.Tensor | None
    """None where it has one factor only, or other columns brought it."""
    positions: float
    places: list[Place]
    joint: bool
    shape: torch.Size

    def joined(self, other: Factors, samples: bool) -> Factors:
        a = self.a if other.a is None else other.a
        if samples and self.a is not None and other.a is not None:
            a = self.a + other.a
        return replace(self, b=self.b + other.b, a=a)


class KroneckerFactors(Measure):
    """B, the sum over columns and samples of `s s^T`, and A, the mean over samples of `a a^T`."""

    rooted = "known"  # so that products are symmetric
    paired = thin = True
    shortcuts = "narrow"

    def __init__(self, sharing: str, joint: bool) -> None:
        self.sharing, self.joined = sharing, joint

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        if self.joined and shares.role == "bias":
            return (None,)
        with_bias = self.joined and shares.role == "weight"
        layers = [Layer(shares, tap, with_bias, read=not shares.again) for tap in shares.taps]
        known, tap = shares.columns.known, shares.taps[0]
        if shares.role == "bias" and len(layers) == 1 and id(tap.call) in known:  # the same as the weight's
            layers[0].look(shares.columns.left, shares.samples.parts(1, 1)[0])
            return (Factors(known[id(tap.call)], None, 1.0, layers[0].places, False, shares.leaf.shape),)
        found: Factors | None = None
        for part in shares.samples.parts(sum(f.work for f in shares.factors), 16 * shares.budget):
            more = self._of(shares, layers, part, with_bias)
            found = more if found is None else found.joined(more, samples=True)
        if shares.role == "weight" and len(layers) == 1 and found is not None:
            known[id(tap.call)] = found.b
        return (found,)

    def _of(self, shares: Shares, layers: list[Layer], part: Part, joint: bool) -> Factors:
        columns = shares.columns
        whole = self.sharing != "reduce"
        left = [(layer.products if whole else layer.operands)(columns.left, part) for layer in layers]
        right = left
        if columns.right is not None:
            right = [layer.operands(columns.right, part) for layer in layers]
        if len({tuple(p.dims for p in layer.places) for layer in layers}) > 1:
            raise layers[0].refused("it is read with its dimensions in different roles (an embedding as the head?)")
        covered = [layer.covered for layer in layers]  # where each reads a part, that part is not to count twice
        positions = sum(x.s.shape[-1] * out * read for x, (out, read) in zip(left, covered, strict=True)) or 1.0
        weight = None if columns.weight is None else columns.weight[:, part]
        if self.sharing == "expand":
            products = [_columns(x.s, y.s, weight) for x, y in zip(left, right, strict=True)]
            b = summed(p if read == 1 else read * p for p, (_, read) in zip(products, covered, strict=True))
        else:
            first = _added(left, covered)
            b = _columns(first, first if right is left else _added(right, covered), weight)
        a = None
        if not shares.again and len(layers[0].places) > 1:
            a = self._inputs(left, [out for out, _ in covered], layers[0].places[1].size, positions)
        if self.sharing == "backpack":  # it does not divide by the positions
            out, read = (min(1.0, sum(parts)) for parts in zip(*covered, strict=True))
            a, b = a if a is None or out == 1 else a / out, b if read == 1 else b / read**2
        b = b if columns.right is None else (b + b.mT) / 2
        return Factors(b, a, positions, layers[0].places, joint, shares.leaf.shape)

    def _inputs(self, operands: list[Operands], covered: list[float], rows: int, positions: float) -> torch.Tensor:
        """`sum_n a a^T`; a diagonal where rows are picked, unless they are averaged first."""
        found = []
        for o, out in zip(operands, covered, strict=True):
            picked, like = o.picked, o.s
            if self.sharing == "reduce" and picked is not None:
                counts = like.new_zeros(len(picked), rows + 1)
                part = counts.scatter_add(1, picked, torch.ones_like(picked, dtype=like.dtype))[:, :-1]
            elif self.sharing == "reduce":
                assert o.a is not None
                part = o.a.sum(-1)
            elif picked is not None:
                part = torch.bincount(picked.flatten(), minlength=rows + 1)[:-1].to(like.dtype)
            else:
                assert o.a is not None or o.gram is not None
                part = outer(o.a) if o.gram is None else o.gram  # pyright: ignore[reportArgumentType]
            found.append(part if out == 1 else out * part)
        total = summed(found)
        return total.mT @ total / positions**2 if self.sharing == "reduce" else total

    def over_samples(self, a: State, b: State) -> State:
        return (None if a[0] is None else a[0].joined(b[0], samples=True),)

    def over_columns(self, a: State, b: State) -> State:
        return (None if a[0] is None else a[0].joined(b[0], samples=False),)

    def finish(self, state: State, found: Found) -> list[Any]:
        factors: Factors | None = state[0]
        return [None if factors is None else self._matrix(factors, found)]

    def _matrix(self, found: Factors, known: Found) -> Kronecker:
        shape, dims = found.shape, [p.dims for p in found.places]
        if found.a is None:
            return Kronecker((found.b,), (dims[0],), shape)
        a = found.a / known.n
        a = a / found.positions if self.sharing == "expand" else a
        if found.joint:
            return Kronecker((found.b, a), ((0,), (1,)), torch.Size([len(found.b), len(a)]))
        pairs = sorted(zip(dims, (found.b, a), strict=True), key=lambda pair: pair[0])
        return Kronecker(tuple(f for _, f in pairs), tuple(d for d, _ in pairs), shape)

    def zero(self, leaf: torch.Tensor, found: Found) -> list[Any]:
        dims = tuple(range(leaf.ndim))
        groups = (dims[:1], dims[1:]) if leaf.ndim > 1 else (dims,)
        zeros = tuple(leaf.new_zeros(math.prod(leaf.shape[d] for d in group)) for group in groups)
        return [Kronecker(zeros, groups, leaf.shape)]


class ChainFactors(KroneckerFactors):
    """Those of a recursion that needs all samples and outputs at once."""

    axes = ()


class CorrectedFactors(KroneckerFactors):
    """The factors first; then the curvature in their eigenbasis."""

    stages = 2
    axes = ("outputs", "params")

    def then(self, results: dict[int, list[Any]]) -> Measure:
        bases = {i: None if one is None else _basis(one) for i, (one,) in results.items()}
        return InEigenbasis(bases, self.joined)


def _basis(matrix: Kronecker) -> Kronecker:
    """The form with values; of factors with NaN or inf in them, all of it is NaN."""
    fine = torch.stack([f.isfinite().all() for f in matrix.factors]).all()
    found = tree.map_leaves(lambda f: f.masked_fill(~fine, 0), matrix).eigen()
    return tree.map_leaves(lambda x: x.masked_fill(~fine, torch.nan), found)


class InEigenbasis(Measure):
    """`sum_vn (Q^T G[v, n])^2` for the eigenvectors Q of the factors."""

    paired = True

    def __init__(self, bases: dict[int, Kronecker | None], joined: bool) -> None:
        self.bases, self.joined = bases, joined

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        basis = self.bases[shares.place]
        if basis is None:
            return (None,)
        assert basis.values is not None
        rotated = torch.empty(basis.values.shape, dtype=shares.leaf.dtype, device="meta")
        taps = []
        for tap in shares.taps:
            layer = Layer(shares, tap, self.joined and shares.role == "weight")
            layer.look(shares.columns.left, shares.samples.parts(1, 1)[0])
            recipe = self._recipe(layer, basis)
            taps.append(replace(tap, param=rotated, derived=Derived(frozenset(), True), recipe=recipe, versions=()))
        square = Shares(shares.scope, rotated, taps, shares.columns, shares.samples, shares.budget).square_sum()
        return basis, square

    def _recipe(self, layer: Layer, basis: Kronecker) -> Recipe:
        """The share of one operation in the eigenbasis: its operands are rotated, not their product."""

        def build(delta: torch.Tensor, part: Part) -> list[Term]:
            operands = layer.of(delta, part)
            s, a, dtype = operands.s, operands.a, operands.s.dtype
            vectors = [
                q.to(dtype) if q.ndim == 2 else torch.eye(len(q), dtype=dtype, device=q.device) for q in basis.factors
            ]
            if len(vectors) == 1:
                return [("VNkr", s), ("kz", vectors[0])]
            if layer.flipped:
                vectors.reverse()
            if a is None:
                assert operands.picked is not None
                rows = torch.cat([vectors[1], vectors[1].new_zeros(1, vectors[1].shape[1])])
                return [("VNkr", s), ("Nry", rows[operands.picked]), ("kz", vectors[0])]
            return [("VNkr", s), ("Nir", a), ("kz", vectors[0]), ("iy", vectors[1])]

        output = "z" if len(basis.factors) == 1 else "yz" if layer.flipped else "zy"
        return Recipe(output, build, work=layer.recipe.work, joins=False)

    def over_samples(self, a: State, b: State) -> State:
        return a if a[0] is None else (a[0], a[1] + b[1])

    over_columns = over_samples

    def finish(self, state: State, found: Found) -> list[Any]:
        return [None if state[0] is None else replace(state[0], values=state[1])]

    def zero(self, leaf: torch.Tensor, found: Found) -> list[Any]:
        return KroneckerFactors("expand", False).zero(leaf, found)


def _added(operands: list[Operands], covered: list[tuple[float, float]]) -> torch.Tensor:
    """`sum_r s` over all positions of all uses, as if there were one."""
    sums = [x.s.sum(-1, keepdim=True) for x in operands]
    return summed(s if read == 1 else read * s for s, (_, read) in zip(sums, covered, strict=True))


def _columns(s: torch.Tensor, other: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """`sum_vnr weight[v, n] s[v, n, :, r] other[v, n, :, r]^T`"""
    if weight is None:
        return outer(s.flatten(0, 1), None if other is s else other.flatten(0, 1))
    scaled = s * weight.to(s.dtype)[:, :, None, None]
    return outer(scaled.flatten(0, 1), other.flatten(0, 1))
