"""Narrow layers: any R with `R^T R = S^T S` has the same GGN below, so as many columns as the layer is wide will do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from invfunc.errors import ArgumentError
from invfunc.loss.square_root import Block, OutputCotangents
from invfunc.operations.axis import Axis
from invfunc.plan import even
from invfunc.recording.graph import pulled_back
from invfunc.sparsity.groups import Grouped, Groups


@dataclass
class Blocks:
    """How the entries of a narrow layer fall apart, and which groups of columns reach which block."""

    places: torch.Tensor
    """The entries of each block, `[Q, m]`; one behind the last fills a block up."""
    members: torch.Tensor
    """The groups that reach it, `[Q, G]`; one behind the last fills up."""

    @property
    def width(self) -> int:
        return self.places.shape[1]

    def ids(self, entries: int) -> torch.Tensor:
        """The block of each entry; -1 for none."""
        found = self.places.new_full((entries + 1,), -1)
        blocks = torch.arange(len(self.places), device=found.device).repeat_interleave(self.width)
        found[self.places.flatten()] = blocks
        return found[:-1]


@dataclass
class Narrowed:
    """Columns at a narrow layer: a triangle for each block of its entries."""

    root: int
    one: torch.Size
    blocks: Blocks
    triangles: torch.Tensor
    """`[n, Q, rank, m]`, or `[1, ...]` if they are the same for all samples."""
    n: int
    start: int = 0
    """The place of the first sample in the batch."""

    @property
    def rank(self) -> int:
        return self.triangles.shape[2]

    rows = rank

    @property
    def alike(self) -> bool:
        return len(self.triangles) == 1

    @property
    def count(self) -> int:
        return self.blocks.places.shape[0] * self.rank

    @property
    def groups(self) -> Groups:
        return {self.root: self.blocks.ids(self.one.numel()).reshape(self.one)}

    def layer(self, start: int, stop: int, part: slice) -> OutputCotangents:
        columns = self.triangles[:, :, start:stop].movedim(2, 0)  # [V, n, Q, m]
        return {self.root: self._spread(columns.flatten(2), self.blocks.places.flatten())}

    def diagonal(self, part: slice) -> None:
        return None

    def products(self, moved: OutputCotangents, part: slice) -> torch.Tensor:
        u = torch.nn.functional.pad(moved[self.root].flatten(2), (0, 1))[:, :, self.blocks.places]  # [d, n, Q, m]
        if self.alike:
            return torch.einsum("qrm,dnqm->nqrd", self.triangles[0], u)
        own = self.triangles[part.start - self.start : part.stop - self.start]
        return torch.einsum("nqrm,dnqm->nqrd", own.expand(u.shape[1], -1, -1, -1), u)

    def block(self, start: int, stop: int, part: slice) -> Block:
        """The columns block by block: those of a block are zero outside of it."""
        found = []
        for q in range(start // self.rank, -(-stop // self.rank)):
            a, b = max(start - q * self.rank, 0), min(stop - q * self.rank, self.rank)
            found.append(self._spread(self.triangles[:, q, a:b].movedim(1, 0), self.blocks.places[q]))
        return Block({self.root: torch.cat(found)})

    def _spread(self, columns: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        """Columns `[V, n, entries]` put at the places of these entries, with zeros elsewhere: `[V, n, *one]`."""
        target = columns.new_zeros(*columns.shape[:2], self.one.numel() + 1)
        target[:, :, places] = columns
        return target[:, :, :-1].expand(-1, self.n, -1).reshape(len(columns), self.n, *self.one)


@dataclass
class Stretch:
    """The stretch of a run between a narrow layer and the place where the columns come in."""

    outputs: dict[int, tuple[torch.Tensor, Axis]]
    at: torch.Tensor
    axis: Axis
    n: int

    @property
    def one(self) -> torch.Size:
        return self.axis.expose(self.at, self.n).shape[1:]

    @property
    def size(self) -> int:
        """The entries of the outputs of a sample."""
        return sum(z.numel() for z, _ in self.outputs.values()) // self.n

    def forward(self, directions: torch.Tensor, budget: int) -> OutputCotangents:
        """Jacobian vector products of `[d, 1, *one]` for each sample, `[d, n, *one]`.

        They are the derivative of a pullback in its cotangent, so that no other run is needed.
        """
        given = self.axis.restore(directions.expand(-1, self.n, *self.one), self.n, 1)
        weights = {i: torch.zeros_like(z).requires_grad_() for i, (z, _) in self.outputs.items() if z.requires_grad}
        (slope,) = torch.autograd.grad(
            [self.outputs[i][0] for i in weights], [self.at], list(weights.values()), create_graph=True
        )
        found: list[list[torch.Tensor]] = [[] for _ in weights]
        for a, b in even(len(directions), max(1, budget // (self.n * self.size))):
            options = {"is_grads_batched": True, "retain_graph": True}
            moved = pulled_back([slope], list(weights.values()), [given[a:b]], **options)
            for k, (w, u) in enumerate(zip(weights.values(), moved, strict=True)):
                u = w.new_zeros(b - a, *w.shape) if u is None else u.detach()
                found[k].append(u.to(torch.promote_types(u.dtype, torch.float32)))
        return {i: self.outputs[i][1].expose(torch.cat(u), self.n, 1) for i, u in zip(weights, found, strict=True)}

    def transposed(self, moved: OutputCotangents, places: torch.Tensor) -> bool:
        """Whether what was moved forwards is right for every sample, checked against one pullback of random numbers.

        torch differentiates some backward passes wrongly, and f may treat the places of a batch differently.
        """
        generator = torch.Generator()  # of its own, with torch's own seed
        numbers = {
            i: torch.randn(z.shape, generator=generator).to(z) for i, (z, _) in self.outputs.items() if i in moved
        }
        zs = [self.outputs[i][0] for i in moved]
        (back,) = torch.autograd.grad(zs, [self.at], list(numbers.values()), retain_graph=True)
        wide = next(iter(moved.values())).dtype
        theirs = torch.nn.functional.pad(self.axis.expose(back, self.n).flatten(1).to(wide), (0, 1))
        theirs = theirs[:, places].sum(1)  # [n, m]
        ours, bound = torch.zeros_like(theirs), torch.zeros_like(theirs)
        for i, u in moved.items():
            w = self.outputs[i][1].expose(numbers[i], self.n).flatten(1).to(wide)
            flat = u.flatten(2)
            product = w @ flat[:, 0].T if flat.shape[1] == 1 else torch.einsum("dnk,nk->nd", flat, w)
            ours, bound = ours + product, bound + w.norm(dim=1)[:, None] * flat.norm(dim=2).T
        return bool(((ours - theirs).abs() <= 1000 * torch.finfo(back.dtype).eps * bound).all())


def narrowed(
    sources: Sequence[Grouped], stretch: Stretch, alone: Stretch, root: int, blocks: Blocks, part: slice, budget: int
) -> Narrowed | None:
    """The triangles of the columns that arrive at a narrow layer, for the samples of a part.

    The seeds are moved forwards through the stretch `alone`; if that is of one sample, it stands for all. None if they
    cannot be moved.
    """
    one, n = stretch.one, stretch.n
    seeds = torch.zeros(blocks.width, one.numel() + 1, dtype=stretch.at.dtype, device=stretch.at.device)
    seeds = seeds.scatter(1, blocks.places.T, 1)[:, :-1].reshape(blocks.width, 1, *one)
    try:
        moved = alone.forward(seeds, budget)
    except (RuntimeError, ArgumentError):  # no second derivative, as of fused attention, or no batching rule
        return None
    if not stretch.transposed(moved, blocks.places):
        return None
    start, same = part.start or 0, alone.n < n or n == 1
    count = 1 if same and all(s.alike for s in sources) else n
    triangles = []
    for a, b in even(count, max(1, budget // (blocks.width * stretch.size))):
        taken = moved if same else {i: u[:, a:b] for i, u in moved.items()}
        made = [s.products(taken, slice(start + a, start + b)) for s in sources]  # [n, groups, rows, m]
        rows = torch.cat([x.flatten(1, 2) for x in made], 1) if len(made) > 1 else made[0]
        if len(made) > 1 or len(blocks.members) == 1:
            rows = rows.reshape(len(rows), 1, -1, blocks.width)
        elif not torch.equal(blocks.members, torch.arange(rows.shape[1], device=rows.device)[:, None]):
            rows = torch.nn.functional.pad(rows, (0, 0, 0, 0, 0, 1))[:, blocks.members].flatten(2, 3)
        triangles.append(torch.linalg.qr(rows, mode="r").R)  # not a Gram matrix, which squares what is small
    return Narrowed(root, one, blocks, torch.cat(triangles), n, start)
