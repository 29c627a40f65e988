"""Products of the shares of samples with those of others, of one run or of two."""

from __future__ import annotations

import torch

from invfunc import thresholds
from invfunc._torch.precision import doubled, has_float64
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
from invfunc.per_sample.cotangents import length
from invfunc.per_sample.factor import Factor
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
    free = factor.output[1:] if factor.lands else factor.output  # entries that land in rows stay together
    last = next((c for c in reversed(free) if any(c in labels for labels, _ in terms)), "")
    width = shape_of(terms, last)[0] if last else 1
    rows = factor.use.param.shape[0] if factor.lands else 1
    per = v * (b + c) * max(1, rows * factor.entries(terms) // max(1, width))
    total = []
    for start, stop in even(width, max(1, room // per)):
        flat = []
        for each, some, where in ((factor, terms, part), (of, others, other)):
            some = narrowed(some, last, start, stop) if last else some
            share = contract(some, present(output, some)).reshape(shape_of(some, output, where))
            flat.append(each.landed_each(share, where).reshape(v * length(where), -1))
            if others is terms:
                break
        total.append(flat[0] @ flat[-1].T)
    return summed(total).reshape(v, b, v, c)
