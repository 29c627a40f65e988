"""Groups of columns where they come into a stage, as far as a search has to know of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import torch

from invfunc.sparsity.colouring import hulls
from invfunc.sparsity.pattern import INPUTS


@dataclass
class Source:
    """Groups of columns, and their boxes in each frame."""

    rank: int
    rows: int
    """How many rows the products with directions have for each group."""
    parts: Callable[[int], list[tuple[torch.Tensor | None, torch.Tensor]]]
    """The boxes (in a frame) and the groups of the entries of each root."""

    @cached_property
    def count(self) -> int:
        return max(int(ids.max()) for _, ids in self.parts(INPUTS)) + 1

    def boxes(self, frame: int) -> torch.Tensor:
        """`[2, k, groups]`"""
        found = None
        for rows, ids in self.parts(frame):
            if rows is not None:
                hull = hulls(rows, ids)
                hull = torch.nn.functional.pad(hull, (0, self.count - hull.shape[2]), value=-torch.inf)
                found = hull if found is None else torch.maximum(found, hull)
        return torch.full((2, 1, self.count), -torch.inf) if found is None else found


def members_of(of: torch.Tensor, count: int, filling: int) -> torch.Tensor:
    """The members of each of several sets, `[count, most]`, given the set of each; -1 is in none."""
    order = of.argsort(stable=True)
    order = order[of[order] >= 0]
    sizes = torch.bincount(of[order], minlength=count)
    within = torch.arange(len(order), device=of.device) - (sizes.cumsum(0) - sizes)[of[order]]
    found = of.new_full((count, max(1, int(sizes.max()))), filling)
    found[of[order], within] = order
    return found
