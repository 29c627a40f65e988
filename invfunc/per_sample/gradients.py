"""The shares of samples in one parameter: the sum of its factors, kept factored until a statistic asks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace

import torch

from invfunc import thresholds
from invfunc._torch.functorch import innermost
from invfunc._torch.precision import doubled
from invfunc._torch.values import anywhere, decides
from invfunc.core.lots import Drawn, drawn, variances
from invfunc.core.sides import formed
from invfunc.core.squares import shifted_moments, squared
from invfunc.linear_algebra.contract import contract, joined, summed, widened
from invfunc.operations.factors import Part
from invfunc.per_sample.biases import Role
from invfunc.per_sample.cotangents import Columns, Cotangents, Samples, length
from invfunc.per_sample.covariances import covariances
from invfunc.per_sample.factor import Factor
from invfunc.per_sample.products import products, products_between, products_with
from invfunc.per_sample.projected import projected
from invfunc.per_sample.sketches import Projection, sketched
from invfunc.recording.scope import Scope
from invfunc.recording.tags import ParameterUse


@dataclass
class Shares:
    """`G[v, n, *p]` of one parameter for the columns of a pass and the samples of a run."""

    leaf: torch.Tensor
    """The parameter as the run saw it: the root of what derives from it."""
    uses: list[ParameterUse]
    columns: Columns
    samples: Samples
    scope: Scope = field(kw_only=True)
    budget: int = field(kw_only=True)
    """How many numbers an intermediate tensor may have."""
    seen_before: bool = field(default=False, kw_only=True)
    """Whether other columns of these samples have been reduced before."""
    place: int = field(default=0, kw_only=True)
    """The number of the parameter among all."""
    name: Callable[[int], str] = field(default=str, kw_only=True)
    """What the parameter at a place is called."""
    role: Role | None = field(default=None, kw_only=True)
    """That in operations which read it with another parameter, if they are all that read it."""
    factors: list[Factor] = field(init=False)

    def __post_init__(self) -> None:
        alike: dict[object, list[ParameterUse]] = {}
        for use in self.uses:
            alike.setdefault(use.kind if len(self.uses) > 1 else None, []).append(use)
        self.factors = [Factor(uses, self.columns, self.samples, self.budget) for uses in alike.values()]

    @property
    def count(self) -> int:
        """The number of samples."""
        return self.samples.count

    @property
    def bias(self) -> int | None:
        """The number of the bias whose weight it is."""
        return self.role.other if self.role is not None and self.role.called == "weight" else None

    @property
    def weight(self) -> int | None:
        """The number of the weight whose bias it is."""
        return self.role.other if self.role is not None and self.role.called == "bias" else None

    def dense(self) -> torch.Tensor:
        """`[V, count, *p]`, instantiated."""
        blocks = self._blocks(thresholds.OPERANDS * self.budget, sum(f.work for f in self.factors))
        shares = [self._dense(part) for part in blocks]
        return joined(shares, 1)

    def weighted(self, weights: torch.Tensor | None = None) -> torch.Tensor:
        """`sum_n weights[n] G[n]` of the only column; of weights 1, if there are none."""
        return summed(self._pull(f, f.weighted(weights), 0) for f in self.factors)

    def square_sum(self, each: bool = False) -> torch.Tensor:
        """`sum_v weight[v, n] G[v, n]^2`, or the product of left and right in place of the square; summed over samples,
        or `[count, *p]` of each."""
        if self._apart:
            return summed(self._pull(f, f.square_sum(each), int(each)) for f in self.factors)
        columns, found = self.columns, []
        for part in self._blocks():
            right = None if columns.right is None else self._dense(part, columns.right)
            square = squared(self._dense(part), right).movedim(1, 0)
            if columns.weight is not None:
                square = square * columns.weight[:, part].T.reshape(*square.shape[:2], *[1] * self.leaf.ndim)
            found.append(square.sum(1) if each else square.sum((0, 1)))
        return joined(found) if each else summed(found)

    def squares_and_variance(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_vn G[v, n]^2`, and the variance that it has as some columns are drawn."""
        squares, spread = [], []
        for part in self._blocks():
            each = self._dense(part).square()
            squares.append(each.sum((0, 1)))
            spread.append(variances(each, drawn(self.columns.lots, part, each)).sum(0))
        return summed(squares), summed(spread)

    def squares_of_columns(self) -> tuple[torch.Tensor, Drawn]:
        """`sum_p G[v, n, p]^2` as `[V, count]`, and which columns are drawn."""
        norms = [self._dense(part).unsqueeze(-1).flatten(2).square().sum(2) for part in self._blocks()]
        return (found := torch.cat(norms, 1)), drawn(self.columns.lots, self.samples.all, found)

    def outer(self) -> torch.Tensor:
        """`sum_vn weight[v, n] G[v, n] G[v, n]^T` as `[P, P]`; symmetric also with products of left and right."""
        columns, found = self.columns, []
        for part in self._blocks():
            share = other = self._dense(part).unsqueeze(-1).flatten(2)
            if columns.right is not None:
                other = self._dense(part, columns.right).unsqueeze(-1).flatten(2)
            if columns.weight is not None:
                share = share * columns.weight[:, part].to(share.dtype)[:, :, None]
            found.append(share.flatten(0, 1).mT @ other.flatten(0, 1))
        total = summed(found)
        return total if columns.right is None else (total + total.mT) / 2

    def norms(self) -> torch.Tensor:
        """`sum_p G[n, p]^2` of the only column: `[count]`."""
        if self._apart:
            return summed(f.norms() for f in self.factors)
        return torch.cat([self._dense(part)[0].reshape(length(part), -1).square().sum(1) for part in self._blocks()])

    def sum_and_norms(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_n G[n]` and `sum_p G[n, p]^2` of the only column."""
        if not self._apart:
            return self.weighted(), self.norms()
        pairs = [(f, f.sum_and_norms()) for f in self.factors]
        return summed(self._pull(f, total, 0) for f, (total, _) in pairs), summed(norms for _, (_, norms) in pairs)

    def along(self, direction: torch.Tensor) -> torch.Tensor:
        """`sum_p G[n, p] direction[p]` of the only column: `[count]`."""
        flat = direction.flatten()
        return torch.cat([self._dense(part)[0].reshape(length(part), -1).mv(flat) for part in self._blocks()])

    def side(self, last: bool, other: torch.Tensor | None = None, diagonal: bool = False) -> torch.Tensor:
        """`sum_vn G A G^T` of shares as matrices over the first dim and all others, or with `last` `sum_vn G^T B G`, or
        its diagonal; of the identity if there is no other matrix, and of a diagonal one if that is a vector."""
        found = None
        if len(self.factors) == 1 and self.factors[0].use.param is self.leaf:
            found = None
        if found is None:
            found = summed(formed(self._dense(part), last, other, diagonal) for part in self._blocks())
        return found if diagonal else (found + found.mT) / 2

    def sketches(self, sides: Projection) -> torch.Tensor:
        """`first^T G[n] rest` of the only column: `[count, rows * columns]`."""
        return summed(self._sketches(f, sides) for f in self.factors)

    def _sketches(self, factor: Factor, sides: Projection) -> torch.Tensor:
        use, found = factor.use, None
        if use.derived.selected:
            found = sketched(factor, sides, None if use.param is self.leaf else self._origins(use))
        if found is not None:
            return found
        shares = (self._pull(factor, factor.dense(self.columns.left, part), 2)[0] for part in self._blocks())
        return joined([sides.of(share) for share in shares])

    def covariances(self, weight: torch.Tensor) -> torch.Tensor:
        """`sum_p weight[p] G[v, n, p] G[w, n, p]` of each sample: `[count, V, V]`."""
        if self._apart:
            return summed(covariances(f, self._read(f, weight)) for f in self.factors)
        return self.covariances_by(lambda share: share * weight)

    def covariances_by(self, times: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        """The same with the products of shares `[V, b, *p]` with any symmetric matrix."""
        found = []
        for part in self._blocks():
            pair = [("VNp", share := self._dense(part)), ("WNp", times(share))]
            found.append(contract(widened([(c, x.unsqueeze(-1).flatten(2)) for c, x in pair]), "NVW"))
        return joined(found)

    def projected(self, vectors: torch.Tensor) -> torch.Tensor:
        """`sum_p G[v, n, p] vectors[k, p]` of each sample: `[count, V, k]`."""
        along = vectors.movedim(0, -1)
        if self._apart:  # as for `covariances`, with which the result may cancel
            return summed(projected(f, self._read(f, along)) for f in self.factors)
        flat, found = along.reshape(self.leaf.numel(), len(vectors)), []
        for part in self._blocks():
            share = self._dense(part)
            found.append((share.reshape(*share.shape[:2], -1).to(flat.dtype) @ flat).movedim(0, 1))
        return joined(found)

    def _read(self, factor: Factor, x: torch.Tensor) -> torch.Tensor:
        """The entries `[*p, ...]` of a tensor that are at those which an operation reads; 0 where it reads none."""
        if factor.use.param is self.leaf:
            return x
        rows = x.reshape(self.leaf.numel(), *x.shape[self.leaf.ndim :])
        return torch.cat([rows, rows.new_zeros(1, *rows.shape[1:])])[self._origins(factor.use)]

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_n G[n]` and `sum_n (G[n] - mean G)^2` of the only column, without cancellation."""
        if self._apart:
            pairs = [(f, f.moments()) for f in self.factors]
            total, centred = ([self._pull(f, both[i], 0) for f, both in pairs] for i in (0, 1))
            return summed(total), summed(centred)
        return shifted_moments(self._dense(part)[0] for part in self._blocks())

    def products(self, exact: bool = False) -> torch.Tensor:
        """`sum_p G[v, n, p] G[w, m, p]` as `[V, count, V, count]`; `exact`, in float64."""
        if self._apart:
            return summed(products(f, exact) for f in self.factors)
        share = doubled(self.dense()) if exact else self.dense()
        return _products(share, share)

    def products_with(self, last: int) -> torch.Tensor:
        """The products of all samples but the last so many with these: `[V, count - last, V, last]`."""
        if self._apart:
            return summed(products_with(f, last) for f in self.factors)
        return _products(*self.dense().split([self.samples.count - last, last], 1))

    def products_between(self, other: Shares) -> torch.Tensor:
        """The products with the samples of another run: `[V, count, V, others]`."""
        if self._apart and other._apart and self._alike(other):
            return summed(products_between(f, g) for f, g in zip(self.factors, other.factors, strict=True))
        return _products(self.dense(), other.dense())

    def kept(self) -> Shares:
        """The same, for other runs: those of this one are gone through while cotangents come and go."""
        return replace(self, columns=replace(self.columns, left=[*self.columns.left]))

    def _alike(self, other: Shares) -> bool:
        """Whether the factors of another run are of the same entries of the parameter, in the same order."""
        pairs = [*zip(self.factors, other.factors, strict=False)]
        if len(self.factors) != len(other.factors) or not all(f.layout() == g.layout() for f, g in pairs):
            return False
        return all(
            (f.use.param is self.leaf and g.use.param is other.leaf)
            or torch.equal(self._origins(f.use), other._origins(g.use))
            for f, g in pairs
        )

    def _origins(self, use: ParameterUse) -> torch.Tensor:
        if "origins" not in use.memory:
            use.memory["origins"] = self.origins(use.param)
        return use.memory["origins"]

    def _blocks(self, budget: int | None = None, size: int | None = None) -> Iterator[Part]:
        """Blocks of samples whose shares fit the budget."""
        if size is None:
            cotangent = self.columns.left[self.uses[0].site]
            assert cotangent is not None
            size = sum(f.work for f in self.factors) + cotangent.shape[0] * self.leaf.numel()
        yield from self.samples.parts(size, budget or self.budget // thresholds.SHARES)

    def _dense(self, part: Part, cotangents: Cotangents | None = None) -> torch.Tensor:
        cotangents = self.columns.left if cotangents is None else cotangents
        reached = (f for f in self.factors if any(cotangents[use.site] is not None for use in f.uses))
        return summed(self._pull(f, f.dense(cotangents, part), 2) for f in reached)

    def _pull(self, factor: Factor, share: torch.Tensor, lead: int) -> torch.Tensor:
        """Pull shares back from a derived parameter to the parameter itself."""
        param = factor.use.param
        if param is self.leaf:
            return share
        scale = None if share.dtype == param.dtype else _scale(share, lead)
        low = (share if scale is None else share / scale).to(param.dtype)
        if lead == 0:
            (found,) = self.scope.grad([param], [self.leaf], [low], batched=False)
        else:
            (found,) = self.scope.grad([param], [self.leaf], [low.flatten(0, lead - 1)])
        if found is None:
            return share.new_zeros(*share.shape[:lead], *self.leaf.shape)
        found = self.scope.leave(found).reshape((*share.shape[:lead], *self.leaf.shape))
        if scale is None:
            return found
        return found.to(torch.promote_types(found.dtype, share.dtype)) * scale.reshape(
            (*share.shape[:lead], *[1] * self.leaf.ndim)
        )

    def origins(self, param: torch.Tensor) -> torch.Tensor:
        """Which entry of the parameter each entry of a tensor is that picks among them; -1 where it is none."""
        entries = torch.arange(self.leaf.numel(), device=self.leaf.device).reshape(self.leaf.shape)
        if param is self.leaf:
            return entries
        found, scale, rest = torch.zeros(param.shape, dtype=torch.long, device=param.device), 1, entries + 1
        while bool((rest > 0).any()):  # digit by digit: each is exact in half precision
            digits = self.scope.push(param, self.leaf, (rest % 128).to(param.dtype))
            found = found + scale * innermost(digits).long()
            rest, scale = rest // 128, scale * 128
        return found - 1

    @property
    def _apart(self) -> bool:
        """Whether squares of shares are squares of factors: each entry of the parameter is read at one place only."""
        if not all(f.use.derived.selected for f in self.factors):
            return False
        if len(self.factors) == 1:
            return True
        if sum(f.use.param.numel() for f in self.factors) > self.leaf.numel():
            return False
        read = summed(self._pull(f, torch.ones_like(f.use.param), 0) for f in self.factors)
        decides(read, "whether two operations read the same entries of a parameter")
        return not anywhere(read > 1.5)


def _products(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """The products of shares `[V, n, *p]` with others: `[V, n, V, m]`."""
    flat, others = (x.reshape(x.shape[0] * x.shape[1], -1) for x in (one, other))
    return (flat @ others.T).reshape(*one.shape[:2], *other.shape[:2])


def _scale(share: torch.Tensor, lead: int) -> torch.Tensor:
    """The factor to divide shares by so that float16 holds their entries and the sums of these."""
    size = share.detach().abs().reshape(*share.shape[:lead], -1).sum(-1) / 1024
    size = torch.where((size > 0) & size.isfinite(), size, 1)
    return size.reshape((*size.shape, *[1] * (share.ndim - lead)))
