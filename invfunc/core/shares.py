"""Per-sample gradients `G[v, n, *p]` of one parameter, from its uses, and the contractions that statistics are made of.

A shortcut is for one use of the parameter, or of a view of it; everything else forms `G` in blocks that fit the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import torch

from invfunc import thresholds
from invfunc._torch.functorch import dispatched, mapped
from invfunc._torch.values import HALF, doubled, has_float64, wide
from invfunc.core.factors import kronecker, rotated
from invfunc.core.marks import DERIVED, LEAF, SWAP
from invfunc.core.norms import narrow_norms, tried
from invfunc.core.run import Run
from invfunc.core.uses import (
    WHOLE,
    Block,
    Convolution,
    Expanded,
    Joined,
    ProductUse,
    TableRows,
    Use,
    formed,
    outer,
    weighted,
)
from invfunc.errors import ArgumentError
from invfunc.kronecker.matrix import Kronecker
from invfunc.linear_algebra.contract import (
    Term,
    added,
    cancel,
    contract,
    crosses,
    joined,
    present,
    promoted,
    side_by_side,
    squares_directly,
    squeezed,
    summed,
    twice,
)
from invfunc.reductions.estimates import Drawn, drawn, variances
from invfunc.reductions.factors import Factors

Kind = TypeVar("Kind", bound=Use)
Weigh = Callable[[torch.Tensor, Block], torch.Tensor]
"""Weights of a block of samples, given the squared norms of their gradients of one parameter."""
_MATRICES = ((), (0,), (1,)), ((), (1,), (0,))
"""The dims of a matrix whose rows, or columns, are those of the cotangent."""


class Shares:
    """The per-sample gradients of a parameter."""

    def __init__(self, run: Run, place: int, uses: list[Use], names: Callable[[int], str], again: bool = False) -> None:
        """`place` is the number of the parameter, which `names` says in words; `again`, after other columns."""
        self.run, self.place, self.name, self.again = run, place, names, again
        self.leaf = run.leaves[place]
        self.given = uses
        self.uses = together(uses) if len(uses) > 1 else uses
        self.count = run.count
        self.plain = self.uses[0] if len(self.uses) == 1 and self.uses[0].node.kind is LEAF else None
        """The only use, if it is of the parameter itself."""
        self.kept: torch.Tensor | None = None
        """The gradients of the only column, if they were formed, and are small: a weighted sum may follow norms."""

    @property
    def apart(self) -> list[Use]:
        """Uses, of which only products are put together."""
        pairs = [u for u in self.given if isinstance(u, ProductUse)]
        return [*together(pairs), *[u for u in self.given if u not in pairs]]

    def dense(self, block: Block = WHOLE) -> torch.Tensor:
        """`[V, n, *p]`."""
        if (use := self.plain) is not None:
            return use.dense(self.run, block)
        return summed([self.pulled(u, u.dense(self.run, block), 2) for u in self.uses])

    def pulled(self, use: Use, rows: torch.Tensor, lead: int) -> torch.Tensor:
        """Gradients of the parameter from those of the tensor that was read, behind `lead` dims."""
        kind = use.node.kind
        if kind is LEAF:
            return rows
        if kind is SWAP:
            return rows.mT
        run, leaf = self.run, self.leaf

        def back(row: torch.Tensor) -> torch.Tensor:
            return torch.autograd.grad(use.value, (leaf,), row, create_graph=run.deep, retain_graph=True)[0]

        flat = rows.reshape(-1, *use.shape)
        scale = None
        if leaf.dtype in HALF or use.value.dtype in HALF:  # float16 has to hold the entries, and sums of them
            size = flat.detach().abs().reshape(len(flat), -1).sum(1) / 1024
            scale = torch.where((size > 0) & size.isfinite(), size, 1).view(-1, *[1] * len(use.shape))
            flat = (flat / scale).to(use.value.dtype)
        with torch.enable_grad():
            found = back(flat[0]).unsqueeze(0) if len(flat) == 1 else mapped(back)(flat)
        found = run.strip(found)
        if scale is not None:
            found = wide(found) * scale.view(-1, *[1] * leaf.ndim)
        return found.reshape((*rows.shape[:lead], *leaf.shape))

    def blocks(self) -> list[Block]:
        """Blocks of samples whose gradients fit the cache."""
        return self.run.blocks(self.uses)

    def single(self, kind: type[Kind]) -> Kind | None:
        """The only use, if it is of a kind, and of the parameter or a view of it."""
        use = self.uses[0]
        return use if isinstance(use, kind) and len(self.uses) == 1 and use.node.kind is not DERIVED else None

    def factors(self) -> tuple[Any, torch.Tensor | None, torch.Tensor] | None:
        """The only use, what it read `[n, k]`, None for a shift, and what is sent `[V, n, o]`, if each sample has one
        position: then its gradient is their outer product."""
        use, run = self.single(Use), self.run
        if use is None:
            return None
        if (rows := use.rows(run)) is not None:
            return use, *rows
        if not isinstance(use, ProductUse) or type(use) is Convolution or use.a.numel() != use.a.shape[-1] * run.n:
            return None
        a, d = use.read(run), use.sends(run)
        return (use, a[:, 0, 0], d[:, :, 0, 0]) if a.shape[1] == a.shape[2] == 1 else None

    def of_rows(self, use: Any, a: torch.Tensor | None, d: torch.Tensor, each: bool = False) -> torch.Tensor:
        """`sum_n d[n]^T a[n]` in the layout of the parameter, of a shift `sum_n d[n]`; or `each` of them."""
        if each:
            return self.laid(use, a, d if a is None else outer(a, d), 1)
        return self.laid(use, a, d.sum(0) if a is None else d.mT @ a)

    def laid(self, use: Any, a: torch.Tensor | None, found: torch.Tensor, lead: int = 0) -> torch.Tensor:
        """A sum of `d^T a`, or of d where there is no a, in the layout of the parameter."""
        found = found.view((*found.shape[:lead], *use.shape)) if a is None else use.placed(found)
        return found if use.node.kind is LEAF else self.pulled(use, found, lead)

    def weighted(self, weights: torch.Tensor | None = None) -> torch.Tensor:
        """`sum_nv weights[n] G[v, n]`."""
        if self.kept is not None:
            return weighted(self.kept[None], weights, WHOLE)
        if (use := self.plain) is not None:
            return use.total(self.run, weights)
        return summed([self.pulled(u, u.total(self.run, weights), 0) for u in self.uses])

    def square_sum(self, each: bool = False) -> torch.Tensor:
        """`sum_vn G[v, n]^2`, or `[n, *p]` of each sample."""
        if (factors := self.factors()) is not None:
            use, a, d = factors
            return self.of_rows(use, None if a is None else a.square(), self.squares(use, d), each)
        if each:
            return joined([self.dense(block).square().sum(0) for block in self.blocks()])
        use = self.single(TableRows)
        if use is not None and not self.run.deep:
            _, i, sums, _ = use.touched(self.run)
            return self.pulled(use, use.added(self.run, i, sums.square()), 0)
        pair = None if self.run.deep else self.single(ProductUse)
        if pair is not None and (rows := pair.by_rows(self.run)) is not None:
            return self.pulled(pair, pair.shaped(torch.cat([added_squares(x) for x in rows], 1)), 0)
        rows = (self.dense(block) for block in self.blocks())
        return summed(x.square().sum(1).sum(0) if pair is None else added_squares(x) for x in rows)

    def squares_of_places(self) -> torch.Tensor:
        """The sum of the squares of what each place adds where an operation reads the parameter."""
        found = []
        for use in self.given:
            places = use.places(self.run)
            if use.node.kind is not DERIVED:
                found.append(self.pulled(use, use.squares(self.run), 0))
                continue
            if places > 1:
                raise ArgumentError(
                    f"squares per token are not of tensors that are computed from {self.name(self.place)} and read at "
                    "several places of a sample. Leave per= out, or keep the parameter in another argument."
                )
            rows = (self.pulled(use, use.dense(self.run, block), 2) for block in self.run.blocks([use]))
            found.append(summed(x.square().sum((0, 1)) for x in rows))
        return summed(found)

    def sum_of(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """`sum_n fn(G[n])` of the only column, given fn of a block of samples."""
        size = sum([use.size(self.run) for use in self.uses])
        blocks = self.run.blocks(self.uses, 2 * size)  # the gradients, and fn of them
        return summed(fn(self.dense(block)[0]).sum(0) for block in blocks)

    def squares(self, use: Use, d: torch.Tensor) -> torch.Tensor:
        """`sum_v d[v, n, ...]^2`, which a weight and its bias share."""
        key = "squares", id(use.edge)
        if (found := self.run.known.get(key)) is None or found.numel() != d[0].numel():
            self.run.known[key] = found = d.square().sum(0)
        return found

    def norms(self) -> torch.Tensor:
        """`sum_p G[n, p]^2` of the only column: `[n]`."""
        if (factors := self.factors()) is not None:
            use, a, d = factors
            key = "norms", id(use.edge)
            if (found := self.run.known.get(key)) is None:
                self.run.known[key] = found = d[0].square().sum(1)
            return found if a is None else found * a.square().sum(1)
        if (pair := self.single(ProductUse)) is not None:
            return self.norms_of(pair)
        rows = self.single(TableRows)
        if rows is not None and not self.run.deep:
            n, _, sums, _ = rows.touched(self.run)
            return sums.new_zeros(self.count).index_add(0, n, sums.square().sum(1))
        return self.norms_of_kept() if self.small else joined([self.flat(b).square().sum(1) for b in self.blocks()])

    def norms_of_kept(self) -> torch.Tensor:
        """The norms of gradients that are kept."""
        self.kept = joined([self.dense(block)[0] for block in self.blocks()])
        return self.kept.square().flatten(1).sum(1) if self.leaf.ndim else self.kept.square()

    @property
    def small(self) -> bool:
        """Tells whether the gradients take much less memory than the cotangents that they come from."""
        most = sum([u.d.numel() for u in self.uses if u.d is not None])
        return self.run.columns == 1 and self.leaf.numel() * self.count * thresholds.KEPT_SHARES <= most

    def flat(self, block: Block = WHOLE) -> torch.Tensor:
        """The gradients of the only column as rows `[n, P]`."""
        return self.dense(block)[0].flatten(1) if self.leaf.ndim else self.dense(block)[0].unsqueeze(1)

    def norms_of(self, use: ProductUse) -> torch.Tensor:
        """Norms of products with many positions: from products of positions with positions where that is cheaper."""
        run, (p, o, k) = self.run, use.sizes(self.run)
        if p >= max(o, k) and self.small:
            return self.norms_of_kept()
        if p * use.size(run) * self.count < thresholds.AT_ONCE:
            return self.squared(use.formed(run))
        size = min(p * (o + k + 2 * p) * 2, use.size(run)) if p < max(o, k) else use.size(run)
        found, alone = [], isinstance(use, Convolution) and use.alone(run)
        for block in run.blocks([use], size):
            if alone:
                found.append(self.squared(use.formed(run, block)))
                continue
            a, d = use.read(run, block), use.sends(run, block)
            terms: list[Term] = squeezed([("Ngpo", d[0]), ("Ngpk", a)])
            narrow = narrow_norms(terms, "gok") if tried(terms, "gok") else None
            if narrow is not None:
                found.append(narrow.reshape(-1))
            elif squares_directly(terms, "gok", "Ngok", "N"):
                pair = [(labels, doubled(x)) for labels, x in terms] if cancel(terms) else terms
                norms = contract(twice(pair, pair, "gok"), present("N", pair))
                found.append(norms.clamp(min=0).to(terms[0][1].dtype).reshape(-1))
            else:
                found.append(self.squared(formed(a, d)))
        return joined(found)

    def squared(self, rows: torch.Tensor) -> torch.Tensor:
        """The squared norms of the gradients of the only column."""
        rows = rows[0].flatten(1)
        return rows.square().sum(1) if self.run.deep else torch.linalg.vector_norm(rows, dim=1).square()

    def sum_and_norms(self, weigh: Weigh | None = None) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_n weights[n] G[n]` and `sum_p G[n, p]^2` of the only column, whose weights may depend on these."""
        if not self.once:
            norms = self.norms()
            return self.weighted(None if weigh is None else weigh(norms, WHOLE)), norms
        norms, total = list[torch.Tensor](), None
        for block in self.blocks():
            rows = self.flat(block)
            norms.append(torch.linalg.vector_norm(rows, dim=1).square())
            weights = torch.ones_like(norms[-1]) if weigh is None else weigh(norms[-1], block).to(rows.dtype)
            total = rows.new_zeros(rows.shape[1]) if total is None else total
            total.addmv_(rows.T, weights)
            del rows  # before the next ones are formed
        assert total is not None
        return total.view(self.leaf.shape), joined(norms)

    @property
    def once(self) -> bool:
        """Tells whether gradients are formed once for their norms and for their sum."""
        if self.run.deep or self.small or self.factors() is not None or self.single(TableRows) is not None:
            return False
        if (use := self.single(ProductUse)) is None:
            return True
        p, o, k = use.sizes(self.run)
        return thresholds.FORMED * o * k < p * p * (o + k)  # else norms are products of positions

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_n G[n]` and `sum_n (G[n] - mean G)^2` of the only column, without cancellation."""
        n, narrow = self.count, self.leaf.dtype == torch.float32
        factors = self.factors() if narrow and has_float64(self.leaf.device) else None
        if factors is not None:  # in float64, whose rounding is 1e9 times finer
            use, a, d = factors
            key = "wide", id(use.edge)
            if (wider := self.run.known.get(key)) is None:
                self.run.known[key] = wider = (d[0].double(), d[0].double().square())
            d, squares = wider
            if a is None:
                total, spread = d.sum(0), squares.sum(0)
            else:
                a = a.double()
                total, spread = d.mT @ a, squares.mT @ a.square()
            spread = torch.addcmul(spread, total, total, value=-1 / n).clamp(min=0)
            dtype = self.leaf.dtype
            return self.laid(use, a, total.to(dtype)), self.laid(use, a, spread.to(dtype))
        rows = self.single(TableRows)
        if rows is not None and not self.run.deep:
            return self.moments_of(rows)
        return shifted_moments(self.dense(block)[0] for block in self.blocks())

    def moments_of(self, use: TableRows) -> tuple[torch.Tensor, torch.Tensor]:
        """Moments of a table: a row that a sample does not touch counts as a zero."""
        n, (_, i, sums, there) = self.count, use.touched(self.run)
        at, places, large = i, use.shape[0], use.shape[0] > len(i)
        if large:  # a place for each row that is touched
            i, order = i.sort()
            sums, there, places = sums[order], there[order], len(i)
            at = torch.cat([torch.zeros_like(i[:1]), (i[1:] != i[:-1]).cumsum(0)])
        mean = sums.new_zeros(places, sums.shape[-1]).index_add_(0, at, sums) / n
        visits = there.new_zeros(places, 1).index_add_(0, at, there)
        apart = torch.zeros_like(mean).index_add_(0, at, (sums - mean[at]).square() * there)
        both = [mean * n, apart + (n - visits) * mean.square()]
        if large:
            rows = torch.zeros_like(i).scatter_(0, at, i)
            both = [use.added(self.run, rows, x) for x in both]
        total, centred = [self.pulled(use, x.view(use.shape), 0) for x in both]
        return total, centred

    def products(self, exact: bool = False) -> torch.Tensor:
        """`sum_p G[v, n, p] G[w, m, p]` as `[V, n, V, n]`; `exact`, in float64."""
        return self.products_between(self, exact)

    def products_with(self, last: int) -> torch.Tensor:
        """The products of all samples but the last so many with these: `[V, n - last, V, last]`."""
        edge = self.count - last
        return self.products_between(self, of=slice(edge), others=slice(edge, self.count))

    def products_between(
        self, other: Shares, exact: bool = False, of: slice = slice(None), others: slice = slice(None)
    ) -> torch.Tensor:
        """The products of some samples with some of another run, or of this one: `[V, n, W, m]`; `exact`, in
        float64."""
        mine, its = self.factors(), other.factors()
        if mine is not None and its is not None and (mine[1] is None) is (its[1] is None):
            d, e = mine[2][:, of], its[2][:, others]
            d, e = (doubled(d), doubled(e)) if exact else (d, e)
            found = (d.flatten(0, 1) @ e.flatten(0, 1).T).view(*d.shape[:2], *e.shape[:2])
            if mine[1] is None or its[1] is None:
                return found
            a, b = mine[1][of], its[1][others]
            a, b = (doubled(a), doubled(b)) if exact else (a, b)
            return found * (a @ b.T)[:, None]
        x, y = self._rows(other)
        x, y = (doubled(rows) if exact else rows for rows in (x[:, of], y[:, others]))
        return (x.flatten(0, 1) @ y.flatten(0, 1).T).view(*x.shape[:2], *y.shape[:2])

    def _rows(self, other: Shares) -> tuple[torch.Tensor, torch.Tensor]:
        """The gradients of both as rows `[V, n, entries]`; of a table, in the rows that some sample touches."""
        each = [self, other] if other is not self else [self]
        tables = [s.single(TableRows) for s in each]
        if dispatched() or any(
            t is None or s.run.deep or s.run.columns > 1 or t.node.kind is not LEAF
            for s, t in zip(each, tables, strict=True)
        ):
            rows = [_flat(s.dense()) for s in each]
            return rows[0], rows[-1]
        touched = [t.touched(s.run)[:3] for s, t in zip(each, tables, strict=True) if t is not None]
        every = torch.cat([i for _, i, _ in touched])
        there, places = every.unique(return_inverse=True)
        found = []
        for s, (samples, i, sums) in zip(each, touched, strict=True):
            place, places = places.split([len(i), len(places) - len(i)])
            flat = sums.new_zeros(s.count * len(there), sums.shape[-1])
            found.append(flat.index_add(0, samples * len(there) + place, sums).view(1, s.count, -1))
        return found[0], found[-1]

    def covariances(self, weight: torch.Tensor) -> torch.Tensor:
        """`sum_p weight[p] G[v, n, p] G[w, n, p]` of each sample: `[n, V, V]`."""
        use, v = self.single(ProductUse), self.run.columns
        if use is not None and use.node.kind is LEAF:
            found, (p, o, k) = [], use.sizes(self.run)
            given = use.parted(weight)
            for block in self.run.blocks([use], v * max(p * (o + k), v)):
                d, a = (x.to(torch.promote_types(x.dtype, given.dtype)) for x in use.operands(self.run, block))
                terms: list[Term] = [("VNgpo", d), ("Ngpk", a)]
                if not squares_directly(terms, "gok", "NVgok", "NV"):
                    break  # that costs more than the gradients
                pair = side_by_side(terms, "gok")
                pair = [(labels, doubled(x)) for labels, x in pair] if cancel(pair) and crosses(pair, "gok") else pair
                terms = squeezed(promoted([*pair, ("gok", given)]))
                found.append(contract(terms, present("NVW", terms)).to(given.dtype).reshape(-1, v, v))
            else:
                return joined(found)
        return self.covariances_by(lambda rows: rows * weight)

    def covariances_by(self, times: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The same with the products of gradients `[V, n, *p]` with any symmetric matrix."""
        found = []
        for block in self.blocks():
            rows = self.dense(block)
            by, rows = (x.reshape(*rows.shape[:2], -1).transpose(0, 1) for x in (times(rows), rows))
            found.append(rows.to(by.dtype) @ by.mT)
        return joined(found)

    def squares_and_variance(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_vn G[v, n]^2`, and the variance that it has as columns are drawn."""
        squares, spread = [], []
        for block in self.blocks():
            each = self.dense(block).square()
            squares.append(each.sum((0, 1)))
            spread.append(variances(each, self._drawn(each, block)).sum(0))
        return summed(squares), summed(spread)

    def squares_of_columns(self) -> tuple[torch.Tensor, Drawn]:
        """`sum_p G[v, n, p]^2` as `[V, n]`, and which columns are drawn."""
        norms = torch.cat([_flat(self.dense(block)).square().sum(2) for block in self.blocks()], 1)
        return norms, self._drawn(norms, WHOLE)

    def _drawn(self, values: torch.Tensor, block: Block) -> Drawn:
        run = self.run
        taken = [replace(lot, exact=run.taken(lot.exact, block)) for lot in run.lots if lot.exact is not None]
        return drawn([*[lot for lot in run.lots if lot.exact is None], *taken], slice(None), values)

    def projected(self, vectors: torch.Tensor) -> torch.Tensor:
        """`sum_p G[v, n, p] vectors[k, p]` of each sample: `[n, V, k]`."""
        use, found = self.single(ProductUse), []
        if use is not None and use.node.kind is LEAF:
            given, (p, o, k) = use.parted(vectors.movedim(0, -1)), use.sizes(self.run)
            for block in self.run.blocks([use], self.run.columns * p * max(o + k, o * len(vectors))):
                d, a = use.operands(self.run, block)
                terms = squeezed(promoted([("VNgpo", d), ("Ngpk", a), ("gokK", given)]))
                rows = contract(terms, present("NVK", terms))
                found.append(rows.reshape(-1, self.run.columns, len(vectors)))
            return joined(found)
        flat = vectors.reshape(len(vectors), -1).T
        for block in self.blocks():
            rows = self.dense(block)
            found.append(rows.reshape(*rows.shape[:2], -1).transpose(0, 1).to(flat.dtype) @ flat)
        return joined(found)

    def along(self, direction: torch.Tensor) -> torch.Tensor:
        """`sum_p G[n, p] direction[p]` of the only column: `[n]`."""
        return joined([self.flat(block).mv(direction.flatten()) for block in self.blocks()])

    def sketches(self, sides: Any) -> torch.Tensor:
        """`first^T G[n] rest` of the only column: `[n, rows * columns]`."""
        use = self.single(ProductUse)
        if use is not None and use.node.kind is LEAF and len(self.leaf.shape) > 1 and use.of_w in _MATRICES:
            (_, o, k), (rows, columns) = use.sizes(self.run), (sides.first, sides.rest)
            of_d, of_a = (rows, columns) if use.of_w == _MATRICES[0] else (columns, rows)
            if (len(of_d), len(of_a)) == (o, k):
                found = []
                for block in self.run.blocks([use], use.sizes(self.run)[0] * (o + k)):
                    narrow = formed(use.read(self.run, block) @ of_a, use.sends(self.run, block) @ of_d)[0, :, 0]
                    found.append((narrow if of_d is rows else narrow.mT).flatten(1))
                return joined(found)
        return joined([sides.of(self.dense(block)[0]) for block in self.blocks()])

    def outer(self) -> torch.Tensor:
        """`sum_vn G[v, n] G[v, n]^T` as `[P, P]`."""
        rows = (self.dense(block).flatten(0, 1).reshape(-1, self.leaf.numel()) for block in self.blocks())
        return summed(x.T @ x for x in rows)

    def side(self, last: bool, other: torch.Tensor | None = None, diagonal: bool = False) -> torch.Tensor:
        """`sum_vn G A G^T` of gradients as matrices over the first dim and all others, or with `last` `sum_vn G^T B G`,
        or its diagonal; of the identity if there is no other matrix, and of a diagonal one if that is a vector."""
        found = summed(_sided(self.dense(block), last, other, diagonal) for block in self.blocks())
        return found if diagonal else (found + found.mT) / 2

    @property
    def weight(self) -> int | None:
        """The number of the weight that the same operations read."""
        kind, other = self.run.partners.get(self.place, ("", None))
        return other if kind == "bias" else None

    @property
    def bias(self) -> int | None:
        """The number of the bias that the same operations read."""
        kind, other = self.run.partners.get(self.place, ("", None))
        return other if kind == "weight" else None

    def kronecker(self, sharing: str, joint: bool, most: float) -> dict[Any, Factors]:
        """The sums of outer products of what is sent back and read, by the roles in which operations use the dims."""
        bias = self.name(self.bias) if joint and self.bias is not None else ""
        uses = self.given if len(self.given) == 1 else self.apart
        return kronecker(self.run, self.leaf, uses, sharing, bias, self.again, most)

    def rotated(self, basis: Kronecker, joint: bool) -> Shares:
        """The gradients in the eigenbasis of K-factors, `Q^T G[v, n]`."""
        return rotated(self, basis, joint and self.bias is not None)


def shifted_moments(shares: Iterable[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """`sum G` and `sum (G - mean)^2` of blocks `[b, *p]`: the latter around the mean of the first block, corrected."""
    shift = total = squares = None
    n = 0
    for share in shares:
        shift = share.mean(0) if shift is None else shift
        n += len(share)
        share = share - shift
        total = share.sum(0) if total is None else added(total, _over_samples(share))
        square = share.square() if share.requires_grad else share.square_()
        squares = square.sum(0) if squares is None else added(squares, _over_samples(square))
    assert shift is not None and total is not None and squares is not None
    centred = torch.addcmul(squares, total, total, value=-1 / n).clamp(min=0)
    return total + n * shift, centred


def _over_samples(block: torch.Tensor) -> torch.Tensor:
    """The sum of a block `[b, *p]`, without a copy of a single sample."""
    return block[0] if len(block) == 1 else block.sum(0)


def _sided(share: torch.Tensor, last: bool, other: torch.Tensor | None, diagonal: bool) -> torch.Tensor:
    """The products of a side of gradients `[V, b, *p]`."""
    matrices = share.flatten(3)
    matrices = matrices.mT if last else matrices
    scaled = matrices
    if other is not None:
        other = other.to(matrices.dtype)
        scaled = matrices * other if other.ndim == 1 else matrices @ other
    if diagonal:
        return (matrices * scaled).sum((0, 1, 3))
    rows, others = (x.movedim(2, 0).flatten(1) for x in (matrices, scaled))
    return rows @ others.mT


def _flat(rows: torch.Tensor) -> torch.Tensor:
    """Gradients as `[V, n, entries]`."""
    return rows.reshape(*rows.shape[:2], -1)


def added_squares(rows: torch.Tensor) -> torch.Tensor:
    """`sum_vn rows[v, n]^2`, of rows that are nobody else's."""
    first = rows[0, 0]
    if first.numel() < thresholds.ADDED_ROWS or rows.device.type not in thresholds.ADDED_ON:
        return rows.square_().sum(1).sum(0)
    total = torch.zeros_like(first, memory_format=torch.contiguous_format)
    for column in rows.unbind():
        for row in column.unbind():
            total.addcmul_(row, row)
    return total


def together(uses: Sequence[Use]) -> list[Use]:
    """Uses of one tensor in the same layout as one with more positions, as those of a recurrent net."""
    out: list[Use] = []
    groups: dict[Any, list[Any]] = {}
    for u in uses:
        if type(u) is ProductUse:
            groups.setdefault((id(u.value), u.of_w, None if u.of_a is None else id(u)), []).append(u)
        elif type(u) is Expanded and u.factor is None and u.view is None and isinstance(u.d, torch.Tensor):
            groups.setdefault((id(u.value), u.axis, u.d.shape), []).append(u)
        else:
            out.append(u)
    for group in groups.values():
        if len(group) > 1 and type(group[0]) is ProductUse:
            out.append(Joined(group))
        elif len(group) > 1:
            one = Expanded(group[0].node, group[0].value, group[0].axis)
            one.d, one.edge, one.uses = summed([u.d for u in group]), group[0].edge, group
            out.append(one)
        else:
            out.append(group[0])
    return out
