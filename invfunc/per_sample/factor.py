"""The factored share of a parameter at one place of a function, contracted only as far as a statistic asks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from invfunc import thresholds
from invfunc.linear_algebra.contract import (
    Term,
    cancel,
    contract,
    cost,
    crosses,
    instantiated,
    joined,
    largest,
    narrowed,
    paired,
    present,
    squares_directly,
    squeezed,
    stacked,
    summed,
    twice,
    widened,
)
from invfunc.operations.factors import Part
from invfunc.per_sample.cotangents import Columns, Cotangents, Samples, length
from invfunc.per_sample.squares import shifted_moments, squared
from invfunc.plan import even
from invfunc.recording.tags import ParameterUse


@dataclass
class Factor:
    """`G[v, n, *param]` at one operation, or at several alike: those are one with one more position to sum over."""

    uses: list[ParameterUse]
    columns: Columns
    samples: Samples
    budget: int
    """How many numbers an intermediate tensor may have."""

    def __post_init__(self) -> None:
        self.use, self.recipe = self.uses[0], self.uses[0].recipe
        self.output, self.lands = self.recipe.output, self.recipe.picks is not None
        self.work = len(self.uses) * self.recipe.work
        self.apart = "S" * bool(self.recipe.cells) + self.output
        self.kept = "N" * self.lands + self.output
        """What is left of a sum over samples, whose entries may still have to land in the rows of each."""

    # What statistics are made of: all are in the layout of the parameter used

    def dense(self, cotangents: Cotangents, part: Part) -> torch.Tensor:
        """`[V, b, *param]`, instantiated."""
        terms, output = self._terms(cotangents, part), "VN" + self.output
        share = contract(terms, present(output, terms)).reshape(_sizes(terms, output, part))
        share = share.clone() if len(terms) == 1 and self.recipe.joins else share  # of its own, not the cotangent
        return self._shaped(self._landed_each(share, part), 2)

    def weighted(self, weights: torch.Tensor | None = None) -> torch.Tensor:
        """`sum_n weights[n] G[v, n]`, for the only column; of weights 1, if there are none."""
        parts, sent, total = self._parts(), self.columns.left[self.use.site], []
        own = [None] * len(parts) if weights is None else weights.split([length(part) for part in parts])
        for part, w in zip(parts, own, strict=True):
            found = None if sent is None or len(self.uses) > 1 else self.recipe.weighted(sent[0][part], part, w)
            if found is None:
                terms = self._terms(self.columns.left, part)
                terms += [] if w is None else squeezed([("N", w.to(terms[0][1].dtype))])
                found = self._shaped(self._sum(terms, part), 0)
            total.append(found)
        return summed(total)

    def square_sum(self, each: bool = False) -> torch.Tensor:
        """`sum_v weight[v, n] G[v, n]^2`, or the product of left and right in place of the square; summed over samples,
        or `[count, *param]` of each."""
        columns, found = self.columns, []
        for part, terms, direct in self._blocks("N" + self.output if each else self.kept):
            right = terms if columns.right is None else self._terms(columns.right, part)
            weight = squeezed(widened([("VNS"[: w.ndim], w[:, part]) for w in (columns.weight,) if w is not None]))
            kept = present("N" + self.output if each else self.kept, terms)
            if direct:  # nothing large is formed
                pair = self.exact(twice(terms, right, self.apart))
            else:
                instance = present("NV" + self.apart, terms)
                share = contract(terms, instance)
                other = None if columns.right is None else contract(right, instance)
                pair = [(instance, squared(share, other, fresh=len(terms) > 1))]
            more = contract(widened(pair + weight), kept).to(terms[0][1].dtype)
            if each:
                more = more.reshape(1, *_sizes(terms, "N" + self.output, part))
                found.append(self._landed_each(more, part)[0])
            else:
                found.append(self._landed(more, terms, part))
        return self._shaped(joined(found), 1) if each else self._shaped(summed(found), 0)

    def norms(self) -> torch.Tensor:
        """`sum_p G[n, p]^2` of each sample: `[count]`."""
        return joined([norms for _, norms in self._norms(with_sums=False)])

    def sum_and_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_n G[n]` and `sum_p G[n, p]^2` of the only column."""
        sums, norms = zip(*self._norms(with_sums=True), strict=True)
        return self._shaped(summed(sums), 0), joined([*norms])

    def _norms(self, with_sums: bool) -> Iterator[tuple[Any, torch.Tensor]]:
        """Perhaps the sums of the shares of blocks of samples, and their norms: shares are formed once for both."""
        for part, terms, direct in self._blocks("N"):
            if direct:  # the "ghost norm": products of positions with positions
                norms = contract(self.exact(twice(terms, terms, self.output)), present("N", terms)).clamp(min=0)
                yield (self._sum(terms, part) if with_sums else None), norms.to(terms[0][1].dtype).reshape(length(part))
            else:
                share = contract(terms, present("N" + self.output, terms)).reshape(length(part), -1)
                total = share.sum(0).reshape(_sizes(terms, self.output)) if with_sums else None
                yield total, squared(share, fresh=len(terms) > 1).sum(1)

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_n G[n]` and `sum_n (G[n] - mean G)^2` of the only column, without cancellation."""
        if self.lands:
            total, centred = self._moments_in_rows()
        else:
            parts, terms, direct = self._way("N" + self.output, self.output)
            shares = (self._share(terms if i == 0 else None, part) for i, part in enumerate(parts))
            wide = direct and cancel(terms)
            total, centred = self._wide_moments(parts, terms) if wide else shifted_moments(shares)
        return self._shaped(total, 0), self._shaped(centred, 0)

    def products(self) -> torch.Tensor:
        """`sum_p G[v, n, p] G[w, m, p]` as `[V, n, V, n]`."""
        parts = self._parts()
        rows: list[list[torch.Tensor]] = []
        for i, part in enumerate(parts):
            terms = self._terms(self.columns.left, part)
            mirrored = [rows[j][i].permute(2, 3, 0, 1) for j in range(i)]
            others = [self._products(part, terms, self, q, self._terms(self.columns.left, q)) for q in parts[i + 1 :]]
            rows.append([*mirrored, self._products(part, terms, self, part, terms), *others])
        return torch.cat([torch.cat(row, 3) for row in rows], 1) if len(parts) > 1 else rows[0][0]

    def products_with(self, last: int) -> torch.Tensor:
        """The products of all samples but the last so many with these: `[V, n - last, V, last]`."""
        first = self.samples.count - last
        return self._rectangle(self._parts(stop=first), self, self._parts(start=first))

    def products_between(self, other: Factor) -> torch.Tensor:
        """The products with the samples of another run, whose shares have the same layout: `[V, n, V, m]`."""
        return self._rectangle(self._parts(), other, other._parts())

    def layout(self) -> tuple:
        """What the shares of two runs have to have in common so that their terms can be multiplied."""
        one = self._terms(self.columns.left, slice(0, 1))
        return self.output, self.lands, self.use.param.shape, _sizes(one, self.output[self.lands :])

    def _parts(self, start: int = 0, stop: int | None = None) -> list[Part]:
        return self.samples.parts(self.work, thresholds.OPERANDS * self.budget, start, stop)

    def _rectangle(self, parts: list[Part], other: Factor, columns: list[Part]) -> torch.Tensor:
        rows = []
        for part in parts:
            terms = self._terms(self.columns.left, part)
            each = ((q, other._terms(other.columns.left, q)) for q in columns)
            rows.append(joined([self._products(part, terms, other, q, others) for q, others in each], 3))
        return joined(rows, 1)

    def _products(self, part: Part, terms: list[Term], of: Factor, other: Part, others: list[Term]) -> torch.Tensor:
        """The products of the shares of two blocks of samples, perhaps of another run: `[V, b, V, c]`."""
        output, c = "VN" + self.output, length(other)
        v, b, *_ = _sizes(terms, output, part)
        pairs, kept = paired(terms, others, self.output), present("VN", terms)
        both = kept + present("VN", others).translate(str.maketrans("VN", "WM"))
        formed = instantiated(terms, present(output, terms)) + instantiated(others, present(output, others))
        formed += v * v * b * c * self._entries(terms)
        room = thresholds.PRODUCTS * self.budget
        if not self.lands and cost(pairs, both) < formed and largest(pairs, both) < room:
            return contract(self.exact(pairs), both).to(terms[0][1].dtype).reshape(v, b, v, c)
        free = self.output[1:] if self.lands else self.output  # entries that land in rows stay together
        last = next((c for c in reversed(free) if any(c in labels for labels, _ in terms)), "")
        width = _sizes(terms, last)[0] if last else 1
        rows = self.use.param.shape[0] if self.lands else 1
        per = v * (b + c) * max(1, rows * self._entries(terms) // max(1, width))
        total = []
        for start, stop in even(width, max(1, room // per)):
            flat = []
            for factor, some, where in ((self, terms, part), (of, others, other)):
                some = narrowed(some, last, start, stop) if last else some
                share = contract(some, present(output, some)).reshape(_sizes(some, output, where))
                flat.append(factor._landed_each(share, where).reshape(v * length(where), -1))
                if others is terms:
                    break
            total.append(flat[0] @ flat[-1].T)
        return summed(total).reshape(v, b, v, c)

    # Blocks of samples

    def terms(self, part: Part, matrix: torch.Tensor | None = None) -> list[Term]:
        """The factors of the shares of some samples; with a matrix, of projected ones."""
        return self._terms(self.columns.left, part, matrix)

    def sizes(self) -> list[int]:
        """How many values the labels of the output have: those of each picked row, where it picks rows."""
        return _sizes(self._terms(self.columns.left, slice(0, 1)), self.output)

    def _way(self, instance: str, kept: str) -> tuple[list[Part], list[Term], bool]:
        """Blocks of samples, the terms of the first, and whether the square is cheaper without forming a share."""
        cotangent = self.columns.left[self.use.site]
        assert cotangent is not None
        shares = cotangent.shape[0] * max(1, self.recipe.cells) * self.use.param.numel()
        size = self.work + len(self.uses) * cotangent[:, 0].numel() + shares
        parts = self.samples.parts(size, self.budget // thresholds.SHARES)
        terms = self._terms(self.columns.left, parts[0])
        return parts, terms, self.lands or squares_directly(terms, self.apart, instance, kept)

    def exact(self, pair: list[Term]) -> list[Term]:
        """The pair in float64 where sums of its products may cancel."""
        wide = cancel(pair) and crosses(pair, self.apart)
        return [(labels, x.double()) for labels, x in pair] if wide else pair

    def _blocks(self, kept: str) -> Iterator[tuple[Part, list[Term], bool]]:
        parts, terms, direct = self._way("NV" + self.apart, kept)
        if direct and len(parts) > 1:
            size = largest(twice(terms, terms, self.apart), present(kept, terms)) // length(parts[0])
            parts = self.samples.parts(max(self.work, size), thresholds.PRODUCTS * self.budget)
            terms = self._terms(self.columns.left, parts[0])
        for i, part in enumerate(parts):
            yield part, terms if i == 0 else self._terms(self.columns.left, part), direct

    def _terms(self, cotangents: Cotangents, part: Part, matrix: torch.Tensor | None = None) -> list[Term]:
        reached = [(use, cotangent) for use in self.uses if (cotangent := cotangents[use.site]) is not None]
        built = [use.recipe.terms(cotangent[:, part], part, matrix) for use, cotangent in reached]
        return squeezed(widened(built[0] if len(built) == 1 else stacked(built)))

    def _sum(self, terms: list[Term], part: Part) -> torch.Tensor:
        """The sum over samples of what the terms are the factors of, `[*output]`."""
        return self._landed(contract(terms, present(self.kept, terms)), terms, part)

    def _entries(self, terms: list[Term]) -> int:
        return math.prod(_sizes(terms, self.output))

    # Moments

    def _share(self, terms: list[Term] | None, part: Part) -> torch.Tensor:
        """`[b, *output]` of the only column."""
        terms = self._terms(self.columns.left, part) if terms is None else terms
        output = "N" + self.output
        return contract(terms, present(output, terms)).reshape(_sizes(terms, output, part))

    def _wide_moments(self, parts: list[Part], first: list[Term]) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum G^2 - (sum G)^2 / n` in float64, whose rounding is 1e9 times finer than that of the float32 shares.

        The first are the terms of the first of some blocks of samples, which may be larger here.
        """
        if len(parts) > 1:
            parts = self.samples.parts(self.work, thresholds.OPERANDS * self.budget)
            first = self._terms(self.columns.left, parts[0])
        total, squared, shape = [], [], []
        for i, part in enumerate(parts):
            narrow = first if i == 0 else self._terms(self.columns.left, part)
            kind, terms = narrow[0][1].dtype, [(labels, x.double()) for labels, x in narrow]
            kept, shape = present(self.output, terms), _sizes(terms, self.output)
            total.append(contract(terms, kept))
            squared.append(contract(twice(terms, terms, self.output), kept))
        centred = torch.addcmul(summed(squared), (whole := summed(total)), whole, value=-1 / self.samples.count)
        return whole.to(kind).reshape(shape), centred.to(kind).clamp(min=0).reshape(shape)

    def _moments_in_rows(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The moments where shares have few rows: a row that a sample does not touch counts as a zero in its share."""
        n, parts = self.samples.count, self.samples.parts(self.work, thresholds.OPERANDS * self.budget)
        shares = [self._share(None, part) for part in parts]
        total = summed(self._land(share, part) for share, part in zip(shares, parts, strict=True))
        mean = torch.cat([total, total.new_zeros(1, *total.shape[1:])]) / n
        visits, squared = [], []
        for share, part in zip(shares, parts, strict=True):
            visits.append(self._land(torch.ones_like(share), part))
            squared.append(self._land((share - mean[self._rows(part)]).square(), part))
        return total, summed(squared) + (n - summed(visits)) * mean[:-1].square()

    # Where entries land

    def _rows(self, part: Part) -> torch.Tensor:
        return self.recipe.rows(part, self.use.param.shape[0])

    def _land(self, share: torch.Tensor, part: Part) -> torch.Tensor:
        """`[b, u, *rest]` added up in the rows of the parameter; what lands behind the last is dropped."""
        rows = self._rows(part).flatten()
        target = share.new_zeros(self.use.param.shape[0] + 1, *share.shape[2:])
        return target.index_add(0, rows, share.flatten(0, 1))[:-1]

    def _landed(self, share: torch.Tensor, terms: list[Term], part: Part) -> torch.Tensor:
        """A contraction over the samples, brought from the labels `kept` to the shape `[*output]`."""
        share = share.reshape(_sizes(terms, self.kept, part))
        return self._land(share, part) if self.lands else share

    def _landed_each(self, share: torch.Tensor, part: Part) -> torch.Tensor:
        """The shares of each column and sample, `[V, b, *output]`, with what lands in the same row added up."""
        if not self.lands:
            return share
        v, b, u, *rest = share.shape
        rows = self._rows(part).reshape(1, b, u, *[1] * len(rest)).expand(share.shape)
        target = share.new_zeros(v, b, self.use.param.shape[0] + 1, *rest)
        return target.scatter_add(2, rows, share)[:, :, :-1]

    def _shaped(self, share: torch.Tensor, lead: int) -> torch.Tensor:
        """`[*lead, *output]` in the layout of the parameter used."""
        shape, own, n = self.use.param.shape, self.recipe.own, self.samples.n
        if own is not None:
            one = [own.width(n) if d == own.dim else size for d, size in enumerate(shape)]
            share = own.restore(share.reshape((*share.shape[:lead], n, *one)), n, lead)
        return share.reshape((*share.shape[:lead], *shape))


def _sizes(terms: list[Term], output: str, part: Part | None = None) -> list[int]:
    """The sizes of the labels, 1 where a dimension of size 1 was dropped."""
    sizes = {c: s for labels, x in terms for c, s in zip(labels, x.shape, strict=True)}
    if part is not None:
        sizes["N"] = length(part)
    return [sizes.get(c, 1) for c in output]
