"""Columns in groups: entries of the outputs that the loss couples, such as the classes of a pixel, belong to one group.

Columns of different groups are zero where the other is not, so one cotangent can hold one column of every group.
The entries of a sample are flat: `[n, M]`.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Protocol

import torch

from invfunc.loss.square_root import Columns, Elementwise, Softmax, Weighted, safe_root

Some = torch.Tensor | slice
"""The numbers of some groups, or of all."""


class Groups(Protocol):
    """A square root S of the Hessian of each sample, group by group."""

    rank: int
    """How many columns a group has."""
    rows: int
    """How many `products` gives for a group."""
    count: int
    alike: bool
    """Whether the columns of all samples are equal."""
    ids: torch.Tensor
    """The group of each entry, `[M]`; -1 for an entry that no column reaches."""

    def layer(self, start: int, stop: int) -> torch.Tensor:
        """Columns `start` to `stop` of every group at once: `[V, n, M]`."""
        ...

    def block(self, start: int, stop: int) -> torch.Tensor:
        """Columns among all, group by group, which are zero outside of their group: `[V, n, M]`."""
        ...

    def diagonal(self) -> torch.Tensor | None:
        """The root of the diagonal of the Hessian, `[n, M]`, where it is known without the columns."""
        ...

    def coupling(self) -> torch.Tensor | None:
        """The u, `[n, M]`, with which the part of a group is `-u u^T` beside that diagonal; None where it is zero."""
        ...

    def entries(self, some: Some) -> Some:
        """The entries that belong to some groups, group by group."""
        ...

    def products(self, moved: torch.Tensor, some: Some, part: slice) -> torch.Tensor:
        """`S^T u` of directions `[d, n, entries]`, those of some groups, for some samples: `[n, groups, rows, d]`.

        The rows of a group are those of any square root of its part of the Hessian.
        """
        ...


class OfEntries(Groups):
    """A diagonal Hessian: each entry is a group with one column."""

    rank = rows = 1

    def __init__(self, inner: Elementwise) -> None:
        self.inner, self.count = inner, inner.count
        h = inner.diagonal.flatten(1)
        self.root, self.alike = safe_root(h), bool((h == h[:1]).all())
        self.ids = torch.arange(self.count, device=h.device)

    def layer(self, start: int, stop: int) -> torch.Tensor:
        return self.root[None]

    def block(self, start: int, stop: int) -> torch.Tensor:
        return torch.where(self.ids[start:stop, None, None] == self.ids, self.root, 0)

    def diagonal(self) -> torch.Tensor:
        return self.root

    def coupling(self) -> None:
        return None

    def entries(self, some: Some) -> Some:
        return some

    def products(self, moved: torch.Tensor, some: Some, part: slice) -> torch.Tensor:
        return (moved * self.root[part, some]).permute(1, 2, 0).unsqueeze(2)


class OfPositions(Groups):
    """A softmax at each position: the classes there are a group."""

    alike = False

    def __init__(self, inner: Softmax, shape: torch.Size) -> None:
        """`shape` is that of the outputs, of all samples."""
        self.inner, logits = inner, inner.logits
        n, self.rows, self.count = logits.shape
        self.rank = self.rows - 1
        self.roots = (logits.log_softmax(1) / 2).exp()
        self.scale = safe_root(inner.weight)[:, None]
        # the entries lie as [more, C, rest], where `more` and `rest` are the positions
        self.rest = shape[2:].numel()
        at = torch.arange(self.count, device=logits.device).view(-1, 1, self.rest)
        self.ids = at.expand(-1, self.rows, -1).flatten()

    def laid(self, x: torch.Tensor) -> torch.Tensor:
        """`[..., C, positions]` as `[..., M]`."""
        return x.unflatten(-1, (-1, self.rest)).transpose(-3, -2).flatten(-3)

    def layer(self, start: int, stop: int) -> torch.Tensor:
        q = self.roots
        units = torch.eye(self.rows, dtype=q.dtype, device=q.device)[start:stop, :, None]
        found = [Softmax.columns(q, unit, q[:, v : v + 1]) * self.scale for v, unit in enumerate(units, start)]
        return self.laid(torch.stack(found))

    def block(self, start: int, stop: int) -> torch.Tensor:
        found = Weighted(self.inner).block(start, stop, slice(None)).left[0]
        return found.reshape(stop - start, len(self.roots), -1)

    def diagonal(self) -> torch.Tensor:
        q = self.roots
        p = q.square()
        largest = torch.zeros_like(p).scatter(1, p.argmax(1, keepdim=True), 1)
        others = torch.where(largest > 0, (p * (1 - largest)).sum(1, keepdim=True), 1 - p)  # 1 - p near 1 cancels
        return self.laid(q * safe_root(others) * self.scale)

    def coupling(self) -> torch.Tensor:
        return self.laid(self.roots.square() * self.scale)

    def entries(self, some: Some) -> Some:
        numbers = torch.arange(len(self.ids), device=self.ids.device).view(-1, self.rows, self.rest)
        return numbers.transpose(1, 2).flatten(0, 1)[some].flatten()

    def products(self, moved: torch.Tensor, some: Some, part: slice) -> torch.Tensor:
        q, scale = (x[part][:, :, some].mT.unsqueeze(3) for x in (self.roots, self.scale))  # [n, groups, C, 1]
        u = moved.unflatten(2, q.shape[1:3]).permute(1, 2, 3, 0)
        centred = u - (q.square().mT.to(u.dtype) @ u)
        return centred.mul_((q * scale).to(u.dtype))  # in its own memory, as there may be many classes


def grouped(columns: Columns, shape: torch.Size) -> Groups | None:
    """The columns of a criterion in groups; `shape` is that of the outputs."""
    inner: Any = columns.inner if isinstance(columns, Weighted) else columns
    if isinstance(inner, Elementwise):
        return OfEntries(replace(inner, diagonal=inner.diagonal.flatten(1)))
    return OfPositions(inner, shape) if isinstance(inner, Softmax) else None
