"""Products of all pairs of samples of a data set: shares of one batch are held while others go by."""

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
from invfunc.data_sets.visits import check_like, check_own
from invfunc.errors import ArgumentError, ArgumentTypeError, RandomnessError
from invfunc.evaluation.batches import Batches, Feed, batches_of, check_loader, first, no_samples, size_of, unscaled
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.kinds import Drew
from invfunc.evaluation.processes import fingerprint
from invfunc.plan import Explanation
from invfunc.problem import InDims, batch_dims
from invfunc.reductions import Reduction
from invfunc.reductions.columns import InnerProducts, KeptShares, RowsWithKept, SampleShares
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
        """The matrix: a batch is held while others go by, of one loader those from it on, whose tiles have mirror
        images. Of two loaders those of the columns are held; for a function that is told of rows, those of the rows."""
        out: Any = self.out
        by_rows, sides = callable(out), self._sides(args)
        if self.out is not None and not by_rows:
            taken = {storage_of(p) for p in tree.tensors(args[:1])}
            for path, x in tree.named_leaves(self.out):
                check_own(f"out{path}", x, taken)
        if not all([side.count() for side in sides]):
            raise no_samples()
        one, meetings = len(sides) == 1, Meetings(self.t, kwargs)
        mirrors, (held, others) = one and not by_rows, (sides[0], sides[-1]) if by_rows else (sides[-1], sides[0])
        n, m, whole, aux = len(held), len(others), None, dict[tuple[bool, int], Any]()
        done, tiles = count(1), range(n * (n + 1) // 2 if mirrors else n * m)

        def see(k: int, batch: list[Held], j: int, args: tuple) -> None:
            nonlocal whole
            if batch:
                tile, aux[False, j] = meetings.products(batch[0], args, same=one and j == k)
            else:
                own, tile, aux[False, j] = meetings.squared(_own(args))
                batch.append(own)
            if whole is None:
                whole = _made(
                    tile, others.total, held.sizes[k] if by_rows else held.total, None if by_rows else self.out
                )
            _put(whole, tile, others.starts[j], 0 if by_rows else held.starts[k])
            if mirrors:
                _put(whole, tree.map_tensors(_mirrored, tile), held.starts[k], others.starts[j])
            told(next(done), others.sizes[j])

        with told_of_parts(self.feed.progress, tiles, "tile") as told:
            for k, start in enumerate(held.starts):
                batch = list[Held]()
                if not mirrors:
                    held.each(lambda i, args: batch.append(meetings.held(_own(args))), (k,))  # noqa: B023
                    aux[True, k] = batch[0].aux
                others.each(partial(see, k, batch), range(k if mirrors else 0, m))
                if by_rows:
                    out(start, tree.map_tensors(_mirrored, whole))
                    whole = None
        of_others, of_held = ([aux[key] for key in sorted(aux) if key[0] == at] for at in (False, True))
        both = (of_held, of_others) if by_rows else (of_others, of_held)
        return None if by_rows else self._reduced(whole), of_others if one else both

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

    def _sides(self, args: tuple) -> list[RepeatedBatches]:
        """The loaders behind the parameters."""
        if len(args) not in (2, 3):
            given = f"{len(args)} positional arguments"
            raise ArgumentTypeError(f"it takes the parameters and a loader, or two of them, and got {given}.")
        for loader in args[1:]:
            check_loader(loader, sweeps=AGAIN)
        quiet = replace(self.feed, progress="")  # a bar shows the tiles
        return [RepeatedBatches(batches_of(each, args[0], self.t.in_dims, quiet), self.t.in_dims) for each in args[1:]]

    def _reduced(self, whole: Any) -> Any:
        if (reduce := self.t.options.reduce) is None:
            return whole
        leaves = [reduce(path, x) for path, x in tree.named_leaves(whole)]
        return tree.unflatten(leaves, tree.flatten(whole)[1])


class RepeatedBatches:
    """Batches that are gone through again and again, and have to be the same ones each time."""

    def __init__(self, batches: Batches, in_dims: InDims) -> None:
        self.batches, self.in_dims = batches, in_dims
        self.sizes, self.total, self._known = list[int](), 0, list[int]()

    def __len__(self) -> int:
        return len(self.sizes)

    @property
    def starts(self) -> list[int]:
        """Numbers of samples before each batch."""
        return [*accumulate([0, *self.sizes])][:-1]

    def count(self) -> int:
        """Go through them for the first time; how many samples there are."""

        def seen(args: tuple, n: int) -> int:
            self.sizes.append(size_of(args, self.in_dims))
            self._known.append(fingerprint(args[1:]))
            return self.sizes[-1]

        with torch.random.fork_rng([]):  # a DataLoader draws numbers when it begins
            self.total = self.batches(seen, enumerate)
        return self.total

    def each(self, see: Callable[[int, tuple], Any], wanted: Container[int]) -> None:
        """Have some of them seen."""
        number = -1

        def seen(args: tuple, n: int) -> int:
            nonlocal number
            number += 1
            if number >= len(self) or (number in wanted and fingerprint(args[1:]) != self._known[number]):
                raise _others()
            if number in wanted:
                see(number, args)
            return size_of(args, self.in_dims)

        self.batches(seen, enumerate)
        if number + 1 < len(self):
            raise _others()


@dataclass(frozen=True, eq=False)
class Held:
    """A batch that others are to meet: its arguments, its shares, and aux."""

    args: tuple
    shares: SampleShares
    aux: Any


class Meetings:
    """Evaluations of batches that hold the shares of one, and take the products of others with them."""

    def __init__(self, t: Statistic, kwargs: dict[str, Any]) -> None:
        self.per_parameter = not t.reduction.whole or t.options.reduce is not None
        self.t, self.kwargs = replace(t, options=replace(t.options, reduce=None)), kwargs
        self.looked = False
        """Tells whether f was seen to give samples the same beside those of another batch."""

    def held(self, args: tuple) -> Held:
        """A batch whose shares are held."""
        (shares,), aux = self._found(args, KeptShares())
        return Held(args, shares, aux)

    def squared(self, args: tuple) -> tuple[Held, Any, Any]:
        """The same, its products with itself, and aux."""
        (tile, shares), aux = self._found(args, InnerProducts(self.per_parameter), KeptShares())
        return Held(args, shares, aux), tile, aux

    def products(self, one: Held, args: tuple, same: bool) -> tuple[Any, Any]:
        """The products of a batch with one that is held, unless it is the same, and aux."""
        if not (same or self.looked):
            self._look(one.args, args)
        (tile,), aux = self._found(args, RowsWithKept(self.per_parameter, one.shares))
        return tile, aux

    def _look(self, args: tuple, others: tuple) -> None:
        """Check that f gives the samples of two batches the same where they are joined."""
        dims = batch_dims(self.t.in_dims, [*range(1, len(others))])
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


def _own(args: tuple) -> tuple:
    """The arguments of a batch, where a loader may write the next one in their memory."""
    return args[0], *tree.map_tensors(torch.clone, args[1:])


def _put(whole: Any, tile: Any, row: int, column: int) -> None:
    """Write the products of some samples with others to their places."""
    for x, y in zip(tree.tensors((whole,)), tree.tensors((tile,)), strict=True):
        half = y.ndim // 2
        x.narrow(0, row, len(y)).narrow(half, column, y.shape[half]).copy_(y)


def _made(found: Any, n: int, m: int, out: Any) -> Any:
    """Room for the products of n samples with m, of which some were found; the caller's, if it is as it has to be."""

    def one(x: torch.Tensor) -> torch.Tensor:
        half = x.ndim // 2
        size = n, *x.shape[1:half], m, *x.shape[half + 1 :]
        return x.new_empty(size, device=x.device if out is None else "meta")

    whole = tree.map_tensors(one, found)
    if out is None:
        return whole
    given, wanted = ([(f"out{path}", x, -1) for path, x in tree.named_leaves(t)] for t in (out, whole))
    check_like(given, wanted)
    return out


def _mirrored(tile: torch.Tensor) -> torch.Tensor:
    """`[N, *out, M, *out]` with the M first."""
    half = tile.ndim // 2
    return tile.permute(*range(half, tile.ndim), *range(half))


def _others() -> ArgumentError:
    return ArgumentError(
        "the loader gave other batches than the first time, or in another order, but a matrix of all pairs needs the "
        "same ones again. Pass a DataLoader with shuffle=False."
    )
