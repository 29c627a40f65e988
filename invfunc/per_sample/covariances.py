"""Products of the columns of each sample with one another, weighted entry by entry."""

from __future__ import annotations

import torch

from invfunc import thresholds
from invfunc.contract import Term, contract, joined, largest, present, side_by_side, squeezed, widened
from invfunc.operations.factors import Part
from invfunc.per_sample.cotangents import length
from invfunc.per_sample.factor import Factor


def covariances(factor: Factor, weight: torch.Tensor) -> torch.Tensor:
    """`sum_p weight[p] G[v, n, p] G[w, n, p]` as `[count, V, V]`; there is a weight for each entry that is used."""
    cotangent = factor.columns.left[factor.use.site]
    assert cotangent is not None
    budget, columns = thresholds.PRODUCTS * factor.budget, len(cotangent)
    one, *_ = factor.samples.parts(1, 1)
    terms = _pairs(factor, weight, one)
    size = largest(terms, present("NVW", terms))
    found = []
    for part in factor.samples.parts(max(size, factor.work), budget):
        terms = _pairs(factor, weight, part)
        products = contract(terms, present("NVW", terms)).to(weight.dtype)
        found.append(products.reshape(length(part), columns, columns))
    return joined(found)


def _pairs(factor: Factor, weight: torch.Tensor, part: Part) -> list[Term]:
    """The terms of the products."""
    output, own = factor.output, factor.recipe.own
    pair = factor.exact(side_by_side(factor.terms(part), output))
    if factor.lands:  # each row once in a sample, or one behind the last
        rows = torch.cat([weight, weight.new_zeros(1, *weight.shape[1:])])[factor.recipe.rows(part, len(weight))]
        given = "N" + output, rows.reshape(length(part), *factor.sizes())
    else:
        weight = weight if own is None else own.expose(weight, factor.samples.n)
        given = output, weight.reshape(factor.sizes())
    return squeezed(widened([*pair, given]))
