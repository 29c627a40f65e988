"""Products of all pairs of samples of a data set: shares of one batch are held while others go by."""

from __future__ import annotations

from collections.abc import Callable, Container
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Any

import torch

from invfunc import tree
from invfunc._extras import told_of_parts
from invfunc._torch.functorch import storage_of
from invfunc.arguments.problem import InDims, batch_dims
from invfunc.data_sets.rows import check_own
from invfunc.data_sets.visits import Begun, VisitWork
from invfunc.errors import ArgumentError, ArgumentTypeError, RandomnessError
from invfunc.evaluation.batches import Batches, Feed, batches_of, check_loader, first, no_samples, size_of, unscaled
from invfunc.evaluation.checkpoint import Course, Record
from invfunc.evaluation.engine import Engine
from invfunc.evaluation.kinds import Drew
from invfunc.evaluation.processes import ALONE, fingerprint
from invfunc.reductions.kept_shares import KeptShares, RowsWithKept
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
        """The matrix, by columns of a batch: of one loader those from its own row on, which have mirror images. For a
        function that is told of rows, these are the columns of the other side."""
        by_rows, sides, t = callable(self.out), self._sides(args), self.t
        if self.out is not None and not by_rows:
            taken = {storage_of(p) for p in tree.tensors(args[:1])}
            for path, x in tree.named_leaves(self.out):
                check_own(f"out{path}", x, taken)
        if not all([side.count() for side in sides]):
            raise no_samples()
        one, (held, others) = len(sides) == 1, (sides[0], sides[-1]) if by_rows else (sides[-1], sides[0])
        columns, whole = Columns(replace(t, options=replace(t.options, reduce=None)), args[0], kwargs), None
        columns.per_parameter = not t.reduction.whole or t.options.reduce is not None
        with told_of_parts(self.feed.progress, _tiles(len(held), len(others), one and not by_rows), "tile") as told:
            for k, start in enumerate(held.starts):
                after = k if one and not by_rows else 0
                found = columns.of(k, held, others, range(after, len(others)), one, told)
                if by_rows:
                    self.out(start, tree.map_tensors(_mirrored, found))
                    continue
                if whole is None:
                    whole = _made(found, others.total, held.total, self.out)
                for x, y in zip(tree.tensors((whole,)), tree.tensors((found,)), strict=True):
                    n, m, half = len(y), y.shape[y.ndim // 2], y.ndim // 2
                    x.narrow(0, others.starts[after], n).narrow(half, start, m).copy_(y)
                    if one:
                        x.narrow(0, start, m).narrow(half, others.starts[after], n).copy_(_mirrored(y))
        aux = (columns.aux_of_held, columns.aux) if by_rows else (columns.aux, columns.aux_of_held)
        return None if by_rows else self._reduced(whole), columns.aux if one else aux

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
        return replace(found, name=repr(self), sweeps=sweeps, batches=n, tiles=len(_tiles(n, m, mirrored)))

    def _sides(self, args: tuple) -> list[Again]:
        """The loaders behind the parameters."""
        if len(args) not in (2, 3):
            given = f"{len(args)} positional arguments"
            raise ArgumentTypeError(f"it takes the parameters and a loader, or two of them, and got {given}.")
        for loader in args[1:]:
            check_loader(loader, sweeps=AGAIN)
        quiet = replace(self.feed, progress="")  # a bar shows the tiles
        return [Again(batches_of(each, args[0], self.t.in_dims, quiet), self.t.in_dims) for each in args[1:]]

    def _reduced(self, whole: Any) -> Any:
        if (reduce := self.t.options.reduce) is None:
            return whole
        leaves = [reduce(path, x) for path, x in tree.named_leaves(whole)]
        return tree.unflatten(leaves, tree.flatten(whole)[1])


class Again:
    """Batches that are gone through again and again, and have to be the same ones each time."""

    def __init__(self, batches: Batches, in_dims: InDims) -> None:
        self.batches, self.in_dims = batches, in_dims
        self.starts, self.total, self._known = list[int](), 0, list[int]()

    def __len__(self) -> int:
        return len(self._known)

    def count(self) -> int:
        """Go through them for the first time; how many samples there are."""
        sizes = list[int]()

        def seen(args: tuple, n: int) -> int:
            sizes.append(size_of(args, self.in_dims))
            self._known.append(fingerprint(args[1:]))
            return sizes[-1]

        with torch.random.fork_rng([]):  # a DataLoader draws numbers when it begins
            self.total = self.batches(seen, enumerate)
        self.starts = [*accumulate([0, *sizes[:-1]])] if sizes else []
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


@dataclass
class Columns:
    """The products of all samples of one side with a batch of the other, which is held, column by column."""

    t: Statistic
    params: Any
    kwargs: dict[str, Any]
    per_parameter = False
    looked = False
    """Tells whether f was seen to give samples the same beside those of another batch."""

    done = 0
    """Number of tiles."""

    def __post_init__(self) -> None:
        self.aux, self.aux_of_held = list[Any](), list[Any]()
        """Aux of the batches of either side."""

    def of(self, k: int, held: Again, others: Again, wanted: range, one: bool, told: Callable) -> Any:
        """The products with batch k, which comes among the others or beside them."""
        works, batch = list[VisitWork](), list[tuple]()

        def hold(number: int, args: tuple, tile: bool = False) -> None:
            batch.append((args[0], *tree.map_tensors(torch.clone, args[1:])))  # a loader may write in their memory
            works.append(self._held(batch[0], tile))

        def see(j: int, args: tuple) -> None:
            if not works:
                hold(j, args, tile=True)
            else:
                if not (self.looked or (one and j == k)):
                    self._look(batch[0], args)
                works[0].visit(args, 0)
            self.done += 1
            told(self.done, size_of(args, self.t.in_dims))

        if not one or k not in wanted[:1]:
            held.each(hold, (k,))
            self.aux_of_held += works[0].aux
            works[0].aux = []
        others.each(see, wanted)
        self.aux = self.aux or works[0].aux
        return works[0].results()

    def _held(self, args: tuple, tile: bool) -> VisitWork:
        """Work with which others meet a batch; with the `tile` that it makes with itself."""
        t, reductions = self.t, [KeptShares(), *[InnerProducts(self.per_parameter)] * tile]

        def kept(engine: Engine) -> tuple[Any, dict[str, Any], Any]:
            aux, state = engine.kept(), engine.fold.state(0)
            if engine.scalar:
                raise unscaled(engine.problem.n)
            return engine.finished()[0], state, aux

        both = replace(t, members=tuple(replace(t, reduction=r) for r in reductions))
        shares, state, aux = both.evaluating(args, self.kwargs, kept)
        t = replace(t, reduction=RowsWithKept(self.per_parameter, shares))
        work = VisitWork(t, self.kwargs, Begun(ALONE, self.params, lambda *_: 0, Course(Record({}, [])), 0, None))
        work.aux.append(aux)
        if tile:
            work.sweep.enter(work.without_samples()).keep(0, {**state, "kept": state["kept"][1:]})
        return work

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


def _tiles(held: int, others: int, mirrored: bool) -> range:
    return range(held * (held + 1) // 2 if mirrored else held * others)


def _made(found: Any, n: int, m: int, out: Any) -> Any:
    """Room for the products of n samples with m, of which some were found; the caller's, if it is as it has to be."""

    def one(x: torch.Tensor) -> torch.Tensor:
        half = x.ndim // 2
        size = n, *x.shape[1:half], m, *x.shape[half + 1 :]
        return x.new_empty(size, device=x.device if out is None else "meta")

    whole = tree.map_tensors(one, found)
    if out is None:
        return whole
    given, wanted = tree.named_leaves(out), tree.named_leaves(whole)
    if [path for path, _ in given] != [path for path, _ in wanted]:
        raise ArgumentError(
            f"out has other parts than the result, which are {', '.join(f'out{path}' for path, _ in wanted)}."
        )
    for (path, x), (_, y) in zip(given, wanted, strict=True):
        if x.shape != y.shape or x.dtype != y.dtype:
            raise ArgumentError(f"out{path} is {x.dtype} {tuple(x.shape)}, but has to be {y.dtype} {tuple(y.shape)}.")
    return out


def _mirrored(tile: torch.Tensor) -> torch.Tensor:
    """`[N, *out, M, *out]` with the M first."""
    half = tile.ndim // 2
    return tile.permute(*range(half, tile.ndim), *range(half))


def _others() -> ArgumentError:
    return ArgumentError(
        "the loader gave other batches than the first time, or gave them in another order, but each of them is to meet "
        "all others. Give what gives the same ones again, as a DataLoader with shuffle=False does."
    )
