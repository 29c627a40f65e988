"""Columns in groups: entries of the outputs that the loss couples, such as the classes of a pixel, belong to one group.

Columns of different groups are zero where the other is not, so one cotangent can hold one column of every group.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from invfunc.loss.square_root import (
    Elementwise,
    General,
    OutputCotangents,
    Softmax,
    safe_root,
)
from invfunc.sparsity.bottleneck import Entries

Groups = dict[int, torch.Tensor]
"""The group of each entry of a sample, `[*one]` for each root; -1 for an entry that no column reaches."""
Some = torch.Tensor | slice
"""The numbers of some groups, or of all."""


class Grouped(Protocol):
    """A square root S of the Hessian of each sample, group by group."""

    @property
    def rank(self) -> int:
        """How many columns a group has."""
        ...

    @property
    def rows(self) -> int:
        """How many `products` gives for a group."""
        return self.rank

    @property
    def groups(self) -> Groups: ...

    @property
    def count(self) -> int:
        """How many groups there are."""
        return max(int(ids.max()) for ids in self.groups.values()) + 1

    @property
    def alike(self) -> bool:
        """Whether the columns of all samples are equal."""
        return False

    def layer(self, start: int, stop: int, part: slice) -> OutputCotangents:
        """Columns `start` to `stop` of every group at once, for some samples: `[V, n, *one]`."""
        ...

    def diagonal(self, part: slice) -> OutputCotangents | None:
        """The root of the diagonal of the Hessian, `[n, *one]`, where it is known without the columns."""
        return None

    def signs(self, part: slice) -> torch.Tensor | None:
        """The sign with which the columns of each group count, `[n, groups]`; None where all are added."""
        return None

    def signed(self, x: OutputCotangents, part: slice) -> OutputCotangents | None:
        """What is at the entries, `[n, *one]`, times the sign of their groups; None where all are added."""
        signs = self.signs(part)
        return None if signs is None else {i: y * signs[:, self.groups[i].clamp(min=0)] for i, y in x.items()}

    def coupling(self, part: slice) -> OutputCotangents | None:
        """The u, `[n, *one]`, with which each group's part of the Hessian is `-u u^T` beside that diagonal; None where
        there is nothing beside it."""
        return None

    def entries(self, some: Some) -> Entries:
        """The entries at each root that belong to some groups."""
        ...

    def products(self, moved: OutputCotangents, part: slice, some: Some) -> torch.Tensor:
        """`S^T u` of directions `[d, n, entries]`, those of some groups, for some samples: `[n, groups, rows, d]`.

        The rows of a group are those of any square root of its part of the Hessian.
        """
        ...


@dataclass
class OfEntries(Grouped):
    """A diagonal Hessian: each entry is a group with one column."""

    inner: Elementwise
    any_sign: bool = False
    """Whether it may be negative."""

    @property
    def rank(self) -> int:
        return 1

    @property
    def count(self) -> int:
        return self.inner.diagonal[0].numel()

    @property
    def groups(self) -> Groups:
        h = self.inner.diagonal
        return {self.inner.root: torch.arange(h[0].numel(), device=h.device).reshape(h.shape[1:])}

    def layer(self, start: int, stop: int, part: slice) -> OutputCotangents:
        return {self.inner.root: self.diagonal(part)[self.inner.root][None]}

    def diagonal(self, part: slice) -> OutputCotangents:
        h = self.inner.diagonal[part]
        return {self.inner.root: safe_root(h.abs() if self.any_sign else h)}

    def signs(self, part: slice) -> torch.Tensor | None:
        return self.inner.diagonal[part].flatten(1).sign() if self.any_sign else None

    def entries(self, some: Some) -> Entries:
        return {self.inner.root: some}

    def products(self, moved: OutputCotangents, part: slice, some: Some) -> torch.Tensor:
        root = safe_root(self.inner.diagonal[part].flatten(1)[:, some])
        return (moved[self.inner.root] * root).permute(1, 2, 0).unsqueeze(2)

    @property
    def alike(self) -> bool:
        h = self.inner.diagonal
        return bool((h == h[:1]).all())


@dataclass
class OfPositions(Grouped):
    """A softmax at each position: the classes there are a group."""

    inner: Softmax
    any_sign: bool = False
    """Whether its weights may be negative."""

    @property
    def rank(self) -> int:
        return self.inner.logits.shape[1] - 1

    @property
    def rows(self) -> int:
        return self.inner.logits.shape[1]

    @property
    def count(self) -> int:
        return self.inner.logits.shape[2]

    @property
    def groups(self) -> Groups:
        logits = self.inner.logits
        at = torch.arange(logits.shape[2], device=logits.device).expand(logits.shape[1:])
        return {self.inner.root: self.inner.layout(at[None, None])[0, 0]}

    @cached_property
    def roots(self) -> torch.Tensor:
        """`sqrt(p)` as `[N, C, positions]`."""
        return (self.inner.logits.log_softmax(1) / 2).exp()

    @cached_property
    def scale(self) -> torch.Tensor:
        k = self.inner.weight
        return safe_root(k.abs() if self.any_sign else k)[:, None]

    def signs(self, part: slice) -> torch.Tensor | None:
        return self.inner.weight[part].sign() if self.any_sign else None

    def layer(self, start: int, stop: int, part: slice) -> OutputCotangents:
        q, scale = self.roots[part], self.scale[part]
        units = torch.eye(q.shape[1], dtype=q.dtype, device=q.device)[start:stop, :, None]
        found = [self.inner.columns(q, unit, q[:, v : v + 1]) * scale for v, unit in enumerate(units, start)]
        return {self.inner.root: self.inner.layout(torch.stack(found))}

    def diagonal(self, part: slice) -> OutputCotangents:
        q = self.roots[part]
        p = q.square()
        largest = torch.zeros_like(p).scatter(1, p.argmax(1, keepdim=True), 1)
        others = torch.where(largest > 0, (p * (1 - largest)).sum(1, keepdim=True), 1 - p)  # 1 - p near 1 cancels
        found = q * safe_root(others) * self.scale[part]
        return {self.inner.root: self.inner.layout(found[None])[0]}

    def coupling(self, part: slice) -> OutputCotangents:
        u = self.roots[part].square() * self.scale[part]
        return {self.inner.root: self.inner.layout(u[None])[0]}

    def entries(self, some: Some) -> Entries:
        return {self.inner.root: self._order[some].flatten()}

    def products(self, moved: OutputCotangents, part: slice, some: Some) -> torch.Tensor:
        q, scale = (x[part][:, :, some].mT.unsqueeze(3) for x in (self.roots, self.scale))
        u = moved[self.inner.root].unflatten(2, q.shape[1:3]).permute(1, 2, 3, 0)
        centred = u - (q.square().mT.to(u.dtype) @ u)
        return centred.mul_((q * scale).to(u.dtype))  # in its own memory, as there may be many classes

    @cached_property
    def _order(self) -> torch.Tensor:
        """Where the entries `[positions, C]` are in the root."""
        one = self.roots.shape[1:]
        at = torch.arange(one.numel(), device=self.roots.device).reshape(1, 1, *one)
        return self.inner.layout(at).flatten().argsort().reshape(one).T.contiguous()


@dataclass
class Together(Grouped):
    """A Hessian without known structure: all entries are one group."""

    inner: General
    """The square root of the Hessian."""

    @property
    def rank(self) -> int:
        return self.inner.count

    @property
    def count(self) -> int:
        return 1

    @property
    def groups(self) -> Groups:
        device = self.inner.hessian.device
        return {i: torch.zeros(one, dtype=torch.long, device=device) for i, one in self.inner.shapes.items()}

    def layer(self, start: int, stop: int, part: slice) -> OutputCotangents:
        return self.inner.block(start, stop, part).left

    def entries(self, some: Some) -> Entries:
        return dict.fromkeys(self.inner.shapes, slice(None))

    def products(self, moved: OutputCotangents, part: slice, some: Some) -> torch.Tensor:
        flat = torch.cat([moved[i] for i in self.inner.shapes], 2)
        return torch.einsum(
            "nmr,dnm->nrd", self.inner.hessian[part], flat.expand(-1, len(self.inner.hessian[part]), -1)
        ).unsqueeze(1)


@dataclass
class OfRun(Grouped):
    """Groups of the samples of one run, whichever part of the batch it is."""

    inner: Grouped

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def count(self) -> int:
        return self.inner.count

    @property
    def groups(self) -> Groups:
        return self.inner.groups

    def layer(self, start: int, stop: int, part: slice) -> OutputCotangents:
        return self.inner.layer(start, stop, slice(None))

    def diagonal(self, part: slice) -> OutputCotangents | None:
        return self.inner.diagonal(slice(None))

    def signs(self, part: slice) -> torch.Tensor | None:
        return self.inner.signs(slice(None))

    def entries(self, some: Some) -> Entries:
        return self.inner.entries(some)

    def products(self, moved: OutputCotangents, part: slice, some: Some) -> torch.Tensor:
        return self.inner.products(moved, slice(None), some)
