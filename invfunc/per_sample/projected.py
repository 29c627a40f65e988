"""Products of the columns of each sample with vectors that are the same for all samples."""

from __future__ import annotations

import torch

from invfunc import thresholds
from invfunc.linear_algebra.contract import Term, contract, joined, largest, present, squeezed, widened
from invfunc.operations.factors import Part
from invfunc.per_sample.cotangents import length
from invfunc.per_sample.factor import Factor


def projected(factor: Factor, vectors: torch.Tensor) -> torch.Tensor:
    """`sum_p G[v, n, p] vectors[p, k]` as `[count, V, k]`; there is a row of vectors for each entry that is used."""
    cotangent = factor.columns.left[factor.use.site]
    assert cotangent is not None
    columns, (one, *_) = len(cotangent), factor.samples.parts(1, 1)
    terms = _with(factor, vectors, one)
    size = max(factor.work, largest(terms, present("NVK", terms)))
    found = []
    for part in factor.samples.parts(size, thresholds.PRODUCTS * factor.budget):
        terms = _with(factor, vectors, part)
        found.append(contract(terms, present("NVK", terms)).reshape(length(part), columns, vectors.shape[-1]))
    return joined(found)


def _with(factor: Factor, vectors: torch.Tensor, part: Part) -> list[Term]:
    """The terms of the shares, and of the vectors at the entries that they are of."""
    own, sizes, labels = factor.recipe.own, factor.sizes(), factor.output + "K"
    if factor.lands:  # each row as often as the sample has it, or one behind the last
        behind = torch.cat([vectors, vectors.new_zeros(1, *vectors.shape[1:])])
        vectors, sizes = behind[factor.recipe.rows(part, len(vectors))], [length(part), *sizes]
        labels = "N" + labels
    elif own is not None:
        vectors = own.expose(vectors, factor.samples.n)
    return squeezed(widened([*factor.terms(part), (labels, vectors.reshape(*sizes, vectors.shape[-1]))]))
