"""Derivatives of a whole function along single entries of its parameters.

`J e` is had as the derivative of `u -> J^T u`, so that every operation with a second derivative has one. There are no
rules of operations here, samples are told apart at the outputs alone, and the Hessian of the loss is autograd's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import torch

from invfunc import thresholds, tree
from invfunc.loss.square_root import Columns
from invfunc.operations.axis import Axis
from invfunc.products.curvature import Jacobian
from invfunc.products.given import Given
from invfunc.products.maps import Pull, Vectors
from invfunc.products.split import Split


def wide(x: torch.Tensor) -> torch.Tensor:
    """On the CPU and in float64, where numbers are compared."""
    return x.detach().cpu().double()


Entries = Callable[[int, torch.Tensor], torch.Tensor]
"""From a leaf and places in it to numbers there, `[K, ...]`."""


def in_parts(places: torch.Tensor, *given: Any) -> tuple[torch.Tensor, ...]:
    """The places in parts whose vectors fit the budget, with about as many numbers on the way as what is given has."""
    tensors = tree.tensors(given)
    budget = thresholds.CACHE.get(tensors[0].device.type, thresholds.ELSEWHERE)
    return places.split(max(1, budget // max(1, sum(x.numel() for x in tensors))))


def units(p: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Vectors with a one at each of these places of a tensor: `[K, *p]`."""
    v = torch.zeros(len(places), p.numel(), dtype=p.dtype, device=p.device)
    return v.scatter_(1, places[:, None].to(p.device), 1).reshape(len(places), *p.shape)


def _like(x: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Drawn numbers of the size of those of x."""
    u = torch.rand(x.shape, generator=generator, dtype=torch.float64) * 2 - 1
    return x.abs().nan_to_num(0, 0, 0).amax() * u.to(x)


class Run:
    """A function that was run at a point and split, with derivatives along entries of its parameters."""

    def __init__(self, given: Given, split: Split, around: torch.Generator | None = None) -> None:
        self.given, self.split, self.around = given, split, around
        self.jacobian = Jacobian.recorded(given, split)
        self._axes = [root.axis for root in split.roots] or [Axis(0)]
        """Where the outputs have their samples; the losses of the samples themselves have nothing else."""

    @cached_property
    def slopes(self) -> Vectors:
        """The gradient of the loss in the outputs, as a function of them."""
        split = self.split
        with self.given.mode.back(split.result.device):
            pull = Pull(split.scope, graph=True)
            return pull([split.result], [r.value for r in split.roots], [torch.ones_like(split.result)])

    def forth(self, leaf: int, v: torch.Tensor) -> list[torch.Tensor]:
        """`J v` for `v [K, *p]` of a leaf: `[K, *z]` for each output."""
        return self.there([v], self.jacobian.of(leaf))

    def there(self, v: Sequence[torch.Tensor], jacobian: Jacobian | None = None) -> list[torch.Tensor]:
        """`J v` for a list of leaves `[K, *p]`, or of some of them."""
        with self._back():
            found = (jacobian or self.jacobian).forth(list(v), Pull(self.split.scope, batched=True))
        pairs = zip(found, self.split.values, strict=True)
        return [z.detach().new_zeros(len(v[0]), *z.shape) if x is None else x.detach() for x, z in pairs]

    def back(self, cotangents: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`J^T c` for `c [K, *z]` of each output: a tensor `[K, *p]` for each leaf."""
        count = len(cotangents[0])
        with self._back():
            found = self.jacobian.back(list(cotangents), Pull(self.split.scope, batched=True))
        leaves = self.given.leaves
        return [p.new_zeros(count, *p.shape) if g is None else g.detach() for g, p in zip(found, leaves, strict=True)]

    def _back(self) -> Any:
        return self.given.mode.back(self.split.result.device)

    # What the loss makes of that

    @cached_property
    def gradient(self) -> list[Columns]:
        """The column of the loss; none where the values are its terms themselves."""
        return [self.split.gradient()] if self.split.roots else []

    def along(self, t: Sequence[torch.Tensor], columns: Sequence[Columns]) -> torch.Tensor:
        """The columns of each sample times `t`, an image of K vectors: `[M, K, N]`."""
        if not self.split.roots:
            return wide(t[0])[None]
        images = dict(zip((r.ordinal for r in self.split.roots), self._exposed(t), strict=True))
        found: list[torch.Tensor] = []
        for made in columns:
            left = made.block(0, made.count, slice(None)).left
            parts = [
                torch.einsum("mnx,knx->mkn", wide(s).reshape(*s.shape[:2], -1), images[i])
                for i, s in left.items()
                if i in images
            ]
            found.append(torch.stack(parts).sum(0))
        return torch.cat(found)

    def curved(self, t: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> torch.Tensor:
        """`t H others` of each sample: `[K, N]`. By way of others `around` it is `t H (others + u) - u H t`, where what
        cancels or is lost in H has other rounding errors."""
        if self.around is None:
            return self._curved(t, others)
        u = [_like(x, self.around) for x in others]
        return self._curved(t, [x + y for x, y in zip(others, u, strict=True)]) - self._curved(u, t)

    def _curved(self, t: Sequence[torch.Tensor], others: Sequence[torch.Tensor]) -> torch.Tensor:
        with self._back():
            bent = Pull(self.split.scope, batched=True)(self.slopes, [r.value for r in self.split.roots], list(others))
        full = [torch.zeros_like(x) if y is None else y.detach() for x, y in zip(t, bent, strict=True)]
        return torch.stack([(a * b).sum(2) for a, b in zip(self._exposed(t), self._exposed(full), strict=True)]).sum(0)

    def _exposed(self, t: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """`[K, N, everything else]` of each output."""
        n = self.split.n
        exposed = [axis.expose(x, n, 1) for x, axis in zip(t, self._axes, strict=True)]
        return [wide(x).reshape(len(x), n, -1) for x in exposed]

    def shares(self, weights: torch.Tensor) -> list[torch.Tensor]:
        """Sums of the shares with weights `[S, N]`, by backward passes: a tensor `[S, *p]` for each leaf."""
        return self.back(self._cotangents(weights))

    def _cotangents(self, weights: torch.Tensor) -> list[torch.Tensor]:
        """The gradient of the sum of the losses with weights `[S, N]`, in the outputs: `[S, *z]` of each."""
        split, count, found = self.split, len(weights), list[torch.Tensor]()
        if not split.roots:
            (z,) = split.values
            return [weights.to(z).reshape(count, *z.shape)]
        slopes = self.gradient[0].block(0, 1, slice(None)).left
        for root, value in zip(split.roots, split.values, strict=True):
            c = slopes[root.ordinal][0].detach()
            each = weights.to(c).reshape(*weights.shape, *[1] * (c.ndim - 1)) * c
            found.append(root.axis.restore(each, split.n, 1).reshape(count, *value.shape))
        return found

    @cached_property
    def hessian(self) -> Entries:
        """The diagonal of each sample's part of the Hessian, `J^T H J` and what bends f: `[K, N]` at some places."""
        weights = self.split.scope.enter(self.split.result.detach().new_ones(1, self.split.n))
        with self._back():
            slopes = self.jacobian.back([c[0] for c in self._cotangents(weights)], Pull(self.split.scope, graph=True))

        def found(leaf: int, places: torch.Tensor) -> torch.Tensor:
            x = bent(self.given, slopes[leaf], leaf, places, graph=True)
            with self._back():  # linear in the weights, with what each sample adds for the slope
                (each,) = Pull(self.split.scope, batched=True)([x], [weights], [torch.eye(len(places)).to(x)])
            each = torch.zeros(len(places), self.split.n) if each is None else each[:, 0]
            if not self.split.roots:
                return wide(each)
            t = self.forth(leaf, units(self.given.leaves[leaf], places))
            return wide(each) + self.curved(t, t)

        return found


def bent(given: Given, slope: Any, leaf: int, places: torch.Tensor, graph: bool = False) -> torch.Tensor:
    """The derivative of the slope of a leaf at some places, along each of them: `[K]`."""
    p = given.params[leaf]
    with given.mode.back(p.device):
        (x,) = Pull(given.scope, batched=True, graph=graph)([slope], [p], [units(p.detach(), places)])
    if x is None:
        return p.new_zeros(len(places))
    return x.reshape(len(places), -1).gather(1, places[:, None].to(x.device))[:, 0]
