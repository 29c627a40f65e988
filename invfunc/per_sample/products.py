"""Products of the shares of samples with those of others, of one run or of two."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from invfunc import thresholds
from invfunc._torch.functorch import transforming
from invfunc._torch.precision import doubled, has_float64
from invfunc._torch.values import fake
from invfunc.linear_algebra.contract import (
    Term,
    contract,
    cost,
    instantiated,
    joined,
    largest,
    narrowed,
    paired,
    present,
    summed,
)
from invfunc.operations.factors import Part
from invfunc.operations.factors.recipe import grouped
from invfunc.per_sample.cotangents import length
from invfunc.per_sample.factor import Factor
from invfunc.per_sample.table import Table
from invfunc.per_sample.terms import shape_of
from invfunc.plan import even


def products(factor: Factor, exact: bool = False) -> torch.Tensor:
    """`sum_p G[v, n, p] G[w, m, p]` as `[V, n, V, n]`; `exact`, in float64."""
    parts = factor.parts()

    def terms_of(part: Part) -> list[Term]:
        terms = factor.terms(part)
        return [(labels, doubled(x)) for labels, x in terms] if exact else terms

    rows: list[list[torch.Tensor]] = []
    for i, part in enumerate(parts):
        terms = terms_of(part)
        mirrored = [rows[j][i].permute(2, 3, 0, 1) for j in range(i)]
        others = [_products(factor, part, terms, factor, q, terms_of(q)) for q in parts[i + 1 :]]
        rows.append([*mirrored, _products(factor, part, terms, factor, part, terms), *others])
    return torch.cat([torch.cat(row, 3) for row in rows], 1) if len(parts) > 1 else rows[0][0]


def products_with(factor: Factor, last: int) -> torch.Tensor:
    """The products of all samples but the last so many with these: `[V, n - last, V, last]`."""
    first = factor.samples.count - last
    return _rectangle(factor, factor.parts(stop=first), factor, factor.parts(start=first))


def products_between(factor: Factor, other: Factor) -> torch.Tensor:
    """The products with the samples of another run, whose shares have the same layout: `[V, n, V, m]`."""
    return _rectangle(factor, factor.parts(), other, other.parts())


def _rectangle(factor: Factor, parts: list[Part], other: Factor, columns: list[Part]) -> torch.Tensor:
    rows = []
    for part in parts:
        terms = factor.terms(part)
        rows.append(joined([_products(factor, part, terms, other, q, other.terms(q)) for q in columns], 3))
    return joined(rows, 1)


def _products(
    factor: Factor, part: Part, terms: list[Term], of: Factor, other: Part, others: list[Term]
) -> torch.Tensor:
    """The products of the shares of two blocks of samples: `[V, b, V, c]`."""
    output, c = "VN" + factor.output, length(other)
    v, b, *_ = shape_of(terms, output, part)
    pairs, kept = paired(terms, others, factor.output), present("VN", terms)
    both = kept + present("VN", others).translate(str.maketrans("VN", "WM"))
    formed = instantiated(terms, present(output, terms)) + instantiated(others, present(output, others))
    formed += v * v * b * c * factor.entries(terms)
    room = thresholds.PRODUCTS * factor.budget
    exact = has_float64(terms[0][1].device) or not factor.cancels(pairs)
    if exact and not factor.lands and cost(pairs, both) < formed and largest(pairs, both) < room:
        return contract(factor.exact(pairs), both).to(terms[0][1].dtype).reshape(v, b, v, c)
    return _of_formed(factor, part, terms, of, other, others)


def _of_formed(
    factor: Factor, part: Part, terms: list[Term], of: Factor, other: Part, others: list[Term]
) -> torch.Tensor:
    """The same from shares that are formed, slice by slice."""
    output, c, room = "VN" + factor.output, length(other), thresholds.PRODUCTS * factor.budget
    v, b, *_ = shape_of(terms, output, part)
    free = factor.output[1:] if factor.lands else factor.output  # entries that land in rows stay together
    last = next((c for c in reversed(free) if any(c in labels for labels, _ in terms)), "")
    width, same = shape_of(terms, last)[0] if last else 1, others is terms
    shared = None if factor.table is None else _Shared.of(factor.table, part, None if same else other, of)
    entries = factor.entries(terms)
    if shared is not None:
        entries = shared.size * entries // max(1, shared.rows.shape[1])
    sides = [(terms, part)] if same else [(terms, part), (others, other)]
    total = []
    for start, stop in even(width, max(1, room // (v * (b + c) * max(1, entries // max(1, width))))):
        shares = [_share(narrowed(some, last, start, stop) if last else some, output, at) for some, at in sides]
        alone = shared.alone(shares[0]) if shared is not None and same else None
        landed = shares if shared is None else [shared.landed(share, k) for k, share in enumerate(shares)]
        flat = [x.reshape(v * x.shape[1], -1) for x in landed]
        found = (flat[0] @ flat[-1].T).reshape(v, b, v, c)
        total.append(found if alone is None else found + alone)
    return summed(total)


def _share(terms: list[Term], output: str, part: Part) -> torch.Tensor:
    """`[V, b, *output]`, instantiated."""
    return contract(terms, present(output, terms)).reshape(shape_of(terms, output, part))


@dataclass(frozen=True)
class _Shared:
    """Where the entries of the samples land among the rows of a table that two samples have: what is elsewhere meets
    itself alone."""

    places: list[torch.Tensor]
    """Of one block of samples, or of two: `[b, u]`, behind the last for rows that one sample has."""
    size: int
    rows: torch.Tensor
    """Those of the first block."""
    count: int
    """The rows of the table."""

    @classmethod
    def of(cls, table: Table, part: Part, other: Part | None, of: Factor) -> _Shared:
        rows, count = table.rows(part), table.count
        others = None if other is None or of.table is None else of.table.rows(other)
        each = [rows] if others is None else [rows, others]
        sizes, every = [x.numel() for x in each], torch.cat([x.flatten() for x in each])
        if transforming() or fake(every):  # none can be left out
            size = min(count, len(every))
            place = every if size == count else grouped(every.unsqueeze(0))[0][0].masked_fill(every == count, size)
        else:
            found, place, times = every.unique(return_inverse=True, return_counts=True)
            if others is not None:  # of both
                first, second = (torch.zeros_like(times).index_fill(0, x, 1) for x in place.split(sizes))
                times = first + second
            there = (times > 1) & (found < count)
            size = int(there.sum())
            place = torch.where(there, there.cumsum(0) - 1, size)[place]
        places = [x.reshape(y.shape) for x, y in zip(place.split(sizes), each, strict=True)]
        return cls(places, size, rows, count)

    def landed(self, share: torch.Tensor, k: int) -> torch.Tensor:
        """The shares `[V, b, u, *rest]` of a block in the rows that are shared."""
        v, b, u, *rest = share.shape
        places = self.places[k].reshape(1, b, u, *[1] * len(rest)).expand(share.shape)
        return share.new_zeros(v, b, self.size + 1, *rest).scatter_add(2, places, share)[:, :, :-1]

    def alone(self, share: torch.Tensor) -> torch.Tensor:
        """The products of the columns of each sample with one another in all other rows: `[V, b, V, b]`."""
        own = ((self.places[0] == self.size) & (self.rows < self.count)).to(share.dtype)
        share = share.flatten(3) if share.ndim > 3 else share.unsqueeze(3)
        one = share * own.reshape(1, *own.shape, 1)
        products = torch.einsum("vnud,wnud->vwn", one, share)
        return products.diag_embed().permute(0, 2, 1, 3)
