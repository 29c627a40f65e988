"""Products of the columns of each sample with one another, weighted entry by entry."""

from __future__ import annotations

import torch

from invfunc import thresholds
from invfunc.linear_algebra.contract import (
    Term,
    contract,
    joined,
    largest,
    present,
    side_by_side,
    squares_directly,
    squeezed,
    widened,
)
from invfunc.operations.factors import Part
from invfunc.per_sample.cotangents import length
from invfunc.per_sample.factor import Factor


def covariances(factor: Factor, weight: torch.Tensor) -> torch.Tensor:
    """`sum_p weight[p] G[v, n, p] G[w, n, p]` as `[count, V, V]`; there is a weight for each entry that is used."""
    cotangent = factor.columns.left[factor.use.site]
    assert cotangent is not None
    columns, (one, *_) = len(cotangent), factor.samples.parts(1, 1)
    terms = _pairs(factor, weight, one)
    size = max(factor.work, largest(terms, present("NVW", terms)), *(x.numel() for _, x in terms))
    found = []
    for part in factor.samples.parts(size, thresholds.PRODUCTS * factor.budget):
        terms = _pairs(factor, weight, part)
        products = contract(terms, present("NVW", terms)).to(weight.dtype)
        found.append(products.reshape(length(part), columns, columns))
    return joined(found)


def _pairs(factor: Factor, weight: torch.Tensor, part: Part) -> list[Term]:
    """The terms of the products: of the factors, or of the shares where it is cheaper to form them."""
    output, own = factor.output, factor.recipe.own
    terms = [(labels, x.to(torch.promote_types(x.dtype, weight.dtype))) for labels, x in factor.terms(part)]
    instance = present("NV" + output, terms)
    if len(terms) > 1 and not squares_directly(terms, output, instance, "NV"):
        terms = [(instance, contract(terms, instance))]
    pair = factor.exact(side_by_side(terms, output))
    if factor.lands:  # each row once in a sample, or one behind the last
        rows = torch.cat([weight, weight.new_zeros(1, *weight.shape[1:])])[factor.recipe.rows(part, len(weight))]
        given = "N" + output, rows.reshape(length(part), *factor.sizes())
    else:
        weight = weight if own is None else own.expose(weight, factor.samples.n)
        given = output, weight.reshape(factor.sizes())
    return squeezed(widened([*pair, given]))
