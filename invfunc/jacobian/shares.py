"""The factored Jacobian of one parameter: shares of samples, kept factored until a statistic asks."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch

from invfunc.jacobian.contract import Term, contract, cost, present, squeezed, twice, widened
from invfunc.jacobian.scope import Scope
from invfunc.jacobian.trace import Tap

Deltas = list[torch.Tensor | None]
"""For each site of a run the cotangents `[V, n, *one]` at its output, None where nothing arrives."""


@dataclass
class Columns:
    """What was pulled back: `left`, and `right` where the statistic is a product of two; `weight[v, n]` multiplies squares."""

    left: Deltas
    right: Deltas | None = None
    weight: torch.Tensor | None = None


@dataclass
class Shares:
    """`G[v, n, *p]` of one parameter for the columns and the samples `part` of a run."""

    scope: Scope
    leaf: torch.Tensor
    """The parameter as the run saw it: the root of what derives from it."""
    taps: list[Tap]
    columns: Columns
    part: slice
    n: int

    def parts(self, budget: int) -> Iterator[Shares]:
        """The same in blocks of samples whose intermediate tensors have about `budget` numbers."""
        size = 1
        for tap in self.taps:
            delta = self.columns.left[tap.site]
            assert delta is not None
            instance = delta.shape[0] * tap.param.numel()
            size = max(size, tap.recipe.work + min(instance, budget))
        step = max(1, budget // size)
        for start in range(0, self.n, step):
            stop = min(start + step, self.n)
            yield replace(self, part=slice(start, stop), n=stop - start)

    # Pieces

    def _terms(self, tap: Tap, deltas: Deltas) -> list[Term]:
        delta = deltas[tap.site]
        assert delta is not None
        return widened(tap.recipe.build(delta[:, self.part], self.part))

    def _sizes(self, terms: list[Term], output: str) -> list[int]:
        sizes = {c: s for labels, x in terms for c, s in zip(labels, x.shape, strict=True) if s != 1}
        return [sizes.get(c, 1) for c in output]

    def _finish(self, tap: Tap, share: torch.Tensor, lead: int) -> torch.Tensor:
        """`[*lead, *output]` in the layout of the tapped parameter, then of the leaf."""
        if tap.recipe.finish is not None:
            share = tap.recipe.finish(share, lead)
        share = share.reshape(*share.shape[:lead], *tap.param.shape)
        return self._pull(tap, share, lead)

    def _pull(self, tap: Tap, share: torch.Tensor, lead: int) -> torch.Tensor:
        """From a derived parameter to the parameter itself."""
        if tap.param is self.leaf:
            return share
        wide, share = share, share.to(tap.param.dtype)
        if lead == 0:
            (found,) = self.scope.grad([tap.param], [self.leaf], [share], batched=False)
        else:
            (found,) = self.scope.grad([tap.param], [self.leaf], [share.flatten(0, lead - 1)])
        if found is None:
            return wide.new_zeros(*wide.shape[:lead], *self.leaf.shape)
        return self.scope.leave(found).reshape(*wide.shape[:lead], *self.leaf.shape)

    def _dense(self, tap: Tap, deltas: Deltas, pulled: bool = True) -> torch.Tensor:
        terms = self._terms(tap, deltas)
        output = "VN" + tap.recipe.output
        sizes = self._sizes(terms, output)
        small = squeezed(terms)
        share = contract(small, present(output, small)).reshape(sizes)
        return self._finish(tap, share, 2) if pulled else share

    def dense(self, deltas: Deltas | None = None) -> torch.Tensor:
        """`[V, n, *p]`, instantiated."""
        deltas = self.columns.left if deltas is None else deltas
        taps = [tap for tap in self.taps if deltas[tap.site] is not None]
        share = self._dense(taps[0], deltas)
        for tap in taps[1:]:
            share = share + self._dense(tap, deltas)
        return share

    @property
    def _factored(self) -> bool:
        """Whether squares of shares are squares at the taps: each entry of the parameter is read at one place only."""
        if not all(tap.derived.selected for tap in self.taps):
            return False
        if len(self.taps) == 1:
            return True
        if sum(tap.param.numel() for tap in self.taps) > self.leaf.numel():
            return False
        return not _overlap(self)

    # Statistics

    def square_sum(self) -> torch.Tensor:
        """`sum_vn weight[v, n] G[v, n]^2`, or the product of left and right in place of the square."""
        if self._factored:
            total = self._square_sum(self.taps[0])
            for tap in self.taps[1:]:
                total = total + self._square_sum(tap)
            return total
        return _weighted_squares(self.dense(), self._other(), self.columns.weight, self.part)

    def _other(self) -> torch.Tensor | None:
        return None if self.columns.right is None else self.dense(self.columns.right)

    def _square_sum(self, tap: Tap) -> torch.Tensor:
        columns, output = self.columns, tap.recipe.output
        left = self._terms(tap, columns.left)
        right = left if columns.right is None else self._terms(tap, columns.right)
        sizes = self._sizes(left, output)
        left, right = squeezed(left), left if columns.right is None else squeezed(right)
        right = left if columns.right is None else right
        every = twice(left, right, output)
        if columns.weight is not None:
            every += squeezed(widened([("VN", columns.weight[:, self.part])]))
        kept, instance = present(output, left), present("VN" + output, left)
        instantiate = cost(left, instance) + math.prod(self._sizes(left, instance))
        if cost(every, kept) < instantiate:
            total = contract(every, kept)
        else:
            dense = contract(left, instance)
            other = None if columns.right is None else contract(right, instance)
            lead = [c for c in "VN" if c in instance]
            weight = columns.weight
            if weight is not None:
                weight = weight[:, self.part].reshape([s for s, c in zip(self._vn(), "VN", strict=True) if c in lead])
            total = _squares(dense, other, weight, len(lead))
        return self._finish(tap, total.reshape(sizes), 0)

    def _vn(self) -> tuple[int, int]:
        delta = next(d for d in self.columns.left if d is not None)
        return delta.shape[0], self.n

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_n G[n]` and `sum_n (G[n] - mean G)^2` of the only column, without cancellation."""
        tap = self.taps[0]
        if len(self.taps) == 1 and tap.derived.selected and not isinstance(tap.param.dtype, complex):
            terms = self._terms(tap, self.columns.left)
            output = tap.recipe.output
            sizes, small = self._sizes(terms, output), squeezed(terms)
            kept, instance = present(output, small), present("N" + output, small)
            instantiate = cost(small, instance) + 3 * math.prod(self._sizes(small, instance))
            low = all(x.dtype == torch.float32 for _, x in small)
            if low and self.n > 1 and cost(twice(small, small, output), kept) < instantiate:
                # products of float32 are exact in float64, and its rounding is 1e9 times finer
                wide = [(labels, x.double()) for labels, x in small]
                total = contract(wide, kept)
                squares = contract(twice(wide, wide, output), kept)
                centred = (squares - total.square() / self.n).clamp(min=0).to(small[0][1].dtype)
                total = total.to(centred.dtype)
            else:
                shares = contract(small, instance)
                shares = shares if self.n > 1 else shares.unsqueeze(0)
                total = shares.sum(0)
                centred = (shares - total / self.n).square().sum(0)
            return self._finish(tap, total.reshape(sizes), 0), self._finish(tap, centred.reshape(sizes), 0)
        shares = self.dense()[0]
        total = shares.sum(0)
        return total, (shares - total / self.n).square().sum(0)


def _squares(left: torch.Tensor, right: torch.Tensor | None, weight: torch.Tensor | None, lead: int) -> torch.Tensor:
    product = left * (left if right is None else right)
    if weight is not None:
        product = product * weight.reshape(*weight.shape, *[1] * (product.ndim - lead))
    return product.sum(list(range(lead))) if lead else product


def _weighted_squares(
    left: torch.Tensor, right: torch.Tensor | None, weight: torch.Tensor | None, part: slice
) -> torch.Tensor:
    return _squares(left, right, None if weight is None else weight[:, part], 2)


def _overlap(shares: Shares) -> bool:
    """Whether two taps read the same entry of the parameter."""
    count = None
    for tap in shares.taps:
        ones = shares._pull(tap, torch.ones_like(tap.param), 0).detach()
        count = ones if count is None else count + ones
    return count is not None and bool((count > 1.5).any())
