"""Per-sample gradients `G[v, n, *p]` of one parameter, from its uses, and the contractions that statistics are made of.

A shortcut is for one use of the parameter, or of a view of it; everything else forms `G` in blocks that fit the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeVar

import torch

from invfunc import thresholds
from invfunc._torch.precision import doubled, has_float64
from invfunc.core.marks import DERIVED, LEAF, SWAP, Unsupported
from invfunc.core.run import Run
from invfunc.core.uses import (
    WHOLE,
    Block,
    Convolution,
    Expanded,
    Joined,
    Pair,
    Rows,
    Use,
    formed,
    product,
    summed,
    weighted,
)
from invfunc.linear_algebra.contract import (
    Term,
    cancel,
    contract,
    joined,
    outer,
    present,
    squares_directly,
    squeezed,
    twice,
)
from invfunc.per_sample.norms import narrow_norms, tried
from invfunc.per_sample.places import Place
from invfunc.per_sample.squares import shifted_moments
from invfunc.reductions.kept_factors import Factors

Kind = TypeVar("Kind", bound=Use)
_MATRICES = ((), (0,), (1,)), ((), (1,), (0,))
"""The dims of a matrix whose rows, or columns, are those of the cotangent."""


class Shares:
    """The per-sample gradients of a parameter."""

    def __init__(self, run: Run, place: int, uses: list[Use], names: Callable[[int], str]) -> None:
        """`place` is the number of the parameter, which `names` says in words."""
        self.run, self.place, self.name = run, place, names
        self.leaf = run.leaves[place]
        self.uses = together(uses) if len(uses) > 1 else uses
        self.count = run.n
        self.plain = self.uses[0] if len(self.uses) == 1 and self.uses[0].node.kind is LEAF else None
        """The only use, if it is of the parameter itself."""
        self.kept: torch.Tensor | None = None
        """The gradients of the only column, if they were formed, and are small: a weighted sum may follow norms."""

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

        with torch.enable_grad():
            if lead == 0:
                return run.strip(back(rows))
            flat = rows.flatten(0, lead - 1)
            found = back(flat[0]).unsqueeze(0) if len(flat) == 1 else torch.func.vmap(back)(flat)
        return run.strip(found).reshape(*rows.shape[:lead], *leaf.shape)

    def blocks(self) -> list[Block]:
        """Blocks of samples whose gradients fit the cache."""
        return self.run.blocks(self.uses)

    def single(self, kind: type[Kind]) -> Kind | None:
        """The only use, if it is of a kind, and of the parameter or a view of it."""
        use = self.uses[0]
        return use if isinstance(use, kind) and len(self.uses) == 1 and use.node.kind is not DERIVED else None

    def factors(self) -> tuple[Pair, torch.Tensor, torch.Tensor] | None:
        """The only use, a and d, if each sample has one position: then its gradient is an outer product of them."""
        use = self.single(Pair)
        if use is None or type(use) is Convolution or use.a.numel() != use.a.shape[-1] * self.run.n:
            return None
        a, d = use.read(self.run), use.sends(self.run)
        return (use, a, d) if a.shape[2] == 1 else None

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
            if each:
                squares = formed(a.square(), d.square().sum(0, keepdim=True))[0]
                return self.pulled(use, use.shaped(squares), 1)
            return self.pulled(use, use.shaped(product(d.square().sum(0), a.square())), 0)
        if each:
            return joined([self.dense(block).square().sum(0) for block in self.blocks()])
        use = self.single(Rows)
        if use is not None and not self.run.deep and self.run.columns == 1:
            _, i, sums = use.touched(self.run)
            total = sums.new_zeros(use.shape[0], sums.shape[-1]).index_add(0, i, sums.square())
            return self.pulled(use, total.view(use.shape), 0)
        return summed(self.dense(block).square().sum((0, 1)) for block in self.blocks())

    def norms(self) -> torch.Tensor:
        """`sum_p G[n, p]^2` of the only column: `[n]`."""
        if (factors := self.factors()) is not None:
            _, a, d = factors
            return (a.square().sum(-1) * d[0].square().sum(-1)).flatten(1).sum(1)
        if (pair := self.single(Pair)) is not None:
            return self.norms_of(pair)
        rows = self.single(Rows)
        if rows is not None and not self.run.deep:
            n, _, sums = rows.touched(self.run)
            return sums.new_zeros(self.run.n).index_add(0, n, sums.square().sum(1))
        if self.small:
            return self.norms_of_kept()
        return joined([self.flat(block).square().sum(1) for block in self.blocks()])

    def norms_of_kept(self) -> torch.Tensor:
        """The norms of gradients that are kept."""
        self.kept = joined([self.dense(block)[0] for block in self.blocks()])
        return self.kept.flatten(1).square().sum(1)

    @property
    def small(self) -> bool:
        """Whether the gradients take much less memory than the cotangents that they come from."""
        most = sum([u.d.numel() for u in self.uses if u.d is not None])
        return self.run.columns == 1 and self.leaf.numel() * self.run.n * thresholds.KEPT_SHARES <= most

    def flat(self, block: Block = WHOLE) -> torch.Tensor:
        """The gradients of the only column as rows `[n, P]`."""
        return self.dense(block)[0].reshape(-1, self.leaf.numel())

    def norms_of(self, use: Pair) -> torch.Tensor:
        """Norms of products with many positions: from products of positions with positions where that is cheaper."""
        run, (p, o, k) = self.run, use.sizes(self.run)
        if self.small and p >= max(o, k):
            return self.norms_of_kept()
        size = min(p * (o + k + 2 * p) * 2, use.size(run)) if p < max(o, k) else use.size(run)
        found, alone = [], isinstance(use, Convolution) and use.alone(run)
        for block in run.blocks([use], size):
            if alone:
                found.append(use.formed(run, block)[0].flatten(1).square().sum(1))
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
                found.append(formed(a, d)[0].flatten(1).square().sum(1))
        return joined(found)

    def sum_and_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_n G[n]` and `sum_p G[n, p]^2` of the only column."""
        return self.weighted(), self.norms()

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_n G[n]` and `sum_n (G[n] - mean G)^2` of the only column, without cancellation."""
        n, narrow = self.run.n, self.leaf.dtype == torch.float32
        factors = self.factors() if narrow and has_float64(self.leaf.device) else None
        if factors is not None:  # in float64, whose rounding is 1e9 times finer
            use, a, d = factors[0], factors[1].double(), factors[2][0].double()
            total = product(d, a)
            spread = torch.addcmul(product(d.square(), a.square()), total, total, value=-1 / n).clamp(min=0)
            both = [use.shaped(x.to(self.leaf.dtype)) for x in (total, spread)]
            return self.pulled(use, both[0], 0), self.pulled(use, both[1], 0)
        rows = self.single(Rows)
        if rows is not None and not self.run.deep:
            return self.moments_of(rows)
        return shifted_moments(self.dense(block)[0] for block in self.blocks())

    def moments_of(self, use: Rows) -> tuple[torch.Tensor, torch.Tensor]:
        """Moments of a table: a row that a sample does not touch counts as a zero."""
        n, (_, i, sums) = self.run.n, use.touched(self.run)
        total = sums.new_zeros(use.shape[0], sums.shape[-1]).index_add(0, i, sums)
        mean = total / n
        visits = sums.new_zeros(use.shape[0], 1).index_add(0, i, sums.new_ones(len(i), 1))
        apart = torch.zeros_like(total).index_add(0, i, (sums - mean[i]).square())
        both = [x.view(use.shape) for x in (total, apart + (n - visits) * mean.square())]
        return self.pulled(use, both[0], 0), self.pulled(use, both[1], 0)

    def products(self, exact: bool = False) -> torch.Tensor:
        """`sum_p G[v, n, p] G[w, m, p]` as `[V, n, V, n]`; `exact`, in float64."""
        v, n = self.run.columns, self.run.n
        if (factors := self.factors()) is not None:
            a, d = (x.double() if exact else x for x in factors[1:])
            a, d = a[:, :, 0].transpose(0, 1), d[:, :, :, 0].permute(2, 0, 1, 3).flatten(1, 2)  # [g, n, k], [g, V n, o]
            both = (d @ d.mT).view(-1, v, n, v, n) * (a @ a.mT)[:, None, :, None]
            return both.sum(0)
        rows = self.single(Rows)
        if rows is not None and not self.run.deep and v == 1 and rows.node.kind is LEAF:
            samples, i, sums = rows.touched(self.run)
            there, place = i.unique(return_inverse=True)  # the rows that some sample touches
            flat = sums.new_zeros(n * len(there), sums.shape[-1])
            flat = flat.index_copy(0, samples * len(there) + place, sums).view(n, -1)
        else:
            flat = self.dense().reshape(v * n, -1)
        flat = doubled(flat) if exact else flat
        return (flat @ flat.T).view(v, n, v, n)

    def along(self, direction: torch.Tensor) -> torch.Tensor:
        """`sum_p G[n, p] direction[p]` of the only column: `[n]`."""
        return joined([self.flat(block).mv(direction.flatten()) for block in self.blocks()])

    def sketches(self, sides: Any) -> torch.Tensor:
        """`first^T G[n] rest` of the only column: `[n, rows * columns]`."""
        use = self.single(Pair)
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

    def kronecker(self, sharing: str) -> dict[Any, Factors]:
        """The sums of outer products `B = sum_vnp s s^T` and `A = sum_np a a^T` of what was sent back and read."""
        use = self.uses[0]
        if len(self.uses) > 1 or use.node.kind is not LEAF or sharing == "backpack":
            raise Unsupported("K-factors of several uses, or of a computed parameter")
        sent, read, places, key = self.operands(use)
        n, p = sent.shape[1], sent.shape[2]
        reduced = sharing == "reduce"
        key = (*[id(u.edge) for u in use.uses or [use]], reduced) if key else None
        b = self.run.known.get(key)
        if b is None:
            b = _gram((sent.sum(2, keepdim=True) if reduced else sent).flatten(0, 1))
            if key:
                self.run.known[key] = b
        a = None if read is None or self.run.again else read(reduced)
        role = (*(place.dims for place in places), ())
        return {role: Factors(b, a, n if reduced else n * p, places, "", self.leaf.shape)}

    def operands(self, use: Use) -> tuple[torch.Tensor, Callable[[bool], torch.Tensor] | None, list[Place], bool]:
        """What is sent back, `[V, n, p, o]`, the factor of what is read, where the factors lie in the parameter, and
        whether a bias that is read beside is sent the same."""
        run, shape = self.run, self.leaf.shape
        if isinstance(use, Pair):
            sent = use.sends(run)
            if sent.shape[2] != 1 or use.of_w not in _MATRICES:
                raise Unsupported("K-factors of an operation in groups")
            (o,), (k,) = use.of_w[1:]
            over = (k,) if not isinstance(use, Convolution) else tuple(range(1, len(shape)))
            places = [Place((o,), shape[o]), Place(over, shape.numel() // shape[o])]
            return sent[:, :, 0], partial(_inputs, run, use), places, True
        if isinstance(use, Rows):
            if use.padding is not None or len(shape) != 2:
                raise Unsupported("K-factors of a table with padding")
            index, sent = use.parts(run)
            return sent, partial(_counts, index, sent, shape[0]), [Place((1,), shape[1]), Place((0,), shape[0])], False
        if type(use) is Expanded and sum(size != 1 for size in shape) < 2 and self.leaf.ndim == 1:
            view = use.view or tuple(shape)
            dim = next((i for i, size in enumerate(view) if size != 1), len(view) - 1) - len(view)
            sent = [u.sent(run) if u.factor is None else u.sent(run) * u.factor(run, WHOLE) for u in use.uses or [use]]
            if any(x.shape[dim] != shape[0] for x in sent):
                raise Unsupported("a parameter that is broadcast")
            sent = [x.movedim(dim, 2).reshape(*x.shape[:2], shape[0], -1).mT for x in sent]
            places = [Place((0,), shape[0])]
            return sent[0] if len(sent) == 1 else torch.cat(sent, 2), None, places, use.factor is None
        raise Unsupported("K-factors of another operation")


def _inputs(run: Run, use: Pair, reduced: bool) -> torch.Tensor:
    """`sum_np a a^T`, or of the means over the positions."""
    if not reduced and not run.deep and isinstance(use, Convolution) and (gram := use.gram(run)) is not None:
        return gram
    size = use.size(run)
    parts = [use.read(run, block)[:, 0] for block in run.blocks([use], size)]
    return summed(_gram(a.mean(1, keepdim=True) if reduced else a) for a in parts)


def _gram(x: torch.Tensor) -> torch.Tensor:
    """`sum_np x x^T` of `[n, p, k]`."""
    return outer(x.flatten(0, 1).T[None] if x.is_contiguous() else x.mT)


def _counts(index: torch.Tensor, sent: torch.Tensor, rows: int, reduced: bool) -> torch.Tensor:
    """How often each row is picked, or the products of these counts of samples."""
    if not reduced:
        return index.flatten().bincount(minlength=rows).to(sent.dtype)
    counts = sent.new_zeros(len(index), rows).scatter_add(1, index, torch.ones_like(index, dtype=sent.dtype))
    return outer((counts / index.shape[1]).unsqueeze(-1))


def together(uses: Sequence[Use]) -> list[Use]:
    """Uses of one tensor in the same layout as one with more positions, as those of a recurrent net."""
    out: list[Use] = []
    groups: dict[Any, list[Any]] = {}
    for u in uses:
        if type(u) is Pair:
            groups.setdefault((id(u.value), u.of_w, None if u.of_a is None else id(u)), []).append(u)
        elif type(u) is Expanded and u.factor is None and u.view is None and u.d is not None:
            groups.setdefault((id(u.value), u.axis, u.d.shape), []).append(u)
        else:
            out.append(u)
    for group in groups.values():
        if len(group) > 1 and type(group[0]) is Pair:
            out.append(Joined(group))
        elif len(group) > 1:
            one = Expanded(group[0].node, group[0].value, group[0].axis)
            one.d, one.edge, one.uses = summed([u.d for u in group]), group[0].edge, group
            out.append(one)
        else:
            out.append(group[0])
    return out
