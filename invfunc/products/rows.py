"""The rows of a square root of a curvature matrix: columns at the outputs of each sample, pulled back."""

from __future__ import annotations

from collections.abc import Sequence
from functools import reduce

import torch

from invfunc.loss.square_root import Columns
from invfunc.products.maps import Kind, Pull, Vectors
from invfunc.products.split import Split


class Rows:
    """Columns `R[v, n]` at the outputs, and their products there; the losses of the samples have one, which is 1."""

    def __init__(self, split: Split, columns: Sequence[Columns]) -> None:
        self.n, self.values = split.n, [Kind.of(z) for z in split.values]
        self.places = [(r.ordinal, r.axis) for r in split.roots]
        self.blocks = [made.block(0, made.count, slice(None)).left for made in columns if made.count]
        self.counts = [len(next(iter(left.values()))) for left in self.blocks] if self.places else [1]
        kinds = [c.dtype for left in self.blocks for c in left.values()] + [z.dtype for z in self.values]
        dtype = reduce(torch.promote_types, kinds)
        self.kind = Kind(torch.Size([sum(self.counts), self.n]), dtype, self.values[0].device)
        """That of a product with all of them."""

    def along(self, t: Vectors, pull: Pull) -> Vectors:
        """`R[v, n] . t[n]` of tangents at the outputs: `[V, N]`, or `[K, V, N]` of several."""
        several = [x if x is None or pull.batched else x.unsqueeze(0) for x in t]
        if not self.places:
            found = [x.unsqueeze(1) for x in several if x is not None]
        else:
            given = [(i, axis, x) for (i, axis), x in zip(self.places, several, strict=True) if x is not None]
            exposed = {i: self._flat(axis.expose(x, self.n, 1)) for i, axis, x in given}
            along = [self._products(left, exposed) for left in self.blocks if exposed]
            found = [torch.cat(along, 1)] if along else []
        return [x if pull.batched else x.squeeze(0) for x in found] or [None]

    def sent(self, u: Vectors, pull: Pull) -> Vectors:
        """The transpose: the cotangents `sum_v u[v, n] R[v, n]` at the outputs."""
        if u[0] is None:
            return [None] * len(self.values)
        each = u[0] if pull.batched else u[0].unsqueeze(0)
        if not self.places:
            whole = [each.squeeze(1).to(self.values[0].dtype)]
        else:
            found: dict[int, torch.Tensor] = {}
            for left, part in zip(self.blocks, each.split(self.counts, 1), strict=True):
                for i, s in left.items():
                    x = torch.einsum("kmn,mnx->knx", part.to(self.kind.dtype), self._flat(s))
                    x = x.reshape(len(x), *s.shape[1:])
                    found[i] = found[i] + x if i in found else x
            places = zip(self.places, self.values, strict=True)
            whole = [axis.restore(found[i], self.n, 1).to(z.dtype) if i in found else None for (i, axis), z in places]
        return [x if x is None or pull.batched else x.squeeze(0) for x in whole]

    def _products(self, left: dict[int, torch.Tensor], exposed: dict[int, torch.Tensor]) -> torch.Tensor:
        """Those of one kind of columns."""
        met = [torch.einsum("mnx,knx->kmn", self._flat(s), exposed[i]) for i, s in left.items() if i in exposed]
        if met:
            return torch.stack(met).sum(0)
        one, other = next(iter(left.values())), next(iter(exposed.values()))
        return other.new_zeros(len(other), len(one), self.n)

    def _flat(self, x: torch.Tensor) -> torch.Tensor:
        return x.reshape(*x.shape[:2], -1).to(self.kind.dtype)
