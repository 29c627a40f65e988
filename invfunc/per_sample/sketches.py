"""Shares multiplied from both sides with narrow matrices, without being formed where their factors are there."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from invfunc import thresholds
from invfunc.linear_algebra.contract import Term, contract, joined, largest, present, squeezed, widened
from invfunc.operations.factors import Part
from invfunc.per_sample.cotangents import length
from invfunc.per_sample.factor import Factor


@dataclass(frozen=True)
class Projection:
    """What a parameter `[O, I]` is multiplied with: `first^T G rest`. Of a vector the rest is `[1, 1]`."""

    first: torch.Tensor
    """`[O, rows]`"""
    rest: torch.Tensor
    """`[I, columns]`"""

    def of(self, share: torch.Tensor) -> torch.Tensor:
        """The sketches `[b, rows * columns]` of shares `[b, *p]` that are there."""
        matrices = share.reshape(len(share), len(self.first), len(self.rest))
        return self.contracted([("Noi", matrices), ("oR", self.first), ("iC", self.rest)], len(share))

    def contracted(self, terms: list[Term], b: int) -> torch.Tensor:
        """The terms of b shares and of the sides, in the cheapest order: that of the factors first, each with its side,
        where these are narrow."""
        terms = squeezed(widened(terms))
        return contract(terms, present("NRC", terms)).reshape(b, -1)

    def over(self, sizes: list[int], labels: str) -> list[Term] | None:
        """The sides over labels that enumerate the entries of the parameter in their order; None if a label counts both
        rows and columns."""
        for k in reversed(range(len(sizes) + 1)):
            if math.prod(sizes[:k]) == len(self.first):
                first = self.first.reshape(*sizes[:k], self.first.shape[1])
                rest = self.rest.reshape(*sizes[k:], self.rest.shape[1])
                return [(labels[:k] + "R", first), (labels[k:] + "C", rest)]
        return None

    def at(self, entries: torch.Tensor, labels: str, picked: bool) -> list[Term] | None:
        """The sides over labels of which each combination is an entry of the parameter, or none (-1); None if a label
        counts both rows and columns. The first label of what is `picked` has to be there."""
        width = len(self.rest)
        rows, columns = (torch.where(entries < 0, -1, x) for x in (entries // width, entries % width))
        ins, outs = _along(columns), _along(rows)
        if picked and 0 not in ins:
            outs = sorted({0, *outs})
        if set(ins) & set(outs):
            return None
        found = []
        for x, side, axes, label in ((rows, self.first, outs, "R"), (columns, self.rest, ins, "C")):
            at = x[tuple(slice(None) if d in axes else 0 for d in range(x.ndim))]
            found.append(("".join(labels[d] for d in axes) + label, _behind(side)[at]))
        return found


def sketched(factor: Factor, sides: Projection, entries: torch.Tensor | None) -> torch.Tensor | None:
    """The sketches `[count, rows * columns]` of a factor of shares, which reads these entries of the parameter, or it
    itself if they are None; None if it is not a product of rows and columns."""
    if factor.recipe.own is not None or (laid := _laid(factor, sides, entries)) is None:
        return None
    room = thresholds.OPERANDS * factor.budget
    first, *others = parts = factor.samples.parts(factor.work, room)
    terms = _with_sides(factor, laid, first)
    size = largest(terms, present("NRC", terms)) // length(first)
    if size > factor.work and len(finer := factor.samples.parts(size, room)) > len(parts):
        return joined([sides.contracted(_with_sides(factor, laid, part), length(part)) for part in finer])
    found = [sides.contracted(terms, length(first))]
    return joined(found + [sides.contracted(_with_sides(factor, laid, part), length(part)) for part in others])


def _laid(factor: Factor, sides: Projection, entries: torch.Tensor | None) -> list[Term] | None:
    """The sides over the labels of a factor."""
    sizes = factor.sizes()
    if factor.lands:
        sizes[0] = len(factor.use.param)
    if entries is None:
        return sides.over(sizes, factor.output)
    return None if not entries.numel() else sides.at(entries.reshape(sizes), factor.output, factor.lands)


def _with_sides(factor: Factor, laid: list[Term], part: Part) -> list[Term]:
    """The terms of a factor for some samples, and those of the sides."""
    (rows, _), (columns, matrix) = laid
    if all(use.recipe.projected for use in factor.uses) and matrix.shape[0] > matrix.shape[-1]:
        last = factor.output[-1]
        if columns == last + "C" and last not in rows:
            return squeezed(widened([*factor.terms(part, matrix), laid[0]]))
    if factor.lands:  # each entry has the row that it is of, one behind the last has none
        picked = factor.recipe.rows(part, len(factor.use.param))
        laid = [("N" + c, _behind(x)[picked]) if c.startswith(factor.output[0]) else (c, x) for c, x in laid]
    return squeezed(widened([*factor.terms(part), *laid]))


def _behind(x: torch.Tensor) -> torch.Tensor:
    """A row of zeros behind the last one, which -1 picks, too."""
    return torch.cat([x, x.new_zeros(1, *x.shape[1:])])


def _along(x: torch.Tensor) -> list[int]:
    """The axes along which a tensor changes."""
    return [d for d in range(x.ndim) if bool((x.amax(d) != x.amin(d)).any())]
