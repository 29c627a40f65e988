"""Squares cell by cell: where a cotangent holds columns of several groups, each position belongs to one of them."""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F

from invfunc import thresholds
from invfunc.core.marks import DERIVED
from invfunc.core.shares import Shares
from invfunc.core.uses import Pair, Rows, Use, summed
from invfunc.linear_algebra.contract import joined
from invfunc.structure.look import sent


class Told(Shares):
    """The squares of one use, whose columns are told apart: `square_sum` is all that there is of it."""

    def __init__(self, shares: Shares, index: torch.Tensor | None, columns: int) -> None:
        """`index [K, C, r]` are the positions in each cell of K classes; the number of all positions is none, and fills
        a cell up. Each class has so many columns. Without an index each position is a cell."""
        self.__dict__.update(shares.__dict__)
        self.index, self.each, self.use = index, columns, shares.uses[0]

    def square_sum(self, each: bool = False) -> torch.Tensor:
        use = self.use
        if isinstance(use, Rows):
            return self._of_rows(use, each)
        if self.index is None:
            found = (self._of(d, a, each) for d, a in self._positions(use))
            return joined([*found]) if each else summed(found)
        if not each:
            return summed(self._of(d, a, each) for some in self._cells(use) for d, a in some)
        return torch.cat([summed(self._of(d, a, each) for d, a in some) for some in self._cells(use)])

    def _of(self, d: torch.Tensor, a: torch.Tensor | None, each: bool) -> torch.Tensor:
        """The squares of `d [n, S, r, V, g, o]` with `a [n, S, r, g, k]`, of each sample or of all."""
        use, (n, s, r, v, g, o) = self.use, d.shape
        derived = use.node.kind is DERIVED
        if r == 1 and not derived:
            d = d.squeeze(2).square().sum(2)  # [n, S, g, o]
            if a is None:
                return self._pulled(d.sum(1 if each else (0, 1)), each)
            a = a.squeeze(2).square()  # [n, S, g, k]
            if g > 1:
                return self._pulled(torch.einsum(f"nsgo,nsgk->{'n' * each}gok", d, a), each)
            d, a = d[:, :, 0], a[:, :, 0]
            return self._pulled((d.mT @ a)[:, None] if each else (d.flatten(0, 1).T @ a.flatten(0, 1))[None], each)
        d = d.permute(0, 1, 4, 2, 3, 5).reshape(n * s, g, r, v * o)
        rows = d.sum(2) if a is None else d.mT @ a.transpose(2, 3).reshape(n * s, g, r, -1)
        rows = rows.view(n, s, g, v, o, *([] if a is None else [-1]))
        if not derived:
            return self._pulled(rows.square_().sum((1, 3) if each else (0, 1, 3)), each)
        rows = self.pulled(use, self._shaped(rows.movedim(3, 2), 3), 3)
        return rows.square().sum((1, 2) if each else (0, 1, 2))

    def _shaped(self, rows: torch.Tensor, lead: int) -> torch.Tensor:
        """`[..., g, o, k]`, or `[..., 1, o]` of a shift, as what was read."""
        use = self.use
        return use.shaped(rows) if isinstance(use, Pair) else rows.reshape(*rows.shape[:lead], *use.shape)

    def _pulled(self, squares: torch.Tensor, each: bool) -> torch.Tensor:
        return self.pulled(self.use, self._shaped(squares, int(each)), int(each))

    def _positions(self, use: Use) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
        """Cotangents and what is read, position by position."""
        run = self.run
        for block in run.blocks([use], use.size(run)):
            d = sent(use, run, block)
            assert d is not None
            a = use.read(run, block) if isinstance(use, Pair) else None
            yield d.permute(1, 3, 0, 2, 4).unsqueeze(2), None if a is None else a.transpose(1, 2).unsqueeze(2)

    def _cells(self, use: Use) -> Iterator[Iterator[tuple[torch.Tensor, torch.Tensor | None]]]:
        """Cotangents and what is read in each cell, `[1, S, r, V, g, o]` and `[1, S, r, g, k]`, of each sample."""
        d, index, v = sent(use, self.run), self.index, self.each
        assert d is not None and index is not None
        classes, cells, r = index.shape
        _, n, g, p, o = d.shape
        turned = d.new_zeros(n, p + 1, classes, v, g, o)
        turned[:, :-1].copy_(d.unflatten(0, (classes, v)).permute(2, 4, 0, 1, 3, 5))
        read, k = None, 1
        if isinstance(use, Pair):
            found = use.read(self.run)
            k = found.shape[3]
            read = found.new_zeros(n, p + 1, g * k)
            read[:, :-1].copy_(found.transpose(1, 2).flatten(2))
        at = (index * classes + torch.arange(classes, device=d.device)[:, None, None]).flatten(0, 1)
        size = g * (v * o * k + r * (v * o + k))
        step = max(1, thresholds.CACHE.get(d.device.type, thresholds.ELSEWHERE) // thresholds.SHARES // size)

        def of(i: int) -> Iterator[tuple[torch.Tensor, torch.Tensor | None]]:
            for s in range(0, classes * cells, step):
                own = turned[i].flatten(0, 1).index_select(0, at[s : s + step].flatten())
                some = index.flatten(0, 1)[s : s + step].flatten()
                a = None if read is None else read[i].index_select(0, some).view(1, -1, r, g, k)
                yield own.view(1, -1, r, v, g, o), a

        return (of(i) for i in range(n))

    def _of_rows(self, use: Rows, each: bool) -> torch.Tensor:
        """The squares of a table: each cell picks some of its rows."""
        i, d = use.parts(self.run)  # [n, p], [K V, n, p, dim]
        n, p = i.shape
        cells = torch.arange(p, device=i.device).view(1, p, 1) if self.index is None else self.index
        classes, count, _ = cells.shape
        i = F.pad(i, (0, 1))[:, cells]  # [n, K, C, r]
        d = F.pad(d, (0, 0, 0, 1)).unflatten(0, (classes, self.each))
        d = torch.stack([x[:, :, at] for x, at in zip(d, cells, strict=True)]).permute(2, 0, 3, 4, 1, 5)
        number = torch.arange(n * classes * count, device=i.device).view(n, classes, count, 1)
        key, place = (number * use.shape[0] + i).flatten().unique(return_inverse=True)
        sums = d.new_zeros(len(key), *d.shape[4:]).index_add(0, place, d.flatten(0, 3)).square().sum(1)
        row = key % use.shape[0]
        if each:
            row = row + key // (use.shape[0] * classes * count) * use.shape[0]
        total = sums.new_zeros((n if each else 1) * use.shape[0], sums.shape[-1]).index_add(0, row, sums)
        total = total.view(*([n] if each else []), *use.shape)
        return self.pulled(use, total, int(each))
