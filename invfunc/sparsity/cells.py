"""Squares cell by cell: where one cotangent holds columns of several groups, each position belongs to one of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property

import torch

from invfunc import thresholds
from invfunc.linear_algebra.contract import Term
from invfunc.operations.factors import Part, Recipe
from invfunc.passes.run import Run
from invfunc.recording.tags import ParameterUse


@dataclass
class Layout:
    """How the entries of a cotangent lie in what is sent back: `[outs, positions]`."""

    recipe: Recipe
    one: torch.Size
    device: torch.device | str
    shape: torch.Size
    """That of what is sent back."""

    @property
    def sizes(self) -> dict[str, int]:
        return dict(zip(self.recipe.labels or "", self.shape, strict=True))

    @property
    def inner(self) -> str:
        """The labels that enumerate positions."""
        return "".join(c for c, n in self.sizes.items() if c not in self.recipe.output and n > 1)

    @property
    def outs(self) -> int:
        """How many entries of the cotangent there are at each position."""
        return math.prod(n for c, n in self.sizes.items() if c not in self.inner)

    @property
    def entries(self) -> torch.Tensor:
        """The entries of the cotangent as `[outs, positions]`: not kept, as they take more memory than its numbers."""
        numbers = _sent(self.recipe, self.one, self.device)
        order = sorted(range(numbers.ndim), key=lambda d: list(self.sizes)[d] in self.inner)
        return numbers.permute(order).reshape(self.outs, numbers.numel() // max(1, self.outs))

    @cached_property
    def first(self) -> torch.Tensor:
        """The first entry at each position."""
        return self.entries[0].clone()

    def by_positions(self, labels: str, x: torch.Tensor) -> Term:
        """What was read, as `[N, positions, *rest]` with zeros at one more position; what has no positions as it is.

        All that belongs to a position is then in one place of memory, and is taken from there at once.
        """
        lead, own, rest = self.parted(labels)
        if not own:
            return labels, x
        x = x.permute([labels.index(c) for c in (*lead, *own, *rest)]).flatten(len(lead), len(lead) + len(own) - 1)
        flat = torch.nn.functional.pad(x.flatten(len(lead) + 1) if rest else x.unsqueeze(-1), (0, 0, 0, 1))
        return lead + own + rest, flat.reshape(*flat.shape[:-1], *x.shape[len(lead) + 1 :])

    def at(self, positions: torch.Tensor, labels: str, x: torch.Tensor) -> torch.Tensor:
        """What is at some positions `[...]` of a term by positions: `[N, ..., *rest]`."""
        lead, own, _ = self.parted(labels)
        numbers, many = torch.zeros_like(positions), math.prod(self.sizes[c] for c in self.inner)
        rest, last = many, x.shape[len(lead)] - 1
        for c in self.inner:
            rest //= self.sizes[c]
            if c in own:
                numbers = numbers * self.sizes[c] + positions // rest % self.sizes[c]
        numbers = torch.where(positions == many, last, numbers)
        return x.index_select(len(lead), numbers.flatten()).unflatten(len(lead), positions.shape)

    def parted(self, labels: str) -> tuple[str, str, str]:
        """Labels of samples, of positions, and all others."""
        lead, own = ("".join(c for c in some if c in labels) for some in ("N", self.inner))
        return lead, own, "".join(c for c in labels if c not in lead + own)


def layout(recipe: Recipe, one: torch.Size, device: torch.device | str) -> Layout | None:
    """The layout of a recipe for the cotangent of one sample; None if positions pick rows, or a part is sent back."""
    if recipe.labels is None or recipe.picks is not None:
        return None
    found = _sent(recipe, one, device)
    return Layout(recipe, one, device, found.shape) if found.numel() == math.prod(one) else None


def _sent(recipe: Recipe, one: torch.Size, device: torch.device | str) -> torch.Tensor:
    """The entry of the cotangent at each place of what is sent back."""
    return recipe.sent(torch.arange(math.prod(one), device=device).reshape(1, 1, *one), slice(0, 1))[0, 0]


def layout_at(run: Run, use: ParameterUse, device: torch.device | str) -> Layout | None:
    """The layout at a parameter use, if it is that of an operation, or of one parameter that all samples have."""
    if use.call is None:
        return layout(use.recipe, use.param.shape, device) if use.recipe.own is None else None
    out = torch.empty(use.call.out.shape, device="meta")
    return layout(use.recipe, run.trace.axes[use.site].expose(out, run.trace.n).shape[1:], device)


@dataclass
class Memory:
    """Keeps what the operation of a parameter use reads, by positions and taken cell by cell, while it is small."""

    recurs: bool = False
    """Whether other columns are going to read the same cells."""
    kept: dict[tuple[int, int], list[Term]] = field(default_factory=dict)
    cells: dict[tuple[int, int], list[Term]] = field(default_factory=dict)
    index: torch.Tensor | None = None
    """The cells that `cells` was taken for."""

    def read(self, part: Part, make: Callable[[], list[Term]]) -> list[Term]:
        """The terms that `make` gives of what the operation has read."""
        return _known(self.kept, part, make)

    def taken(self, index: torch.Tensor, part: Part, take: Callable[[], list[Term]]) -> list[Term]:
        """The terms that `take` gives for these cells, kept if other columns are going to read them."""
        if self.index is not index:
            self.index, self.cells = index, {}
        return _known(self.cells, part, take) if self.recurs else take()


def _known(kept: dict[tuple[int, int], list[Term]], part: Part, make: Callable[[], list[Term]]) -> list[Term]:
    """The terms of some samples: those that are kept, or else made, and kept if there is room."""
    if not isinstance(part, slice):
        return make()
    key = part.start, part.stop
    if key in kept:
        return kept[key]
    made = make()
    if sum(x.numel() for terms in [*kept.values(), made] for _, x in terms) <= thresholds.KEPT_READ:
        kept[key] = made
    return made


def by_position(known: Layout) -> Recipe:
    """The shares of each position for itself: `G[V, N, S, *output]`, with S for the positions."""
    recipe, inner, sizes = known.recipe, known.inner, known.sizes

    def joined(labels: str, x: torch.Tensor) -> Term:
        rest, missing = "".join(c for c in labels if c not in inner), "".join(c for c in inner if c not in labels)
        if missing == inner:  # it is the same at all of them
            return labels, x
        x = x[(..., *[None] * len(missing))].expand(*x.shape, *(sizes[c] for c in missing))
        if len(inner) == 1:  # as it is in memory
            return labels.replace(inner, "S"), x
        labels += missing
        return rest + "S", x.permute([labels.index(c) for c in rest + inner]).flatten(len(rest))

    def build(cotangent: torch.Tensor, part: Part) -> list[Term]:
        return [joined(*term) for term in (recipe.sends(cotangent, part), *recipe.read(part))]

    return replace(recipe, build=build, cells=math.prod(sizes[c] for c in inner))


def laid_out(known: Layout, index: torch.Tensor, cotangent: torch.Tensor) -> torch.Tensor:
    """What is sent back of `[classes * V, N, *one]`, cell by cell: `[N, S, r, V, outs]`, as it is multiplied.

    `index [classes, C, r]` has the positions in each cell; the number of positions, which is none of them, fills a cell
    up, and there are zeros.
    """
    labels, sent = known.recipe.sends(cotangent, slice(0, cotangent.shape[1]))
    outs = known.parted(labels.replace("V", ""))[2]
    sent = sent.permute([labels.index(c) for c in ("V", "N", *outs, *known.inner)])
    classes, positions, n = len(index), math.prod(sent.shape[2 + len(outs) :]), sent.shape[1]
    v = len(sent) // classes
    turned = sent.new_empty(positions + 1, sent.numel() // positions)
    turned[:-1] = sent.reshape(-1, positions).T  # a transpose of two dimensions is several times as fast
    turned[-1] = 0
    first = index * classes + torch.arange(classes, device=index.device)[:, None, None]
    column, sample = (torch.arange(size, device=index.device) for size in (v, n))
    rows = (first.reshape(1, -1, 1) * v + column) * n + sample[:, None, None]
    found = turned.reshape(-1, known.outs).index_select(0, rows.flatten())
    return found.reshape(n, -1, index.shape[2], v, known.outs)


def celled(known: Layout, index: torch.Tensor, first: torch.Tensor, memory: Memory | None = None) -> Recipe:
    """The shares of each cell for itself: `G[V, N, S, *output]`, with S for the cells of all classes.

    `first` are the cotangents as `laid_out`. The memory is for what other classes and columns read again.
    """
    memory = Memory() if memory is None else memory
    recipe, inner, flat = known.recipe, known.inner, index.flatten(0, 1)
    outs = known.parted(recipe.labels or "")[2]
    shape = [known.sizes[c] for c in outs]

    def read(part: Part) -> list[Term]:
        return [known.by_positions(*term) for term in recipe.read(part)]

    def taken(part: Part) -> list[Term]:
        """The terms of what is read, position by position in each cell."""
        terms = []
        for labels, x in memory.read(part, lambda: read(part)):
            lead, own, rest = known.parted(labels)
            terms.append((lead + "S" + inner[0] + rest, known.at(flat, labels, x)) if own else (labels, x))
        return terms

    def build(cotangent: torch.Tensor, part: Part) -> list[Term]:
        sent = first[part]
        sent = ("NS" + inner[0] + "V" + outs, sent.reshape(*sent.shape[:4], *shape))
        return [sent, *memory.taken(index, part, lambda: taken(part))]

    return replace(recipe, build=build, cells=index.shape[1], work=recipe.work * len(index))
