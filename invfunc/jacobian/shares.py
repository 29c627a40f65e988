"""The factored Jacobian of one parameter: shares of samples, kept factored until a statistic asks."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from invfunc._functorch import innermost
from invfunc.jacobian.contract import Term, contract, cost, present, squeezed, twice, widened
from invfunc.jacobian.plan import even
from invfunc.jacobian.scope import Scope
from invfunc.jacobian.tags import Tap

Deltas = list[torch.Tensor | None]
"""For each site of a run the cotangents `[V, n, *one]` at its output, None where nothing arrives."""


@dataclass
class Columns:
    """What was pulled back: `left`, `right` for a product of two, and `weight[v, n]`, which multiplies squares."""

    left: Deltas
    right: Deltas | None = None
    weight: torch.Tensor | None = None


_TRAFFIC = 16
"""What forming an entry of a share costs, in multiplications of a matrix product: it goes through memory four times."""


@dataclass
class Shares:
    """`G[v, n, *p]` of one parameter for the columns of a pass and all n samples of a run."""

    scope: Scope
    leaf: torch.Tensor
    """The parameter as the run saw it: the root of what derives from it."""
    taps: list[Tap]
    columns: Columns
    n: int
    budget: int
    """How many numbers an intermediate tensor may have."""

    def dense(self, deltas: Deltas | None = None) -> torch.Tensor:
        """`[V, n, *p]`, instantiated."""
        deltas = self.columns.left if deltas is None else deltas
        taps = [tap for tap in self.taps if deltas[tap.site] is not None]
        share = self._dense(taps[0], deltas)
        for tap in taps[1:]:
            share = share + self._dense(tap, deltas)
        return share

    def square_sum(self) -> torch.Tensor:
        """`sum_vn weight[v, n] G[v, n]^2`, or the product of left and right in place of the square."""
        if self._factored:
            return _sum(self._square_sum(tap) for tap in self.taps)
        right = None if self.columns.right is None else self.dense(self.columns.right)
        return _squares(self.dense(), right, self.columns.weight, "VN")

    def moments(self) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum_n G[n]` and `sum_n (G[n] - mean G)^2` of the only column, without cancellation."""
        if self._factored:
            pairs = [self._moments(tap) for tap in self.taps]
            return _sum(total for total, _ in pairs), _sum(centred for _, centred in pairs)
        shares = self.dense()[0]
        total = shares.sum(0)
        return total, (shares - total / self.n).square().sum(0)

    # One tap

    def _parts(self, size: int, budget: int) -> list[slice]:
        """Blocks of samples of which each makes about `budget` numbers, `size` a sample."""
        return [slice(a, b) for a, b in even(self.n, max(1, budget // max(1, size)))]

    def _size(self, tap: Tap) -> int:
        """How many numbers the instantiated shares of a sample have, with what they are made of."""
        delta = self.columns.left[tap.site]
        assert delta is not None
        return tap.recipe.work + delta[:, 0].numel() + delta.shape[0] * tap.param.numel()

    def _terms(self, tap: Tap, deltas: Deltas, part: slice) -> list[Term]:
        delta = deltas[tap.site]
        assert delta is not None
        return squeezed(widened(tap.recipe.build(delta[:, part], part)))

    def _dense(self, tap: Tap, deltas: Deltas) -> torch.Tensor:
        output = "VN" + tap.recipe.output
        shares = []
        for part in self._parts(tap.recipe.work, 16 * self.budget):
            terms = self._terms(tap, deltas, part)
            shares.append(contract(terms, present(output, terms)).reshape(_sizes(terms, output, part)))
        share = shares[0] if len(shares) == 1 else torch.cat(shares, 1)
        return self._finish(tap, share, 2)

    def _square_sum(self, tap: Tap) -> torch.Tensor:
        columns, output = self.columns, tap.recipe.output

        def terms(part: slice) -> tuple[list[Term], list[Term], list[Term]]:
            left = self._terms(tap, columns.left, part)
            right = left if columns.right is None else self._terms(tap, columns.right, part)
            weight = [] if columns.weight is None else squeezed(widened([("NV", columns.weight[:, part].T)]))
            return left, right, weight

        parts = self._parts(self._size(tap), self.budget // 4)
        left, right, weight = terms(parts[0])
        kept = present(output, left)
        direct = cost(twice(left, right, output) + weight, kept) < _instantiated(left, present("NV" + output, left))
        if direct:  # nothing large is formed
            parts = self._parts(tap.recipe.work, 16 * self.budget)
        total = None
        for i, part in enumerate(parts):
            if direct or i > 0:
                left, right, weight = terms(part)
            if direct:
                more = contract(widened(twice(left, right, output) + weight), kept)
            else:
                instance = present("NV" + output, left)
                share, lead = contract(left, instance), instance[: len(instance) - len(kept)]
                other = None if columns.right is None else contract(right, instance)
                more = _squares(share, other, weight[0][1] if weight else None, lead, fresh=len(left) > 1)
            total = more if total is None else total + more
        assert total is not None
        return self._finish(tap, total.reshape(_sizes(left, output)), 0)

    def _moments(self, tap: Tap) -> tuple[torch.Tensor, torch.Tensor]:
        deltas, output = self.columns.left, tap.recipe.output
        parts = self._parts(self._size(tap), self.budget // 4)
        terms = self._terms(tap, deltas, parts[0])
        kept = present(output, terms)
        shape = _sizes(terms, output)
        exact = all(x.dtype == torch.float32 for _, x in terms)  # their products are, in float64
        if exact and cost(twice(terms, terms, output), kept) < _instantiated(terms, present("N" + output, terms)):
            total, centred = self._wide_moments(tap)
        else:
            total, centred = self._shifted_moments(tap, parts, terms)
        return self._finish(tap, total.reshape(shape), 0), self._finish(tap, centred.reshape(shape), 0)

    def _wide_moments(self, tap: Tap) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum G^2 - (sum G)^2 / n` in float64, whose rounding is 1e9 times finer than that of the float32 shares."""
        total, squares = [], []
        for part in self._parts(tap.recipe.work, 16 * self.budget):
            terms = [(labels, x.double()) for labels, x in self._terms(tap, self.columns.left, part)]
            kept = present(tap.recipe.output, terms)
            total.append(contract(terms, kept))
            squares.append(contract(twice(terms, terms, tap.recipe.output), kept))
        mean_square = torch.addcmul(_sum(squares), (first := _sum(total)), first, value=-1 / self.n)
        return first.float(), mean_square.float().clamp(min=0)

    def _shifted_moments(self, tap: Tap, parts: list[slice], terms: list[Term]) -> tuple[torch.Tensor, torch.Tensor]:
        """`sum (G - s)^2 - (sum (G - s))^2 / n` with s the mean of the first block: no cancellation, and one pass."""
        shift, totals, squares = None, [], []
        for i, part in enumerate(parts):
            terms = terms if i == 0 else self._terms(tap, self.columns.left, part)
            instance, kept = present("N" + tap.recipe.output, terms), present(tap.recipe.output, terms)
            share = contract(terms, instance)
            share = share if len(instance) > len(kept) else share.unsqueeze(0)
            shift = share.mean(0) if shift is None else shift
            share = share - shift
            totals.append(share.sum(0))
            squares.append(_squares(share, None, None, "N", fresh=True))
        total = _sum(totals)
        centred = torch.addcmul(_sum(squares), total, total, value=-1 / self.n).clamp(min=0)
        assert shift is not None
        return total + self.n * shift, centred

    # From a tap to the parameter

    def _finish(self, tap: Tap, share: torch.Tensor, lead: int) -> torch.Tensor:
        """`[*lead, *output]` in the layout of the tapped parameter, then of the leaf."""
        if tap.recipe.finish is not None:
            share = tap.recipe.finish(share, lead)
        share = share.reshape((*share.shape[:lead], *tap.param.shape))
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
        return self.scope.leave(found).reshape((*wide.shape[:lead], *self.leaf.shape))

    @property
    def _factored(self) -> bool:
        """Whether squares of shares are squares at the taps: each entry of the parameter is read at one place only."""
        if not all(tap.derived.selected for tap in self.taps):
            return False
        if len(self.taps) == 1:
            return True
        if sum(tap.param.numel() for tap in self.taps) > self.leaf.numel():
            return False
        read = _sum(self._pull(tap, torch.ones_like(tap.param), 0) for tap in self.taps)
        return not bool((innermost(read) > 1.5).any())


def _sum(tensors: Iterable[torch.Tensor]) -> torch.Tensor:
    first, *others = tensors
    for other in others:
        first = first + other
    return first


def _sizes(terms: list[Term], output: str, part: slice | None = None) -> list[int]:
    """The sizes of the labels, 1 where a dimension of size 1 was dropped."""
    sizes = {c: s for labels, x in terms for c, s in zip(labels, x.shape, strict=True)}
    if part is not None:
        sizes["N"] = part.stop - part.start
    return [sizes.get(c, 1) for c in output]


def _instantiated(terms: list[Term], instance: str) -> float:
    """The cost of forming shares and squaring them."""
    return cost(terms, instance) + _TRAFFIC * math.prod(_sizes(terms, instance))


def _squares(
    left: torch.Tensor, right: torch.Tensor | None, weight: torch.Tensor | None, lead: str, fresh: bool = False
) -> torch.Tensor:
    """`sum weight * left * right` over the leading dimensions; a fresh `left` may be overwritten."""
    if right is not None:
        product = left * right
    else:
        product = left.square_() if fresh and not left.requires_grad else left.square()
    weight = None if weight is None else weight.to(product.dtype)
    if not lead:
        return product if weight is None else product * weight
    if weight is None:
        return product.sum(list(range(len(lead))))
    return torch.tensordot(weight, product, len(lead))
