"""The curvature of a parameter in the eigenbasis of its Kronecker factors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial, reduce
from typing import Any

import torch

from invfunc import tree
from invfunc.kronecker import Kronecker
from invfunc.kronecker.matrix import decomposed, rounded
from invfunc.linear_algebra.contract import Term, contract, widened
from invfunc.operations.factors import Part, Recipe
from invfunc.per_sample import Shares
from invfunc.per_sample.operands import Layer
from invfunc.per_sample.places import Unfactored
from invfunc.recording.tags import Derived
from invfunc.reductions.block import Block
from invfunc.reductions.exchange import Exchange, Sums, filled
from invfunc.reductions.kronecker_factors import KroneckerFactors
from invfunc.reductions.reduction import Found, Over, State, States


def bases_of(matrices: Sequence[Kronecker]) -> list[Kronecker]:
    """The eigendecomposition of each; all of it is NaN if a factor has NaN or inf in it."""
    bad = [~torch.stack([f.isfinite().all() for f in K.factors]).all() for K in matrices]
    found = decomposed([_filled(K, where, 0) for K, where in zip(matrices, bad, strict=True)])
    each = zip(matrices, found, bad, strict=True)
    return [_filled(rounded(K, basis), where, torch.nan) for K, basis, where in each]


def _filled(matrix: Kronecker, where: torch.Tensor, value: float) -> Kronecker:
    return tree.map_leaves(lambda x: x.masked_fill(where, value), matrix)


def rotated(shares: Shares, basis: Kronecker, joint: bool, check: bool = False) -> Shares:
    """The shares in the eigenbasis of their block, `Q^T G[v, n]`: the operands of the layers that read the parameter
    are rotated, not their products. A basis that was not found from these layers is to be checked."""
    assert basis.values is not None
    leaf, uses = torch.empty(basis.values.shape, dtype=shares.leaf.dtype, device="meta"), []
    for use in shares.uses:
        layer = Layer(shares, use, joint)
        layer.look(shares.columns.left, shares.samples.parts(1, 1)[0])
        if check and not joint and not _of(basis, layer):
            raise Unfactored("its block is of other factors")
        recipe, derived = _recipe(layer, basis), Derived(frozenset(), True, picked=True)
        uses.append(replace(use, param=leaf, derived=derived, recipe=recipe, call=None, versions=()))
    return replace(shares, leaf=leaf, uses=uses, role=None)


def _of(basis: Kronecker, layer: Layer) -> bool:
    """Whether the factors are over the dims that the operands of a layer are over."""
    dims = sorted(place.dims for place in layer.places)
    return dims == sorted(basis.groups) and (layer.blocks or None) == basis.blocks


def _recipe(layer: Layer, basis: Kronecker) -> Recipe:
    """The share of one operation in the eigenbasis: its operands are rotated, not their product."""
    factors, picked, g = list(basis.factors), layer.picked, "" if basis.blocks is None else "g"
    diagonal = [basis.is_diagonal(i) for i in range(len(factors))]  # it leaves what it is over as it is
    if layer.flipped:
        factors.reverse()  # what is sent back comes first
        diagonal.reverse()
    in_rows = picked is not None and diagonal[1] and layer.flipped
    count = 0 if picked is None else len(factors[1])

    def few(s: torch.Tensor) -> bool:
        """Whether there are so few positions that operands are rotated, and not their product."""
        k, i = len(factors[0]), len(factors[-1])
        return s.shape[-1] * k <= (i * (k + i) if len(factors) > 1 else k)

    def build(delta: torch.Tensor, part: Part) -> list[Term]:
        operands = layer.of(delta, part)
        s, vectors = operands.s, [q.to(operands.s.dtype) for q in factors]
        t = "t" if in_rows else "r"
        sent = _turned((f"VN{g}k{t}", s), None if diagonal[0] else vectors[0], "kz", few(s))
        if in_rows or len(vectors) == 1:
            return sent
        if operands.picked is not None:
            across = vectors[1].diag() if diagonal[1] else vectors[1]
            rows = torch.cat([across, across.new_zeros(1, count)])
            return [*sent, ("Nry", rows[operands.picked])]
        assert operands.a is not None
        return [*sent, *_turned((f"N{g}ir", operands.a), None if diagonal[1] else vectors[1], "iy", few(s))]

    output = "z" if len(factors) == 1 else "yz" if layer.flipped else "zy"
    work = layer.recipe.work
    if in_rows:
        return Recipe("uz", build=build, picks=picked, work=work)
    return Recipe(g + output, build=build, work=work)


def _turned(term: Term, vectors: torch.Tensor | None, labels: str, now: bool) -> list[Term]:
    """An operand in the basis of eigenvectors, whose labels are its old and its new one, as a product or as its
    factors; without vectors as it is."""
    old, new = labels
    turned = term[0].replace(old, new)
    if vectors is None:
        return [(turned, term[1])]
    found = [term, ("g" * ("g" in turned) + labels, vectors)]
    return [(turned, contract(widened(found), turned))] if now else found


class InEigenbasis(Block):
    """`sum_vn (Q^T G[v, n])^2` for the eigenvectors Q of the factors, which the phase before finds."""

    paired = squares = True
    forms = "blocks"
    rooted = KroneckerFactors.rooted

    def __init__(self, factors: KroneckerFactors, bases: dict[int, Kronecker | None] | None = None) -> None:
        self.before, self.factors, self.gaps = factors, factors, factors.gaps
        self.bases = bases

    def learned_apart(self, states: States, found: Found) -> dict[int, Kronecker | None]:
        matrices = {i: self.factors.finish(state, found)[0] for i, state in states.items()}
        there = {i: K for i, K in matrices.items() if K is not None}
        return {**matrices, **dict(zip(there, bases_of([*there.values()]), strict=True))}

    def knowing(self, learned: dict[int, Kronecker | None]) -> InEigenbasis:
        return InEigenbasis(self.factors, learned)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return *super().init(leaf, n, columns), None

    def step(self, shares: Shares) -> State:
        assert self.bases is not None
        basis = self.bases[shares.place]
        if basis is None:
            return None, None
        assert basis.values is not None
        if len(basis.factors) == 1 and basis.is_diagonal(0):  # it is in its eigenbasis
            return basis, shares.square_sum().reshape(basis.values.shape)
        if not isinstance(shares, Shares):  # of the core
            return basis, shares.rotated(basis, self.factors.joined).square_sum()
        try:
            return basis, rotated(shares, basis, self.factors.joined and shares.bias is not None).square_sum()
        except Unfactored:  # its factor is the block itself
            block, (q,) = shares.outer(), basis.factors
            return basis, (q.mT.to(block.dtype) @ block @ q.to(block.dtype)).diagonal()

    def merge(self, a: State, b: State, over: Over) -> State:
        if a[1] is None or b[1] is None:
            return b if a[1] is None else a
        return a[0], a[1] + b[1]

    def across(self, place: int, own: State, each: Sequence[State]) -> Exchange:
        whole = reduce(partial(self.merge, over="samples"), each)
        if whole[1] is None or self.bases is None:
            return whole if whole[0] is None else own
        return self.bases[place], *(yield Sums([filled(whole, own)[1]]))

    def scaled(self, state: State, by: float) -> State:
        basis, values = state
        return basis, None if values is None else values * by**2

    def finish(self, state: State, found: Found) -> list[Any]:
        matrix, values = state
        if matrix is None:
            return [None]
        return [matrix.eigen() if values is None else replace(matrix, values=values)]
