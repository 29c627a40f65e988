"""Columns in groups behind a function of the outputs: entries that are picked, moved and scaled keep their groups."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from invfunc import thresholds
from invfunc._torch.generators import scattered
from invfunc.loss.square_root import (
    Affine,
    Columns,
    Elementwise,
    General,
    OutputCotangents,
    Softmax,
    Weighted,
    rooted,
)
from invfunc.sparsity.bottleneck import Entries
from invfunc.sparsity.groups import Grouped, Groups, OfEntries, OfPositions, Some, Together


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

    def signs(self, part: slice) -> torch.Tensor | None:
        return self.inner.signs(part)

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


def grouped(columns: Columns, any_sign: bool = False) -> Grouped | None:
    """Columns in groups; None where a function of the outputs mixes what the loss keeps apart.

    Of a Hessian that may have `any_sign`, nothing that is without known structure.
    """
    if isinstance(columns, Elementwise):
        return OfEntries(columns, any_sign)
    if isinstance(columns, Softmax):
        return OfPositions(columns, any_sign)
    if isinstance(columns, Affine):
        inner = grouped(columns.inner, any_sign) if len(columns.roots) == 1 else None
        return None if inner is None else _moved(columns, inner)
    if isinstance(columns, Weighted):
        return grouped(columns.inner, any_sign)
    if any_sign:
        return None
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
    shuffled = [torch.arange(count), *(scattered(count, seed).argsort() for seed in (1, 2))]
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
