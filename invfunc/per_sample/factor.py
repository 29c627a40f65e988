"""The factored share of a parameter at one place of a function, contracted only as far as a statistic asks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ref

import torch

from invfunc import thresholds
from invfunc._torch.precision import doubled, has_float64
from invfunc.core.norms import narrow_norms, tried
from invfunc.core.squares import shifted_moments, squared
from invfunc.linear_algebra.contract import (
    Term,
    cancel,
    contract,
    crosses,
    joined,
    largest,
    narrowed,
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
from invfunc.per_sample.table import Table
from invfunc.per_sample.terms import shape_of
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
        self.table = Table(self.recipe, self.use.param.shape[0]) if self.lands else None
        self.work = len(self.uses) * self.recipe.work
        self.apart = "S" * bool(self.recipe.cells) + self.output
        self.kept = "N" * self.lands + self.output
        """What is left of a sum over samples, whose entries may still have to land in the rows of each."""

    # What statistics are made of: all are in the layout of the parameter used

    def dense(self, cotangents: Cotangents, part: Part) -> torch.Tensor:
        """`[V, b, *param]`, instantiated."""
        terms, output = self._terms(cotangents, part), "VN" + self.output
        share = contract(terms, present(output, terms)).reshape(shape_of(terms, output, part))
        share = share.clone() if len(terms) == 1 and self.recipe.joins else share  # of its own, not the cotangent
        return self._shaped(self.landed_each(share, part), 2)

    def weighted(self, weights: torch.Tensor | None = None) -> torch.Tensor:
        """`sum_n weights[n] G[v, n]`, for the only column; of weights 1, if there are none."""
        of, shares = self.use.memory.get("shares", (None, None))
        if of is not None and of() is self.columns:
            found = shares.sum(0) if weights is None else torch.tensordot(weights.to(shares.dtype), shares, 1)
            return self._shaped(found, 0)
        parts, sent, total = self.parts(), self.columns.left[self.use.site], []
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
        left = "N" + self.output if each else self.kept
        parts, first, direct = self._way("NV" + self.apart, left)
        if each:
            found = []
            for part, terms in self._blocks(parts, first):
                squares = self._squares(terms, part, direct, left).reshape(1, *shape_of(terms, left, part))
                found.append(self.landed_each(squares, part)[0])
            return self._shaped(joined(found), 1)
        sums = []
        for blocks in self._tiled(parts, first, whole=direct or self.columns.right is not None):
            squares = (self._landed(self._squares(terms, part, direct, left), terms, part) for part, terms in blocks)
            sums.append(summed(squares))
        return self._shaped(joined(sums), 0)

    def _squares(self, terms: list[Term], part: Part, direct: bool, left: str) -> torch.Tensor:
        """The sum of squares of a block of samples, with so many labels left."""
        columns = self.columns
        right = terms if columns.right is None else self._terms(columns.right, part)
        weight = squeezed(widened([("VNS"[: w.ndim], w[:, part]) for w in (columns.weight,) if w is not None]))
        if direct:  # nothing large is formed
            pair = self.exact(twice(terms, right, self.apart))
        else:
            instance = present("NV" + self.apart, terms)
            share = contract(terms, instance)
            other = None if columns.right is None else contract(right, instance)
            pair = [(instance, squared(share, other, fresh=len(terms) > 1))]
        return contract(widened(pair + weight), present(left, terms)).to(terms[0][1].dtype)

    def norms(self) -> torch.Tensor:
        """`sum_p G[n, p]^2` of each sample: `[count]`."""
        return joined([norms for _, norms in self._norms(with_sums=False)])

    def sum_and_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_n G[n]` and `sum_p G[n, p]^2` of the only column."""
        sums, norms = zip(*self._norms(with_sums=True), strict=True)
        return self._shaped(summed(sums), 0), joined([*norms])

    def _norms(self, with_sums: bool) -> Iterator[tuple[Any, torch.Tensor]]:
        """Perhaps the sums of the shares of blocks of samples, and their norms: shares are formed once for both."""
        parts, first, direct = self._way("NV" + self.apart, "N")
        small, kept = self._small, list[torch.Tensor]()
        try_narrow = not (small or with_sums) and tried(first, self.output)
        for part, terms in self._blocks(parts, first):
            found = narrow_norms(terms, self.output) if try_narrow else None
            if found is not None:
                yield None, found.reshape(length(part))
            elif direct:  # the "ghost norm": products of positions with positions
                norms = contract(self.exact(twice(terms, terms, self.output)), present("N", terms)).clamp(min=0)
                yield (self._sum(terms, part) if with_sums else None), norms.to(terms[0][1].dtype).reshape(length(part))
            else:
                share = self._share(terms, part)
                kept += [share] * small
                total = share.sum(0) if with_sums else None
                yield total, squared(share.reshape(length(part), -1), fresh=len(terms) > 1 and not small).sum(1)
        if kept:
            self.use.memory["shares"] = ref(self.columns), joined(kept)

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_n G[n]` and `sum_n (G[n] - mean G)^2` of the only column, without cancellation."""
        if self.table is not None:
            total, centred = self._moments_in_rows(self.table)
        else:
            parts, first, direct = self._formed_in("N" + self.output, self.output)
            sums = direct and cancel(first) and has_float64(first[0][1].device)
            total, centred = (self._wide_moments if sums else self._formed_moments)(parts, first)
        return self._shaped(total, 0), self._shaped(centred, 0)

    # Blocks of samples

    def layout(self) -> tuple:
        """What the shares of two runs have to have in common so that their terms can be multiplied."""
        one = self._terms(self.columns.left, slice(0, 1))
        return self.output, self.lands, self.use.param.shape, shape_of(one, self.output[self.lands :])

    def parts(self, start: int = 0, stop: int | None = None) -> list[Part]:
        return self.samples.parts(self.work, thresholds.OPERANDS * self.budget, start, stop)

    def terms(self, part: Part, matrix: torch.Tensor | None = None) -> list[Term]:
        """The factors of the shares of some samples; with a matrix, of projected ones."""
        return self._terms(self.columns.left, part, matrix)

    def sizes(self) -> list[int]:
        """How many values the labels of the output have: those of each picked row, where it picks rows."""
        return shape_of(self._terms(self.columns.left, slice(0, 1)), self.output)

    def _way(self, instance: str, kept: str) -> tuple[list[Part], list[Term], bool]:
        """Blocks of samples, the terms of the first, and whether the square is cheaper without forming a share."""
        parts, terms, direct = self._formed_in(instance, kept)
        if direct and len(parts) > 1:
            size = largest(twice(terms, terms, self.apart), present(kept, terms)) // length(parts[0])
            most = self.budget // thresholds.SHARES if self.recipe.cells else thresholds.PRODUCTS * self.budget
            parts = self.samples.parts(max(self.work, size), most)  # cell by cell what is read is copied and squared
            terms = self._terms(self.columns.left, parts[0])
        return parts, terms, direct

    def _formed_in(self, instance: str, kept: str) -> tuple[list[Part], list[Term], bool]:
        """The same, with blocks of which all shares can be formed."""
        cotangent = self.columns.left[self.use.site]
        assert cotangent is not None
        shares = cotangent.shape[0] * max(1, self.recipe.cells) * self.use.param.numel()
        size = self.work + len(self.uses) * cotangent[:, 0].numel() + shares
        parts = self.samples.parts(size, self.budget // thresholds.SHARES)
        terms = self._terms(self.columns.left, parts[0])
        return parts, terms, self.lands or squares_directly(terms, self.apart, instance, kept)

    @property
    def _small(self) -> bool:
        """Whether shares are so much smaller than their cotangents that they are kept for a weighted sum."""
        cotangent = self.columns.left[self.use.site]
        if cotangent is None or len(self.uses) > 1 or self.recipe.own is not None or self.lands:
            return False
        return cotangent[0, 0].numel() >= thresholds.KEPT_SHARES * self.use.param.numel()

    def exact(self, pair: list[Term]) -> list[Term]:
        """The pair in float64 where sums of its products may cancel."""
        return [(labels, doubled(x)) for labels, x in pair] if self.cancels(pair) else pair

    def cancels(self, pair: list[Term]) -> bool:
        """Whether sums of the products of a pair may cancel."""
        return cancel(pair) and crosses(pair, self.apart)

    def _blocks(self, parts: list[Part], first: list[Term]) -> Iterator[tuple[Part, list[Term]]]:
        """Blocks of samples with their terms, of which those of the first are there."""
        for i, part in enumerate(parts):
            yield part, first if i == 0 else self._terms(self.columns.left, part)

    def _tiled(
        self, parts: list[Part], first: list[Term], whole: bool = False
    ) -> Iterator[Iterator[tuple[Part, list[Term]]]]:
        """The blocks for some rows of large shares after the other: what is formed stays in cache, with its sums."""
        blocks, tiles = self._blocks(parts, first), [] if whole else self._tiles(first)
        if len(tiles) < 2:
            yield blocks
            return
        each = [*blocks]
        for rows in tiles:
            yield ((part, narrowed(terms, self.output[0], *rows)) for part, terms in each)

    def _tiles(self, terms: list[Term]) -> list[tuple[int, int]]:
        """Ranges of rows of a share; none where it is small, or where what makes all shares does not fit at once."""
        size, (rows, *_) = self.entries(terms), [*shape_of(terms, self.output), 1]
        small = size < thresholds.TILED or terms[0][1].device.type not in thresholds.TILED_ON
        if small or self.work * self.samples.count > thresholds.OPERANDS * self.budget:
            return []
        return even(rows, max(1, thresholds.TILE * rows // max(1, size)))

    def _terms(self, cotangents: Cotangents, part: Part, matrix: torch.Tensor | None = None) -> list[Term]:
        reached = [(use, cotangent) for use in self.uses if (cotangent := cotangents[use.site]) is not None]
        built = [use.recipe.terms(cotangent[:, part], part, matrix) for use, cotangent in reached]
        return squeezed(widened(built[0] if len(built) == 1 else stacked(built)))

    def _sum(self, terms: list[Term], part: Part) -> torch.Tensor:
        """The sum over samples of what the terms are the factors of, `[*output]`."""
        return self._landed(contract(terms, present(self.kept, terms)), terms, part)

    def entries(self, terms: list[Term]) -> int:
        return math.prod(shape_of(terms, self.output))

    # Moments

    def _share(self, terms: list[Term], part: Part) -> torch.Tensor:
        """`[b, *output]` of the only column."""
        output = "N" + self.output
        return contract(terms, present(output, terms)).reshape(shape_of(terms, output, part))

    def _formed_moments(self, parts: list[Part], first: list[Term]) -> tuple[torch.Tensor, torch.Tensor]:
        """The moments of shares that are formed."""
        tiled, fresh = self._tiled(parts, first), len(first) > 1
        found = [shifted_moments((self._share(terms, part) for part, terms in blocks), fresh) for blocks in tiled]
        return joined([total for total, _ in found]), joined([centred for _, centred in found])

    def _wide_moments(self, parts: list[Part], first: list[Term]) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum G^2 - (sum G)^2 / n` in float64, whose rounding is 1e9 times finer than that of the float32 shares.

        The first are the terms of the first of some blocks of samples, which may be larger here.
        """
        if len(parts) > 1:
            parts = self.samples.parts(self.work, thresholds.OPERANDS * self.budget)
            first = self._terms(self.columns.left, parts[0])
        total, squared, shape = [], [], []
        for _, narrow in self._blocks(parts, first):
            kind, terms = narrow[0][1].dtype, [(labels, doubled(x)) for labels, x in narrow]
            kept, shape = present(self.output, terms), shape_of(terms, self.output)
            total.append(contract(terms, kept))
            squared.append(contract(twice(terms, terms, self.output), kept))
        centred = torch.addcmul(summed(squared), (whole := summed(total)), whole, value=-1 / self.samples.count)
        return whole.to(kind).reshape(shape), centred.to(kind).clamp(min=0).reshape(shape)

    def _moments_in_rows(self, table: Table) -> tuple[torch.Tensor, torch.Tensor]:
        """The moments where shares have few rows: a row that a sample does not touch counts as a zero in its share, and
        those that do take a part of what that adds."""
        n, parts = self.samples.count, self.samples.parts(self.work, thresholds.OPERANDS * self.budget)
        shares = [self._share(self._terms(self.columns.left, part), part) for part in parts]
        total = summed(table.landed(share, part) for share, part in zip(shares, parts, strict=True))
        rows = [table.rows(part) for part in parts]
        none = total.new_zeros(table.count + 1)
        visits = summed(none.index_add(0, x.flatten(), none.new_ones(x.numel())) for x in rows)
        squared = []
        for share, part, x in zip(shares, parts, rows, strict=True):
            mean = total.index_select(0, x.flatten().clamp(max=table.count - 1)).reshape(share.shape) / n
            k = visits[x].reshape([*x.shape, *[1] * (share.ndim - 2)])
            squared.append(table.landed((share - mean).square() + (n - k) / k * mean.square(), part))
        return total, summed(squared)

    # The layout of the parameter

    def _landed(self, share: torch.Tensor, terms: list[Term], part: Part) -> torch.Tensor:
        """A contraction over the samples, brought from the labels `kept` to the shape `[*output]`."""
        share = share.reshape(shape_of(terms, self.kept, part))
        return share if self.table is None else self.table.landed(share, part)

    def landed_each(self, share: torch.Tensor, part: Part) -> torch.Tensor:
        """The shares of each column and sample, `[V, b, *output]`, with what lands in the same row added up."""
        return share if self.table is None else self.table.landed_each(share, part)

    def _shaped(self, share: torch.Tensor, lead: int) -> torch.Tensor:
        """`[*lead, *output]` in the layout of the parameter used."""
        shape, own, n = self.use.param.shape, self.recipe.own, self.samples.n
        if own is not None:
            one = [own.width(n) if d == own.dim else size for d, size in enumerate(shape)]
            share = own.restore(share.reshape((*share.shape[:lead], n, *one)), n, lead)
        return share.reshape((*share.shape[:lead], *shape))
