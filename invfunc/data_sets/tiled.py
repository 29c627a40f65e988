"""The products of all pairs of samples of a data set, tile by tile: as a transform of loaders, and of processes."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from invfunc import tree
from invfunc.data_sets.part import Asked
from invfunc.data_sets.tiles import Tiles
from invfunc.errors import ArgumentTypeError
from invfunc.evaluation.batches import Feed, batches_of, check_loader, first, size_of
from invfunc.evaluation.matrix import Again, check_out
from invfunc.evaluation.rounds import through
from invfunc.report import Explanation
from invfunc.statistic import Statistic
from invfunc.transform import Transform

AGAIN = "each of its batches is to meet all others"
"""Why a loader is gone through more than once."""


def _sides(args: tuple, t: Statistic, feed: Feed) -> list[Again]:
    """The loaders behind the parameters."""
    if len(args) not in (2, 3):
        given = f"{len(args)} positional arguments"
        raise ArgumentTypeError(f"it takes the parameters and a loader, or two of them, and got {given}.")
    for loader in args[1:]:
        check_loader(loader, sweeps=AGAIN)
    return [_side(loader, args[0], t, feed) for loader in args[1:]]


def _side(loader: Any, params: Any, t: Statistic, feed: Feed) -> Again:
    quiet = replace(feed, progress="")  # a bar shows the tiles
    return Again(batches_of(loader, params, t.in_dims, quiet), t.in_dims)


def _sizes(loader: Any, params: Any, t: Statistic, feed: Feed) -> tuple[int, int]:
    """How many samples a loader gives, and how many bytes."""
    size = 0

    def visit(args: tuple, n: int) -> int:
        nonlocal size
        size += sum(x.nbytes for x in tree.tensors(args[1:]))
        return size_of(args, t.in_dims)

    with torch.random.fork_rng([]):  # a DataLoader draws numbers when it begins
        return batches_of(loader, params, t.in_dims, replace(feed, progress=""))(visit, enumerate), size


@dataclass(frozen=True, repr=False)
class Tiled(Transform):
    """A function `(params, loader) -> [N, N]`, or `(params, loader, other_loader) -> [N, M]`."""

    t: Statistic
    feed: Feed
    out: Any = None
    outermost = True

    def __repr__(self) -> str:
        return f"streamed({self.t!r})"

    @property
    def has_aux(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.has_aux

    @property
    def owned(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.owned and self.out is None

    def names(self, count: int) -> Any:
        return _names(count)

    @torch.no_grad()
    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        tiles = Tiles(self.t, kwargs, _sides(args, self.t, self.feed), self.feed)
        if callable(self.out):
            return tiles.row_by_row(self.out), tiles.aux
        if self.out is not None:
            check_out(self.out, args[0])
        if len(tiles.sides) == 1:
            return tiles.square(self.out), tiles.aux
        return tiles.rectangle(args[0], out=self.out), tiles.aux

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """How it would be computed: what is done with the first batch, how often, and for how many tiles."""
        sides = _sides(args, self.t, self.feed)
        given, _ = first(args[1], args[0], self.t.in_dims, self.feed)
        found = self.t.explanation(given, kwargs, self.t.names(len(given)))
        for side in sides:
            side.count()
        n, m = len(sides[0]), len(sides[-1])
        mirrored = len(sides) == 1 and not callable(self.out)
        sweeps = 1 + (m if not callable(self.out) else 2 * n if len(sides) == 1 else n)
        return replace(found, name=repr(self), sweeps=sweeps, batches=n, tiles=n * (n + 1) // 2 if mirrored else n * m)


@dataclass(frozen=True, repr=False)
class TiledAcross(Transform):
    """A function `(params, *batch) -> [N, N of all processes]`, or of loaders, as that of `Tiled`."""

    t: Statistic
    part: Any
    """The samples of this process, among those of a group."""
    gather: bool
    identity: str
    """What tells the statistic from others, in every process."""
    outermost = True

    def __repr__(self) -> str:
        return self.part.shown(self.t)

    @property
    def has_aux(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.has_aux

    @property
    def owned(self) -> bool:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.t.owned

    def names(self, count: int) -> Any:
        return self.t.names(count) if self.part.feed is None else _names(count)

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """How this process would compute it, which does not ask the others, and the bytes of what it gives to them: its
        batches, and of rows that are gathered those beside its own samples."""
        processes, feed = self.part.alone(args[0]), self.part.feed
        if feed is None:
            found, sides = self.t.explanation(args, kwargs, names), [(args[1:],)]
        else:
            found, sides = Tiled(self.t, feed).explanation(args, kwargs, names), args[1:]
        (n, _), (m, size) = (_sizes(side, args[0], self.t, feed or Feed()) for side in (sides[0], sides[-1]))
        if self.gather:
            leaves = [x.element_size() for x in tree.tensors(args[:1])]
            size += n * m * found.columns**2 * (max(leaves) if self.t.reduction.whole else sum(leaves))
        if processes.size > 1:  # of which the others decide
            found = replace(found, sweeps=0, tiles=0, batches=None)
        return replace(found, name=repr(self), processes=processes.size, exchanged=size)

    @torch.no_grad()
    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        with self.part.call():
            return self._computed(args, kwargs, names)

    def _computed(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        feed, gather = self.part.feed or Feed(), "gather" if self.gather else "local"
        identity = {"the statistic": self.identity, "each": gather}
        two = self.part.feed is not None and len(args) == 3
        part = self.part if self.part.feed is None else replace(self.part, feed=replace(feed, progress=""))
        begun = part.begun(Asked(args[:2] if two else args, 1, names, identity, [], again=AGAIN, whole=False))
        sides = [Again(begun.batches, self.t.in_dims)]
        if two:
            begun.processes.told("arguments", lambda: (check_loader(args[2], sweeps=AGAIN), None))
            sides.append(_side(args[2], begun.params, self.t, feed))
        tiles = Tiles(self.t, kwargs, sides, feed, begun.rounds)
        alone = begun.processes.size == 1 and not two
        found = (
            through(begun.rounds, tiles.square)
            if alone
            else tiles.rectangle(begun.params, begun.processes, gather=self.gather)
        )
        if self.part.feed is not None:
            return found, tiles.aux
        return found, tiles.aux[0] if tiles.aux else None


def _names(count: int) -> list[str]:
    return ["params", "loader", "other_loader"][:count]
