"""Kronecker factors of the curvature of a parameter."""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from typing import Any

import torch

from invfunc import thresholds, tree
from invfunc.errors import ArgumentError
from invfunc.kronecker import Joint, Kronecker, Origin
from invfunc.linear_algebra.contract import outer, summed
from invfunc.operations.factors import Part
from invfunc.per_sample import Shares
from invfunc.per_sample.cotangents import Columns
from invfunc.per_sample.operands import Layer, Operands
from invfunc.per_sample.places import Place, Unfactored
from invfunc.reductions.block import Block, added
from invfunc.reductions.exchange import Exchange, Sums, filled, of_triangle, triangle
from invfunc.reductions.kept_factors import Diagonal, Factors, Kept, Refused
from invfunc.reductions.nearest import nearest
from invfunc.reductions.reduction import Found, Over, Shortcuts, State


@dataclass
class Used:
    """What an operation sends back and reads for some samples."""

    left: Operands
    right: Operands
    """The operands for the right sides of the columns; the same as `left` unless a column is a product of two."""
    out: float
    """The fraction of the factor that it sends back: if each operation reads a part, no part is to count twice."""
    read: float
    """The fraction of the other factor that it reads."""
    positions: Sequence[float]
    """How many positions each sample has."""


class KroneckerFactors(Block):
    """B, the sum over columns and samples of `s s^T`, and A, the mean over samples of `a a^T`."""

    rooted = "known"  # so that products are symmetric
    paired = thin = squares = counts = True
    sums = True  # of n samples each on its own

    def __init__(self, sharing: str, joint: bool, unsupported: str, most: float, degree: int | None = 1) -> None:
        """`most` is the largest dimension of a factor that is kept whole; `degree` the power of the loss's scale that B
        has, None if its n is not that of the samples reduced."""
        self.sharing, self.joined, self.unsupported, self.degree = sharing, joint, unsupported, degree
        self.most = most
        self.gaps = joint or unsupported == "skip"
        self.shortcuts: Shortcuts = "positions" if sharing == "expand" else "narrow"

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        (none,) = super().init(leaf, n, columns)
        inputs = float(n) if self.sharing == "backpack" else 0.0  # else samples count that are read
        return (replace(none, origin=replace(none.origin, inputs=inputs)),)

    def step(self, shares: Shares) -> State:
        if self.joined and shares.weight is not None:
            return (None,)
        name, shape = shares.name(shares.place), shares.leaf.shape
        if not isinstance(shares, Shares):  # of the core
            return (Kept(name, shares.kronecker(self.sharing, self.joined, self.most)),)
        if any(use.derived.repeated for use in shares.uses):
            raise ArgumentError(
                f"a part of one sample does not show whether f repeats {name} for the samples (expand, repeat), which "
                "decides what its K-factors are. Take fewer chunks over samples, so that each has two at least."
            )
        try:
            return (Kept(name, self._factors(shares)),)
        except Unfactored as why:
            if sum(n != 1 for n in shape) < 2:  # its block is no larger than a factor of a matrix
                places = [Place(tuple(range(len(shape))), shape.numel())]
                block = shares.square_sum().flatten() if shape.numel() > self.most else shares.outer()
                whole = Factors(block, None, 1.0, places, "", shape)
                return (Kept(name, {"whole": whole}),)
            if self.unsupported == "skip":
                return (None,)
            if self.unsupported == "diagonal":
                return (Diagonal(name, {}, shares.square_sum()),)
            return (Refused(name, {}, str(why)),)

    def matrices(self, shares: Shares) -> list[list[int]]:
        if self.joined and shares.weight is not None:
            return []
        bias, shape = self.joined and shares.bias is not None, shares.leaf.shape
        try:
            layers = [Layer(shares, use, bias) for use in shares.uses]
            for layer in layers:
                layer.look(shares.columns.left, slice(0, 1))
            _by_role(layers)
        except Unfactored:
            vector = sum(n != 1 for n in shape) < 2
            kept = [shape.numel()] if self.unsupported == "diagonal" else []
            return [self.form(shape.numel())] if vector else [kept] if kept else []
        found, lead = dict[tuple[int, ...], list[int]](), [math.prod(layers[0].blocks)] if layers[0].blocks else []
        for layer in layers:
            for k, place in enumerate(layer.places):
                rows = k and layer.picked is not None and self.sharing != "reduce"
                form = [place.size] if rows else self.form(place.size + (k and bias))
                found[place.dims] = max(found.get(place.dims, form), form, key=len)
        return [[*lead, *form] for _, form in sorted(found.items())]

    def _factors(self, shares: Shares) -> dict[Hashable, Factors]:
        """The sums of outer products of one parameter, in each of its roles."""
        bias = shares.name(shares.bias) if self.joined and shares.bias is not None else ""
        layers = [Layer(shares, use, bool(bias), read=not shares.seen_before) for use in shares.uses]
        known, key = shares.columns.known, (self.sharing, id(shares.uses[0].call))
        alone = len(layers) == 1
        same = alone and shares.weight is not None and key in known  # as the weight's
        if same or not alone:
            for layer in layers:
                layer.look(shares.columns.left, shares.samples.parts(1, 1)[0])
        if same:
            b = known[key]
            return {layers[0].role: Factors(b, None, 1.0, layers[0].places, "", shares.leaf.shape)}
        parts = shares.samples.parts(sum(f.work for f in shares.factors), thresholds.OPERANDS * shares.budget)
        found: dict[Hashable, Factors] = {}
        for some in _by_role(layers):
            each = (self._of(shares, some, part, bias) for part in parts)
            total = reduce(lambda kept, more: kept.joined(more, samples=True), each)
            found[some[0].role] = total  # known by now
        if alone and shares.bias is not None and layers[0].blocks is None:
            known[key] = found[layers[0].role].b
        return found

    def _of(self, shares: Shares, layers: list[Layer], part: Part, bias: str) -> Factors:
        used = [self._used(layer, shares.columns, part) for layer in layers]
        counts = [sum(each) for each in zip(*(u.positions for u in used), strict=True)]
        weight = None if shares.columns.weight is None else shares.columns.weight[:, part]
        a, places = None, layers[0].places
        diagonal = places[0].size > self.most
        b = _of_hessian(used[0], diagonal) if shares.columns.of_hessian else self._sent(used, weight, diagonal)
        if not shares.seen_before and len(places) > 1:
            a = self._inputs(used, places[1].size, counts, places[1].size + bool(bias) > self.most)
        if self.sharing == "backpack":  # it does not divide by the positions
            out, read = min(1.0, sum(u.out for u in used)), min(1.0, sum(u.read for u in used))
            a, b = a if a is None or out == 1 else a / out, b if read == 1 else b / read**2
        positions = sum(k > 0 for k in counts) if self.sharing == "reduce" else sum(counts)
        return Factors(b, a, positions, places, bias, shares.leaf.shape, layers[0].blocks)

    def _used(self, layer: Layer, columns: Columns, part: Part) -> Used:
        apart = self.sharing == "reduce" or layer.shares.leaf.numel() > self.most  # no product of all that is read
        left = (layer.operands if apart else layer.products)(columns.left, part)
        right = left if columns.right is None else layer.operands(columns.right, part)
        out, read = layer.covered
        return Used(left, right, out, read, [k * out * read for k in layer.positions(left, part)])

    def _sent(self, used: list[Used], weight: torch.Tensor | None, diagonal: bool) -> torch.Tensor:
        """`sum_vnr s s^T`, symmetric also where a column is a product of two, or its diagonal."""
        same = all(u.right is u.left for u in used)
        if self.sharing == "expand":
            b = summed(_scaled(_columns(u.left.s, u.right.s, weight, diagonal), u.read) for u in used)
        else:
            first = _added((u.left, u.read) for u in used)
            b = _columns(first, first if same else _added((u.right, u.read) for u in used), weight, diagonal)
        return b if same or diagonal else (b + b.mT) / 2

    def _inputs(self, used: list[Used], rows: int, counts: Sequence[float], diagonal: bool) -> torch.Tensor:
        """`sum_n a a^T`, or its diagonal; that is all where rows are picked, unless they are averaged first."""
        if self.sharing != "reduce":
            return added([_scaled(_products(u.left, rows, diagonal), u.out) for u in used])
        total = added([_scaled(_read(u.left, rows), u.out) for u in used])
        if len(set(counts)) == 1:
            return outer(total.unsqueeze(-1), diagonal=diagonal) / (counts[0] or 1) ** 2
        each = total.new_tensor([k or 1 for k in counts]).reshape(-1, *[1] * (total.ndim - 1))
        return outer((total / each).unsqueeze(-1), diagonal=diagonal)

    def scaled(self, state: State, by: float) -> State:
        return (state[0].scaled(by**2) if isinstance(state[0], Kept) else state[0],)

    def merge(self, a: State, b: State, over: Over) -> State:
        if a[0] is None or b[0] is None:
            return (None,)
        if isinstance(a[0], Kronecker) or isinstance(b[0], Kronecker):  # of samples that do not reach it
            return b if isinstance(a[0], Kronecker) else a
        return (a[0].joined(b[0], samples=over == "samples"),)

    def across(self, place: int, own: State, each: Sequence[State]) -> Exchange:
        """Of symmetric matrices, a triangle says all."""
        whole = reduce(partial(self.merge, over="samples"), each)
        if not isinstance(whole[0], Kept) or isinstance(whole[0], Refused):
            return own if isinstance(whole[0], Kronecker) else whole
        numbers, form = tree.separate(filled(whole, own))
        symmetric = not isinstance(whole[0], Diagonal)
        sums = yield Sums([triangle(x) for x in numbers] if symmetric else numbers)
        return form.join(map(of_triangle, sums, numbers) if symmetric else sums)

    def finish(self, state: State, found: Found) -> list[Any]:
        kept: Kept | Kronecker | None = state[0]
        if isinstance(kept, Refused):
            found.refused[kept.name] = kept.why
            return [None]
        if kept is None or isinstance(kept, Kronecker):
            return [kept]
        if isinstance(kept, Diagonal):
            dims, shape = tuple(range(kept.values.ndim)), kept.values.shape
            return [Kronecker((kept.values.flatten(),), (dims,), shape, origin=self._origin(kept, found))]
        origin = self._origin(kept, found)
        return [nearest([self._matrix(factors, origin, found) for factors in kept.roles.values()])]

    def _origin(self, kept: Kept, found: Found) -> Origin:
        return Origin(kept.name, found.n if self.sums else None, degree=self.degree)

    def _matrix(self, found: Factors, origin: Origin, known: Found) -> Kronecker:
        shape, dims, blocks = found.shape, [p.dims for p in found.places], found.blocks
        if found.a is None:
            return Kronecker((_flat(found.b),), (dims[0],), shape, blocks=blocks, origin=origin)
        inputs = float(known.n if self.sharing == "backpack" else found.positions)  # it does not divide by positions
        a = found.a / (inputs or known.n)
        if found.bias:
            joint = Joint(found.bias, shape, dims[0], dims[1], blocks or (1,) * len(shape))
            origin = replace(origin, inputs=inputs, read=1, joint=joint)
            sizes = [math.prod(x.shape[:-1]) for x in (found.b, a)] if blocks else [len(found.b), len(a)]
            count = math.prod(blocks or (1,))
            shape, blocks = torch.Size([sizes[0], sizes[1] // count]), (count, 1) if blocks else None
            return Kronecker((_flat(found.b), _flat(a)), ((0,), (1,)), shape, blocks=blocks, origin=origin)
        pairs = sorted(zip(dims, (_flat(found.b), _flat(a)), strict=True), key=lambda pair: pair[0])
        groups, factors = zip(*pairs, strict=True)
        origin = replace(origin, inputs=inputs, read=int(dims[0] <= dims[1]))
        return Kronecker(factors, groups, shape, blocks=blocks, origin=origin)


class ChainFactors(KroneckerFactors):
    """The factors of KFRA, whose recursion needs all samples and outputs at once."""

    axes = ()
    sums = False


def _by_role(layers: list[Layer]) -> list[list[Layer]]:
    """Those that read the parameter in the same role together; where there are several, they have been looked at."""
    roles: dict[Hashable, list[Layer]] = {}
    for layer in layers:
        roles.setdefault(layer.role, []).append(layer)
    if len(layers) > 1 and len({(frozenset(p.dims for p in layer.places), layer.blocks) for layer in layers}) > 1:
        raise Unfactored("operations that read it divide its dimensions differently")
    return list(roles.values())


def _of_hessian(used: Used, only_diagonal: bool) -> torch.Tensor:
    """The sum of the parts of a Hessian at all positions, from the root of its diagonal and what is beside it."""
    diagonal = outer(used.left.s.flatten(0, 1), diagonal=True)
    if only_diagonal or used.right is used.left:
        return diagonal if only_diagonal else diagonal.diag()
    b = -outer(used.right.s.flatten(0, 1))
    b.diagonal().copy_(diagonal)
    return b


def _scaled(x: torch.Tensor, by: float) -> torch.Tensor:
    return x if by == 1 else by * x


def _added(operands: Iterable[tuple[Operands, float]]) -> torch.Tensor:
    """`sum_r s` over all positions of all uses, as if there were one."""
    return summed(_scaled(x.s.sum(-1, keepdim=True), read) for x, read in operands)


def _read(x: Operands, rows: int) -> torch.Tensor:
    """`sum_r a`, of each sample."""
    if x.picked is None:
        assert x.a is not None
        return x.a.sum(-1)
    none = x.s.new_zeros(len(x.picked), rows + 1)
    return none.scatter_add(1, x.picked, torch.ones_like(x.picked, dtype=x.s.dtype))[:, :-1]


def _products(x: Operands, rows: int, diagonal: bool) -> torch.Tensor:
    """`sum_nr a a^T`, or its diagonal."""
    if x.picked is not None:
        picked = x.picked.flatten()
        return picked.new_zeros(rows + 1).scatter_add(0, picked, torch.ones_like(picked))[:-1].to(x.s.dtype)
    if x.gram is not None:
        return x.gram
    assert x.a is not None
    return outer(x.a, diagonal=diagonal)


def _flat(x: torch.Tensor) -> torch.Tensor:
    """A factor, of which the diagonals `[g, k, 1]` of blocks become `[g, k]`."""
    return x.squeeze(-1) if x.ndim == 3 and x.shape[1] > 1 else x


def _columns(s: torch.Tensor, other: torch.Tensor, weight: torch.Tensor | None, diagonal: bool) -> torch.Tensor:
    """`sum_vnr weight[v, n] s[v, n, :, r] other[v, n, :, r]^T`, or its diagonal."""
    if weight is None:
        return outer(s.flatten(0, 1), None if other is s else other.flatten(0, 1), diagonal)
    scaled = s * weight.to(s.dtype).reshape(*weight.shape, *[1] * (s.ndim - 2))
    return outer(scaled.flatten(0, 1), other.flatten(0, 1), diagonal)
