"""A parameter that is a table: the entries of a per-sample gradient land in the rows that its positions picked."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from invfunc.operations.factors import Part, Recipe


@dataclass(frozen=True)
class Table:
    """Where entries u land of so many rows; what lands behind the last is dropped."""

    recipe: Recipe
    count: int

    def rows(self, part: Part) -> torch.Tensor:
        """The row of each entry of some samples: `[b, u]`."""
        return self.recipe.rows(part, self.count)

    def landed(self, share: torch.Tensor, part: Part) -> torch.Tensor:
        """`[b, u, *rest]` of some samples, added up in the rows."""
        target = share.new_zeros(self.count + 1, *share.shape[2:])
        return target.index_add(0, self.rows(part).flatten(), share.flatten(0, 1))[:-1]

    def landed_each(self, share: torch.Tensor, part: Part) -> torch.Tensor:
        """`[V, b, u, *rest]` with what lands in the same row added up, for each column and sample."""
        v, b, u, *rest = share.shape
        rows = self.rows(part).reshape(1, b, u, *[1] * len(rest)).expand(share.shape)
        return share.new_zeros(v, b, self.count + 1, *rest).scatter_add(2, rows, share)[:, :, :-1]
