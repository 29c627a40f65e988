"""Columns in groups: entries of the outputs that the loss couples, such as the classes of a pixel, belong to one group.

Columns of different groups are zero where the other is not, so one cotangent can hold one column of every group.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Protocol

import torch

from invfunc import thresholds
from invfunc.loss.square_root import (
    Affine,
    Columns,
    Elementwise,
    General,
    OutputCotangents,
    Softmax,
    Weighted,
    rooted,
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
    def alike(self) -> bool:
        """Whether the columns of all samples are equal."""
        return False

    def layer(self, start: int, stop: int, part: slice) -> OutputCotangents:
        """Columns `start` to `stop` of every group at once, for some samples: `[V, n, *one]`."""
        ...

    def diagonal(self, part: slice) -> OutputCotangents | None:
        """The root of the diagonal of the Hessian, `[n, *one]`, where it is known without the columns."""
        return None

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

    @property
    def rank(self) -> int:
        return 1

    @property
    def groups(self) -> Groups:
        h = self.inner.diagonal
        return {self.inner.root: torch.arange(h[0].numel(), device=h.device).reshape(h.shape[1:])}

    def layer(self, start: int, stop: int, part: slice) -> OutputCotangents:
        return {self.inner.root: safe_root(self.inner.diagonal[part])[None]}

    def diagonal(self, part: slice) -> OutputCotangents:
        return {self.inner.root: safe_root(self.inner.diagonal[part])}

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

    @property
    def rank(self) -> int:
        return self.inner.logits.shape[1] - 1

    @property
    def rows(self) -> int:
        return self.inner.logits.shape[1]

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
        return safe_root(self.inner.weight)[:, None]

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
class Moved(Grouped):
    """Groups of entries that are picked from the root, moved and scaled."""

    inner: Grouped
    root: int
    pull: Callable[[torch.Tensor, slice], OutputCotangents]
    to: torch.Tensor
    """Which inner entry each entry of the root becomes, `[*one]`; -1 for none."""
    scale: torch.Tensor
    """`[N, *one]`"""

    @property
    def rank(self) -> int:
        return self.inner.rank

    @property
    def rows(self) -> int:
        return self.inner.rows

    @property
    def alike(self) -> bool:
        return self.inner.alike and bool((self.scale == self.scale[:1]).all())

    @property
    def groups(self) -> Groups:
        (own,) = self.inner.groups.values()
        return {self.root: torch.where(self.to < 0, -1, own.flatten()[self.to])}

    def layer(self, start: int, stop: int, part: slice) -> OutputCotangents:
        return self.pull(self.inner.layer(start, stop, slice(None))[self.root], part)

    def diagonal(self, part: slice) -> OutputCotangents | None:
        inner, taken = self.inner.diagonal(slice(None)), self.to[self.to >= 0]
        if inner is None or len(taken.unique()) < len(taken):
            return None
        return {self.root: self.pull(inner[self.root][None], part)[self.root][0]}

    def coupling(self, part: slice) -> OutputCotangents | None:
        inner = self.inner.coupling(slice(None))
        return None if inner is None else {self.root: self.pull(inner[self.root][None], part)[self.root][0]}

    def entries(self, some: Some) -> Entries:
        return {self.root: (self._places(some)[0] >= 0).nonzero().flatten()}

    def products(self, moved: OutputCotangents, part: slice, some: Some) -> torch.Tensor:
        places, count = self._places(some)
        taken = places >= 0
        u = moved[self.root] * self.scale[part].flatten(1)[:, taken]
        carried = u.new_zeros(*u.shape[:2], count).index_add(2, places[taken], u)
        return self.inner.products({self.root: carried}, part, some)

    def _places(self, some: Some) -> tuple[torch.Tensor, int]:
        """The place of each entry of the root among the inner ones of some groups, -1 for none; how many these are."""
        (own,), (inner,) = self.inner.groups.values(), self.inner.entries(some).values()
        numbers = torch.arange(own.numel(), device=own.device)
        place = torch.full_like(numbers, -1)
        place[inner] = numbers[: (count := len(place[inner]))]
        return torch.where(self.to < 0, -1, place[self.to]).flatten(), count


def grouped(columns: Columns) -> Grouped | None:
    """Columns in groups; None where a function of the outputs mixes what the loss keeps apart."""
    if isinstance(columns, Elementwise):
        return OfEntries(columns)
    if isinstance(columns, Softmax):
        return OfPositions(columns)
    if isinstance(columns, Affine):
        inner = grouped(columns.inner) if len(columns.roots) == 1 else None
        return None if inner is None else _moved(columns, inner)
    if isinstance(columns, Weighted):
        return grouped(columns.inner)
    root = rooted(columns, "all")
    assert isinstance(root, General)
    return Together(root)


def _moved(columns: Affine, inner: Grouped) -> Moved | None:
    """Columns at an affine function of the root, unless that mixes entries.

    What an entry of the root becomes is found out by pulling back three numberings of the inner entries: a mixture of
    several has no number that is the same place in all three.
    """
    (own,) = inner.groups.values()
    block = columns.inner.block(0, 1, slice(None)).left[columns.root]
    n, count = block.shape[1], own.numel()
    if count >= min(thresholds.NUMBERED, 2 / torch.finfo(block.dtype).eps):  # numbers that this dtype does not have
        return None
    generator = torch.Generator()  # of its own, with torch's own seed
    shuffled = [torch.arange(count), *(torch.randperm(count, generator=generator) for _ in range(2))]
    numbers = torch.stack([torch.ones(count), *(p + 1.0 for p in shuffled)]).to(block)
    numbers = numbers.reshape(4, 1, *own.shape).expand(4, n, *own.shape)
    scale, *found = columns.pull(numbers, slice(None))[columns.root]
    none = (scale == 0) & (torch.stack(found) == 0).all(0)
    places = []
    for pulled, order in zip(found, shuffled, strict=True):
        number = torch.where(none, 1, pulled / torch.where(none, 1, scale))
        near = number.round()
        known = (number - near).abs() < 0.1
        near = torch.where(known & (near >= 1) & (near <= count), near, 1).long() - 1
        places.append(torch.where(none, -1, torch.where(known, order.to(near.device).argsort()[near], -2)))
    to = places[0]
    if any(not torch.equal(to, other) for other in places[1:]) or bool((to != to[:1]).any() | (to < -1).any()):
        return None
    return Moved(inner, columns.root, columns.pull, to[0], scale)
