"""Kronecker factors of the curvature of a parameter."""

from __future__ import annotations

import math
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import thresholds
from invfunc.contract import outer, summed
from invfunc.kronecker import Kronecker, Of
from invfunc.operations.factors import Part
from invfunc.per_sample import Shares
from invfunc.per_sample.operands import Layer, Operands
from invfunc.per_sample.places import Place, Unfactored
from invfunc.reductions.block import Block, added
from invfunc.reductions.eigenbasis import InEigenbasis, basis_of
from invfunc.reductions.nearest import nearest
from invfunc.reductions.reduction import Found, Reduction, State


@dataclass
class Factors:
    """What is known of the factors of one parameter in one role: sums of outer products, in the order of its dims."""

    b: torch.Tensor
    a: torch.Tensor | None
    """None where it has one factor only, or other columns brought it."""
    positions: float
    """How many there are, in all samples."""
    samples: int
    places: list[Place]
    joint: bool
    shape: torch.Size
    blocks: tuple[int, ...] | None = None

    def joined(self, other: Factors, samples: bool) -> Factors:
        a = self.a if other.a is None else other.a
        if samples and self.a is not None and other.a is not None:
            a = self.a + other.a
        found = replace(self, b=self.b + other.b, a=a)
        if samples:
            found.positions, found.samples = self.positions + other.positions, self.samples + other.samples
        return found


@dataclass
class Kept:
    """What is kept of one parameter: its factors in each of the roles in which operations read it."""

    name: str
    roles: dict[Hashable, Factors]

    def joined(self, other: Kept, samples: bool) -> Kept:
        if type(other) is not type(self):
            return Refused(self.name, {}, "some columns reach it where it has factors, others where it has none")
        return self.merged(other, samples)

    def merged(self, other: Any, samples: bool) -> Kept:
        found = dict(self.roles)
        for role, factors in other.roles.items():
            found[role] = found[role].joined(factors, samples) if role in found else factors
        return replace(self, roles=found)


@dataclass
class Diagonal(Kept):
    """The diagonal of the block, kept in place of factors."""

    values: torch.Tensor

    def merged(self, other: Any, samples: bool) -> Kept:
        return replace(self, values=self.values + other.values)


@dataclass
class Refused(Kept):
    """A parameter that has no factors, and why."""

    why: str

    def joined(self, other: Kept, samples: bool) -> Kept:
        return self


class KroneckerFactors(Block):
    """B, the sum over columns and samples of `s s^T`, and A, the mean over samples of `a a^T`."""

    rooted = "known"  # so that products are symmetric
    paired = thin = squares = True
    shortcuts = "narrow"

    def __init__(self, sharing: str, joint: bool, unsupported: str = "error") -> None:
        self.sharing, self.joined, self.unsupported = sharing, joint, unsupported

    def partial(self, shares: Shares, joint: torch.Tensor | None) -> State:
        if self.joined and shares.role == "bias":
            return (None,)
        name, shape = shares.name(shares.place), shares.leaf.shape
        try:
            return (Kept(name, self._factors(shares)),)
        except Unfactored as why:
            if sum(n != 1 for n in shape) < 2:  # its block is no larger than a factor of a matrix
                places = [Place(tuple(range(len(shape))), shape.numel())]
                whole = Factors(shares.outer(), None, 1.0, 1, places, False, shape)
                return (Kept(name, {"whole": whole}),)
            if self.unsupported == "skip":
                return (None,)
            if self.unsupported == "diagonal":
                return (Diagonal(name, {}, shares.square_sum()),)
            return (Refused(name, {}, str(why)),)

    def _factors(self, shares: Shares) -> dict[Hashable, Factors]:
        """The sums of outer products of one parameter, in each of its roles."""
        with_bias = self.joined and shares.role == "weight"
        layers = [Layer(shares, use, with_bias, read=not shares.seen_before) for use in shares.uses]
        known, key = shares.columns.known, (self.sharing, id(shares.uses[0].call))
        same = shares.role == "bias" and len(layers) == 1 and key in known  # as the weight's
        if same or len(layers) > 1:
            for layer in layers:
                layer.look(shares.columns.left, shares.samples.parts(1, 1)[0])
        if same:
            b = known[key]
            return {layers[0].role: Factors(b, None, 1.0, 1, layers[0].places, False, shares.leaf.shape)}
        roles: dict[Hashable, list[Layer]] = {}
        for layer in layers:
            roles.setdefault(layer.role, []).append(layer)
        if len(layers) > 1 and len({(frozenset(p.dims for p in layer.places), layer.blocks) for layer in layers}) > 1:
            raise Unfactored("operations that read it divide its dimensions differently")
        kept: dict[Hashable, Factors] = {}
        for part in shares.samples.parts(sum(f.work for f in shares.factors), thresholds.OPERANDS * shares.budget):
            for role, some in roles.items():
                more = self._of(shares, some, part, with_bias)
                kept[role] = kept[role].joined(more, samples=True) if role in kept else more
        found = {some[0].role: kept[role] for role, some in roles.items()}
        if shares.role == "weight" and len(layers) == 1 and layers[0].blocks is None:
            (known[key],) = (factors.b for factors in found.values())
        return found

    def _of(self, shares: Shares, layers: list[Layer], part: Part, joint: bool) -> Factors:
        columns = shares.columns
        whole = self.sharing != "reduce"
        left = [(layer.products if whole else layer.operands)(columns.left, part) for layer in layers]
        right = left
        if columns.right is not None:
            right = [layer.operands(columns.right, part) for layer in layers]
        covered = [layer.covered for layer in layers]  # where each reads a part, that part is not to count twice
        counted = zip(layers, left, covered, strict=True)
        found = [[k * out * read for k in layer.positions(x, part)] for layer, x, (out, read) in counted]
        counts = [sum(each) for each in zip(*found, strict=True)]
        weight = None if columns.weight is None else columns.weight[:, part]
        if self.sharing == "expand":
            products = [_columns(x.s, y.s, weight) for x, y in zip(left, right, strict=True)]
            b = summed(p if read == 1 else read * p for p, (_, read) in zip(products, covered, strict=True))
        else:
            first = _added(left, covered)
            b = _columns(first, first if right is left else _added(right, covered), weight)
        a = None
        if not shares.seen_before and len(layers[0].places) > 1:
            a = self._inputs(left, [out for out, _ in covered], layers[0].places[1].size, counts)
        if self.sharing == "backpack":  # it does not divide by the positions
            out, read = (min(1.0, sum(parts)) for parts in zip(*covered, strict=True))
            a, b = a if a is None or out == 1 else a / out, b if read == 1 else b / read**2
        b = b if columns.right is None else (b + b.mT) / 2
        positions = sum(k > 0 for k in counts) if self.sharing == "reduce" else sum(counts)
        return Factors(b, a, positions, len(counts), layers[0].places, joint, shares.leaf.shape, layers[0].blocks)

    def _inputs(
        self, operands: list[Operands], covered: list[float], rows: int, counts: Sequence[float]
    ) -> torch.Tensor:
        """`sum_n a a^T`; a diagonal where rows are picked, unless they are averaged first."""
        found = []
        for o, out in zip(operands, covered, strict=True):
            picked, like = o.picked, o.s
            if self.sharing == "reduce" and picked is not None:
                none = like.new_zeros(len(picked), rows + 1)
                part = none.scatter_add(1, picked, torch.ones_like(picked, dtype=like.dtype))[:, :-1]
            elif self.sharing == "reduce":
                assert o.a is not None
                part = o.a.sum(-1)
            elif picked is not None:
                part = torch.bincount(picked.flatten(), minlength=rows + 1)[:-1].to(like.dtype)
            else:
                assert o.a is not None or o.gram is not None
                part = outer(o.a) if o.gram is None else o.gram  # pyright: ignore[reportArgumentType]
            found.append(part if out == 1 else out * part)
        total = added(found)
        if self.sharing != "reduce":
            return total
        if len(set(counts)) == 1:
            return outer(total.unsqueeze(-1)) / (counts[0] or 1) ** 2
        each = total.new_tensor([k or 1 for k in counts]).reshape(-1, *[1] * (total.ndim - 1))
        return outer((total / each).unsqueeze(-1))

    def over_samples(self, a: State, b: State) -> State:
        return (None if a[0] is None or b[0] is None else a[0].joined(b[0], samples=True),)

    def over_columns(self, a: State, b: State) -> State:
        return (None if a[0] is None or b[0] is None else a[0].joined(b[0], samples=False),)

    def finish(self, state: State, found: Found) -> list[Any]:
        kept: Kept | None = state[0]
        if isinstance(kept, Refused):
            found.refused[kept.name] = kept.why
        if kept is None or isinstance(kept, Refused):
            return [None]
        if isinstance(kept, Diagonal):
            dims, shape = tuple(range(kept.values.ndim)), kept.values.shape
            return [Kronecker((kept.values.flatten(),), (dims,), shape, name=Of(kept.name))]
        return [nearest([self._matrix(factors, Of(kept.name), found) for factors in kept.roles.values()])]

    def _matrix(self, found: Factors, name: Of, known: Found) -> Kronecker:
        shape, dims, blocks = found.shape, [p.dims for p in found.places], found.blocks
        if found.a is None:
            return Kronecker((found.b,), (dims[0],), shape, blocks=blocks, name=name)
        a = found.a / known.n
        if self.sharing != "backpack":  # which does not divide by the positions
            a = a * (found.samples / (found.positions or found.samples))
        if found.joint:
            sizes = [math.prod(x.shape[:-1]) for x in (found.b, a)] if blocks else [len(found.b), len(a)]
            count = math.prod(blocks or (1,))
            shape, blocks = torch.Size([sizes[0], sizes[1] // count]), (count, 1) if blocks else None
            return Kronecker((found.b, a), ((0,), (1,)), shape, blocks=blocks, name=name)
        pairs = sorted(zip(dims, (found.b, a), strict=True), key=lambda pair: pair[0])
        groups, factors = zip(*pairs, strict=True)
        return Kronecker(factors, groups, shape, blocks=blocks, name=name)


class ChainFactors(KroneckerFactors):
    """The factors of KFRA, whose recursion needs all samples and outputs at once."""

    axes = ()


class CorrectedFactors(KroneckerFactors):
    """The factors, and in a second stage the curvature in their eigenbasis."""

    stages = 2
    axes = ("outputs", "params")

    def then(self, results: dict[int, list[Any]]) -> Reduction:
        bases = {i: None if one is None else basis_of(one) for i, (one,) in results.items()}
        return InEigenbasis(bases, self.joined)


def _added(operands: list[Operands], covered: list[tuple[float, float]]) -> torch.Tensor:
    """`sum_r s` over all positions of all uses, as if there were one."""
    sums = [x.s.sum(-1, keepdim=True) for x in operands]
    return summed(s if read == 1 else read * s for s, (_, read) in zip(sums, covered, strict=True))


def _columns(s: torch.Tensor, other: torch.Tensor, weight: torch.Tensor | None) -> torch.Tensor:
    """`sum_vnr weight[v, n] s[v, n, :, r] other[v, n, :, r]^T`"""
    if weight is None:
        return outer(s.flatten(0, 1), None if other is s else other.flatten(0, 1))
    scaled = s * weight.to(s.dtype).reshape(*weight.shape, *[1] * (s.ndim - 2))
    return outer(scaled.flatten(0, 1), other.flatten(0, 1))
