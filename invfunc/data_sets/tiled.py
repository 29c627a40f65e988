"""Products of all pairs of samples of a data set, tile by tile: shares of one batch are held, others meet it."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, count
from typing import Any

import torch

from invfunc import tree
from invfunc._extras import told_of_parts
from invfunc._torch.functorch import storage_of
from invfunc.arguments.problem import InDims, batch_dims
from invfunc.data_sets.rows import check_own
from invfunc.errors import ArgumentError, ArgumentTypeError, RandomnessError
from invfunc.evaluation.batches import Batches, Feed, batches_of, check_loader, first, no_samples, size_of, unscaled
from invfunc.evaluation.checkpoint import fingerprint
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.joined import Drew
from invfunc.reductions import Reduction
from invfunc.reductions.kept_shares import KeptShares, ProductsWithKept, SampleShares
from invfunc.reductions.squares import InnerProducts
from invfunc.report import Explanation
from invfunc.statistic import Statistic
from invfunc.transform import Transform

AGAIN = "each of its batches is to meet all others"
"""Reason for which a loader is gone through more than once."""


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
        return ["params", "loader", "other_loader"][:count]

    @torch.no_grad()
    def compute(self, args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[Any, Any]:
        tiles = _Tiles(self.t, kwargs, self._sides(args), self.feed)
        if self.out is not None and not callable(self.out):
            taken = {storage_of(p) for p in tree.tensors(args[:1])}
            for path, x in tree.named_leaves(self.out):
                check_own(f"out{path}", x, taken)
        return tiles.all_of_them(self.out), tiles.aux

    def explanation(self, args: tuple, kwargs: dict[str, Any], names: Any) -> Explanation:
        """Explains how it would be computed: what is done with the first batch, how often, and for how many tiles."""
        sides = self._sides(args)
        given, _ = first(args[1], args[0], self.t.in_dims, self.feed)
        found = self.t.explanation(given, kwargs, self.t.names(len(given)))
        for side in sides:
            side.count()
        n, m = len(sides[0]), len(sides[-1])
        mirrored = len(sides) == 1 and not callable(self.out)
        sweeps = 1 + (m if not callable(self.out) else 2 * n if len(sides) == 1 else n)
        return replace(found, name=repr(self), sweeps=sweeps, batches=n, tiles=n * (n + 1) // 2 if mirrored else n * m)

    def _sides(self, args: tuple) -> list[_Again]:
        """The loaders behind the parameters."""
        if len(args) not in (2, 3):
            given = f"{len(args)} positional arguments"
            raise ArgumentTypeError(f"it takes the parameters and a loader, or two of them, and got {given}.")
        for loader in args[1:]:
            check_loader(loader, sweeps=AGAIN)
        quiet = replace(self.feed, progress="")  # a bar shows the tiles
        return [_Again(batches_of(each, args[0], self.t.in_dims, quiet), self.t.in_dims) for each in args[1:]]


class _Again:
    """Batches that are gone through again and again, and have to be the same ones each time."""

    def __init__(self, batches: Batches, in_dims: InDims) -> None:
        self.batches, self.in_dims = batches, in_dims
        self.sizes: list[int] = []
        """Numbers of samples of the batches."""
        self._known: list[int] = []

    def __len__(self) -> int:
        return len(self.sizes)

    def count(self) -> None:
        """Go through them for the first time."""

        def seen(args: tuple, n: int) -> int:
            self.sizes.append(size_of(args, self.in_dims))
            self._known.append(fingerprint(args[1:]))
            return self.sizes[-1]

        with torch.random.fork_rng([]):  # a DataLoader draws numbers when it begins
            self.batches(seen, enumerate)

    def each(self, see: Callable[[int, tuple], None], wanted: Container[int]) -> None:
        """Have some of them seen."""
        number = 0

        def seen(args: tuple, n: int) -> int:
            nonlocal number
            if number >= len(self) or (number in wanted and fingerprint(args[1:]) != self._known[number]):
                raise _others()
            if number in wanted:
                see(number, args)
            number += 1
            return self.sizes[number - 1]

        self.batches(seen, enumerate)
        if number < len(self):
            raise _others()

    def at(self, number: int) -> tuple:
        """The arguments of one of them, which stay as they are when others come."""
        found: list[tuple] = []
        self.each(lambda _, args: found.append(_own(args)), (number,))
        return found[0]


class _Tiles:
    """Tiles of pairs of batches of one loader, or of two, its sides: those of the rows and of the columns."""

    def __init__(self, t: Statistic, kwargs: dict[str, Any], sides: list[_Again], feed: Feed) -> None:
        self.t, self.meetings, self.sides, self.feed = t, Meetings(t, kwargs), sides, feed
        self.rows, self.columns = sides[0], sides[-1]
        self._aux: list[dict[int, Any]] = [{} for _ in sides]
        """Aux of the first evaluation of each batch, by its number."""

    @property
    def aux(self) -> Any:
        """Aux of each batch, in a list; of two loaders a pair of lists."""
        found = [[each[k] for k in sorted(each)] for each in self._aux]
        return tuple(found) if len(found) > 1 else found[0]

    def all_of_them(self, out: Any) -> Any:
        """The matrix: a batch is held while others go by, of one loader those from it on, whose tiles have mirror
        images. Of two loaders those of the columns are held; if a function is told of rows, those of the rows."""
        for side in self.sides:
            side.count()
        if not all(map(len, self.sides)):
            raise no_samples()
        one, by_rows = len(self.sides) == 1, callable(out)
        mirrors, held = one and not by_rows, 0 if by_rows else -1
        side, others = self.sides[held], self.sides[-1 - held]
        matrix = _Matrix(self.rows.sizes, self.columns.sizes, None if by_rows else out)
        n, m = len(side), len(others)
        done, tiles = count(1), range(n * (n + 1) // 2 if mirrors else n * m)

        def see(k: int, batch: list[Held], j: int, args: tuple) -> None:
            if not batch:
                own, tile, aux = self.meetings.squared(_own(args))
                batch.append(own)
            else:
                tile, aux = self.meetings.products(batch[0], args, same=one and j == k)
            if by_rows or mirrors:
                matrix.put(0 if by_rows else k, j, tile)
            if not by_rows and not (one and j == k):
                matrix.put(j, k, tile, mirrored=True)
            self._aux[-1 - held].setdefault(j, aux)
            told(next(done), others.sizes[j])

        with told_of_parts(self.feed.progress, tiles, "tile") as told:
            for k, size in enumerate(side.sizes):
                batch = list[Held]()
                if not mirrors:
                    own, aux = self.meetings.held(side.at(k))
                    batch.append(own)
                    self._aux[held].setdefault(k, aux)
                if by_rows:
                    matrix = _Matrix([size], self.columns.sizes)
                others.each(partial(see, k, batch), range(k if mirrors else 0, m))
                if by_rows:
                    out(sum(side.sizes[:k]), matrix.whole)
        return None if by_rows else self._reduced(matrix.whole)

    def _reduced(self, whole: Any) -> Any:
        if (reduce := self.t.options.reduce) is None:
            return whole
        leaves = [reduce(path, x) for path, x in tree.named_leaves(whole)]
        return tree.unflatten(leaves, tree.flatten(whole)[1])


@dataclass(frozen=True, eq=False)
class Held:
    """A batch that others are to meet: its arguments and its shares."""

    args: tuple
    shares: SampleShares


class Meetings:
    """Evaluations of batches that hold the shares of one, and take the products of others with them."""

    def __init__(self, t: Statistic, kwargs: dict[str, Any]) -> None:
        self.per_parameter = not t.reduction.whole or t.options.reduce is not None
        self.t, self.kwargs = replace(t, options=replace(t.options, reduce=None)), kwargs
        self.looked = False
        """Tells whether f was seen to give samples the same beside those of another batch."""

    def held(self, args: tuple) -> tuple[Held, Any]:
        """A batch, and aux."""
        (shares,), aux = self._found(args, KeptShares())
        return Held(args, shares), aux

    def squared(self, args: tuple) -> tuple[Held, Any, Any]:
        """A batch, its products with itself, and aux."""
        (tile, shares), aux = self._found(args, InnerProducts(self.per_parameter), KeptShares())
        return Held(args, shares), tile, aux

    def products(self, one: Held, args: tuple, same: bool = False) -> tuple[Any, Any]:
        """The products of a batch with another, unless it is the same, and aux of that."""
        if not (same or self.looked):
            self._look(one.args, args)
        (tile,), aux = self._found(args, ProductsWithKept(self.per_parameter, one.shares))
        return tile, aux

    def _look(self, args: tuple, others: tuple) -> None:
        """Check that f gives the samples of two batches the same where they are joined."""
        dims, names = batch_dims(self.t.in_dims, [*range(1, len(others))]), self.t.names(len(others))
        for i, dim in dims.items():
            if dim is not None and (one := _kinds(args[i], dim)) != (other := _kinds(others[i], dim)):
                raise ArgumentError(
                    f"{names[i]} is {one} in one batch, and {other} in another: but for the number of samples they "
                    "have to agree, as the first two are joined, too. Pad the shorter samples."
                )
        t = replace(self.t, others=tuple(others[i] for i, dim in dims.items() if dim is not None))

        try:
            t.evaluating(args, self.kwargs, Engine.check_others)
        except Drew:
            raise RandomnessError(
                "f draws random numbers (dropout?), and would draw others for a batch each time it meets another one. "
                "Use eval mode, or pass the numbers as a batch argument."
            ) from None
        self.looked = True

    def _found(self, args: tuple, *reductions: Reduction) -> tuple[list[Any], Any]:
        t = replace(self.t, members=tuple(replace(self.t, reduction=r) for r in reductions))

        def found(engine: Engine) -> tuple[list[Any], Any]:
            aux = engine.kept()
            if engine.scalar:
                raise unscaled(engine.problem.n)
            return engine.finished(), aux

        return t.evaluating(args, self.kwargs, found)


class _Matrix:
    """The products of all pairs of samples, as their tiles come: `[N, *out, M, *out]`, or a tree of these."""

    def __init__(self, rows: list[int], columns: list[int], out: Any = None) -> None:
        """Of batches of so many samples; `out` is where they go, if that is there already."""
        self.rows, self.columns, self.out = _ranges(rows), _ranges(columns), out
        self.shape = sum(rows), sum(columns)
        self.whole: Any = None

    def put(self, i: int, j: int, tile: Any, mirrored: bool = False) -> None:
        """Write the products of a batch of the rows with one of the columns; `mirrored` says that these come first."""
        tile = tree.map_tensors(_mirrored, tile) if mirrored else tile
        if self.whole is None:
            made = tree.map_tensors(lambda x: x.new_empty(self._of(x)), tile) if self.out is None else None
            self.whole = self._given(tile) if made is None else made
        for x, y in zip(tree.tensors((self.whole,)), tree.tensors((tile,)), strict=True):
            x.narrow(0, *self.rows[i]).narrow(x.ndim // 2, *self.columns[j]).copy_(y)

    def _given(self, tile: Any) -> Any:
        """The tensors that are there, if the tiles fit."""
        given, found = tree.named_leaves(self.out), tree.named_leaves(tile)
        if [path for path, _ in given] != [path for path, _ in found]:
            raise ArgumentError(
                f"out has other parts than the result, which are {', '.join(f'out{path}' for path, _ in found)}."
            )
        for (path, x), (_, y) in zip(given, found, strict=True):
            if tuple(x.shape) != self._of(y) or x.dtype != y.dtype:
                raise ArgumentError(f"out{path} is {x.dtype} {tuple(x.shape)}, but has to be {y.dtype} {self._of(y)}.")
        return self.out

    def _of(self, tile: torch.Tensor) -> tuple[int, ...]:
        """The shape of all tiles together."""
        (n, m), half = self.shape, tile.ndim // 2
        return (n, *tile.shape[1:half], m, *tile.shape[half + 1 :])


def _mirrored(tile: torch.Tensor) -> torch.Tensor:
    """`[N, *out, M, *out]` with the M first."""
    half = tile.ndim // 2
    return tile.permute(*range(half, tile.ndim), *range(half))


def _ranges(sizes: list[int]) -> list[tuple[int, int]]:
    """Starts of batches of these sizes, one behind the other, and their lengths."""
    return [*zip(accumulate([0, *sizes[:-1]]), sizes, strict=True)] if sizes else []


def _own(args: tuple) -> tuple:
    """The arguments of a batch, where a loader may write the next one in their memory."""
    return args[0], *tree.map_tensors(torch.clone, args[1:])


def _others() -> ArgumentError:
    return ArgumentError(
        "the loader gave other batches than the first time, or in another order, but a matrix of all pairs needs the "
        "same ones again. Pass a DataLoader with shuffle=False."
    )


def _kinds(x: Any, dim: int) -> str:
    """Dtypes and shapes of the tensors of a tree, but for their number of samples."""
    kinds = {
        path: f"{y.dtype} {('N', *y.shape[: dim % y.ndim], *y.shape[dim % y.ndim + 1 :])}"
        for path, y in tree.named_leaves(x)
        if isinstance(y, torch.Tensor)
    }
    return ", ".join(f"{path} {kind}".strip() for path, kind in kinds.items())
