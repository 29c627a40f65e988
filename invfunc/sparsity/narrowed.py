"""Columns at a bottleneck: any R with `R^T R = S^T S` has the same GGN below, so as many as it is wide will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from invfunc import thresholds
from invfunc.errors import ArgumentError
from invfunc.linear_algebra.contract import joined
from invfunc.loss.square_root import Block, OutputCotangents
from invfunc.passes.run import Run
from invfunc.plan import even
from invfunc.sparsity.bottleneck import Bottleneck, Entries, Transposed, output_size
from invfunc.sparsity.groups import Grouped, Groups, Some


@dataclass
class Blocks:
    """How the entries of a bottleneck fall apart, and which groups of columns reach which block."""

    bottleneck: Bottleneck
    places: torch.Tensor
    """The entries of each block, `[Q, m]`; one behind the last fills a block up."""
    members: torch.Tensor
    """The groups that reach it, `[Q, G]`; -1 fills up."""
    rows: int
    """How many rows the factor of a block has at most."""
    shared: bool
    """Whether the columns may be the same for all samples, as the layers above are affine."""

    @property
    def width(self) -> int:
        return self.places.shape[1]

    @property
    def whole(self) -> bool:
        """Whether all entries are one block, in their order."""
        return len(self.places) == 1 and self.width == self.bottleneck.width

    @property
    def rank(self) -> int:
        """How many columns each block keeps."""
        return min(self.rows, self.width)

    @property
    def count(self) -> int:
        """How many columns are kept."""
        return len(self.places) * self.rank

    @property
    def numbers(self) -> int:
        """How many numbers are factored for a sample."""
        return len(self.places) * self.rows * self.width

    @cached_property
    def ids(self) -> torch.Tensor:
        """The block of each entry; -1 for none."""
        found = self.places.new_full((self.bottleneck.width + 1,), -1)
        blocks = torch.arange(len(self.places), device=found.device).repeat_interleave(self.width)
        found[self.places.flatten()] = blocks
        return found[:-1]


@dataclass
class Narrowed(Grouped):
    """The columns that are left of others at a bottleneck: a triangle for each block of its entries."""

    sources: Sequence[Grouped]
    """The columns above."""
    run: Run
    """The run, up to where these come in."""
    alone: Run
    """That of one sample."""
    blocks: Blocks
    budget: int

    @property
    def rank(self) -> int:
        return self.blocks.rank

    @property
    def count(self) -> int:
        return self.blocks.count

    @property
    def alike(self) -> bool:
        return len(self._known) == 1

    @cached_property
    def one(self) -> torch.Size:
        x, axis = self.blocks.bottleneck.of(self.run)
        return axis.expose(x, self.run.trace.n).shape[1:]

    @property
    def groups(self) -> Groups:
        return {0: self.blocks.ids.reshape(self.one)}

    @cached_property
    def triangles(self) -> torch.Tensor | None:
        """`[n, Q, rank, m]`, or `[1, ...]` if they are the same for all samples; None if they cannot be had.

        Unit vectors are moved forwards from there, in this run or in that of one sample, which stands for all.
        """
        if any(isinstance(s, Narrowed) and s.triangles is None for s in self.sources):
            return None
        blocks, bottleneck, run, one = self.blocks, self.blocks.bottleneck, self.run, self.one
        x, n, alone = bottleneck.of(run)[0], run.trace.n, self.alone if blocks.shared else run
        seeds = torch.zeros(blocks.width, one.numel() + 1, dtype=x.dtype, device=x.device)
        seeds = seeds.scatter(1, blocks.places.T, 1)[:, :-1].reshape(blocks.width, 1, *one)
        same = alone.trace.n < n or n == 1
        count = 1 if same and all(s.alike for s in self.sources) else n
        each = blocks.width * alone.trace.n * -(-output_size(alone) // len(blocks.places))
        ranges = [range(a, b) for a, b in even(len(blocks.places), max(1, thresholds.MOVED // each))]
        at = [self._reached(some) for some in ranges]
        check, found = Transposed(bottleneck, run, blocks.places, at), list[torch.Tensor]()
        try:
            for some, entries in zip(ranges, at, strict=True):
                moved = bottleneck.forward(alone, seeds, self.budget, entries)
                check.add(moved, entries)
                found.append(self._factored(moved, some, count, same))
                del moved  # before those to the next blocks are made
        except (RuntimeError, ArgumentError):  # no second derivative, as of fused attention, or no batching rule
            return None
        return joined(found, 1) if check.right else None

    def _factored(self, moved: OutputCotangents, blocks: range, count: int, same: bool) -> torch.Tensor:
        """The triangles of some blocks, `[count, blocks, rank, m]`, from what was moved to what they reach."""
        each, at, found = max(1, self.budget // (self.blocks.rows * self.blocks.width)), self._reached(blocks), []
        for a, b in even(count, max(1, each // len(blocks))):
            part, own = slice(self._start + a, self._start + b), []
            taken = moved if same else {i: u[:, a:b] for i, u in moved.items()}
            for some in (blocks[c:d] for c, d in even(len(blocks), each)):
                rows = []
                for s in self.sources:
                    groups = self._members(some)
                    apart = len(some) < len(blocks) or len(self.sources) > 1
                    u = _part(taken, at, s.entries(groups)) if apart else taken
                    rows.append(s.products(u, part, groups))
                own.append(torch.linalg.qr(self._rows(rows, some), mode="r").R)  # not a Gram matrix: it squares
            found.append(joined(own, 1))
        return joined(found)

    def _members(self, some: range) -> Some:
        """The groups that reach some of the blocks; all, if there is one block."""
        members = self.blocks.members[some.start : some.stop]
        return slice(None) if len(self.blocks.members) == 1 else members[members >= 0]

    def _reached(self, some: range) -> Entries:
        """The entries of the outputs that some of the blocks reach."""
        if len(self.sources) > 1:  # then there is one block
            return dict.fromkeys(self.run.outputs, slice(None))
        return self.sources[0].entries(self._members(some))

    def _rows(self, made: list[torch.Tensor], some: range) -> torch.Tensor:
        """Products `[n, groups, rows, m]` with the columns of each source, as the rows of some of the blocks."""
        rows, members = torch.cat([x.flatten(1, 2) for x in made], 1) if len(made) > 1 else made[0], self.blocks.members
        if len(members) == 1:
            return rows.reshape(len(rows), 1, -1, self.blocks.width)
        if members.shape[1] == 1:
            return rows
        place = members[some.start : some.stop].clone()
        place[place >= 0] = torch.arange(rows.shape[1], device=rows.device)
        return torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, 1))[:, place].flatten(2, 3)  # -1 is the row behind

    @property
    def _start(self) -> int:
        return self.run.part.start or 0

    @property
    def _known(self) -> torch.Tensor:
        assert self.triangles is not None
        return self.triangles

    def layer(self, start: int, stop: int, part: slice) -> OutputCotangents:
        columns = self._known[:, :, start:stop].movedim(2, 0)  # [V, n, Q, m]
        return {0: self._spread(columns.flatten(2), self.blocks.places.flatten())}

    def entries(self, some: Some) -> Entries:
        places = self.blocks.places[some]
        return {0: places[places < self.blocks.bottleneck.width]}

    def products(self, moved: OutputCotangents, part: slice, some: Some) -> torch.Tensor:
        u = moved[0].unsqueeze(2)  # [d, n, Q, m]
        if not self.blocks.whole:
            places = self.blocks.places[some]
            u = moved[0].new_zeros(*moved[0].shape[:2], *places.shape)
            u[:, :, places < self.blocks.bottleneck.width] = moved[0]
        if self.alike:
            return torch.einsum("qrm,dnqm->nqrd", self._known[0, some], u)
        own = self._known[part.start - self._start : part.stop - self._start, some]
        return torch.einsum("nqrm,dnqm->nqrd", own.expand(u.shape[1], -1, -1, -1), u)

    def block(self, start: int, stop: int, part: slice) -> Block:
        """The columns block by block: those of a block are zero outside of it."""
        found = []
        for q in range(start // self.rank, -(-stop // self.rank)):
            a, b = max(start - q * self.rank, 0), min(stop - q * self.rank, self.rank)
            found.append(self._spread(self._known[:, q, a:b].movedim(1, 0), self.blocks.places[q]))
        return Block({0: joined(found)})

    def _spread(self, columns: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Columns `[V, n, entries]` put at the places of these entries, with zeros elsewhere: `[V, n, *one]`."""
        n = self.run.trace.n
        if self.blocks.whole:
            return columns.expand(-1, n, -1).reshape(len(columns), n, *self.one)
        target = columns.new_zeros(*columns.shape[:2], self.one.numel() + 1)
        target[:, :, places] = columns
        return target[:, :, :-1].expand(-1, n, -1).reshape(len(columns), n, *self.one)


def _part(moved: OutputCotangents, at: Entries, wanted: Entries) -> OutputCotangents:
    """What was moved to some entries, of which others are wanted."""
    found = {}
    for i, entries in wanted.items():
        own, u = at[i], moved[i]
        if isinstance(own, torch.Tensor):
            place = own.new_zeros(int(own.max()) + 1)
            place[own] = torch.arange(len(own), device=own.device)
            entries = place[entries]
        found[i] = u[:, :, entries]
    return found
