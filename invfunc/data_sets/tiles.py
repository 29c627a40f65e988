"""The products of all pairs of samples, a pair of batches after another: the shares of one are held, others meet it."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Any

import torch

from invfunc import tree
from invfunc._extras import told_of_parts
from invfunc.arguments.problem import batch_dims
from invfunc.errors import ArgumentError, ArgumentTypeError, RandomnessError
from invfunc.evaluation.batches import Feed, no_samples, unscaled
from invfunc.evaluation.joined import Drew
from invfunc.evaluation.matrix import Again, Matrix, own
from invfunc.evaluation.processes import Processes
from invfunc.evaluation.rounds import Rounds, through
from invfunc.reductions import Reduction
from invfunc.reductions.exchange import Exchange, Rows
from invfunc.reductions.kept_shares import Kept, KeptShares, ProductsWithKept
from invfunc.reductions.squares import InnerProducts
from invfunc.statistic import Statistic

ALONE = Processes()
Tell = Callable[[int], None]
"""Told after each tile how many samples met those that were held."""


@dataclass(frozen=True, eq=False)
class Held:
    """A batch that others are to meet: its arguments and its shares."""

    args: tuple
    shares: Kept


class Meetings:
    """Evaluates batches: holds the shares of one, and takes the products of others with them."""

    def __init__(self, t: Statistic, kwargs: dict[str, Any]) -> None:
        self.per_parameter = not t.reduction.whole or t.options.reduce is not None
        self.t, self.kwargs = replace(t, options=replace(t.options, reduce=None)), kwargs
        self.looked = False
        """Whether f was seen to give samples the same beside those of another batch."""

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

        def looked(args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[None, None]:
            try:
                return t.engine(args, kwargs, names).check_others(), None
            except Drew:
                raise RandomnessError(
                    "f draws random numbers (dropout?), and would draw others for a batch each time it meets another "
                    "one. Use eval mode, or pass the numbers as a batch argument."
                ) from None

        t.told(looked, t.names, args, self.kwargs)
        self.looked = True

    def _found(self, args: tuple, *reductions: Reduction) -> tuple[list[Any], Any]:
        t = replace(self.t, members=tuple(replace(self.t, reduction=r) for r in reductions))

        def found(args: tuple, kwargs: dict[str, Any], names: Any) -> tuple[list[Any], Any]:
            engine = t.engine(args, kwargs, names)
            aux = engine.kept()
            if engine.scalar:
                raise unscaled(engine.problem.n)
            return engine.finished(), aux

        return t.told(found, t.names, args, self.kwargs)


class Tiles:
    """Goes through the pairs of batches of one loader, or of two, its sides: those of the rows and of the columns."""

    def __init__(
        self, t: Statistic, kwargs: dict[str, Any], sides: list[Again], feed: Feed, rounds: Rounds | None = None
    ) -> None:
        """`rounds` bring parameters of which each process has a part."""
        self.rounds = rounds
        self.t, self.meetings, self.sides, self.feed = t, Meetings(t, kwargs), sides, feed
        self.rows, self.columns = sides[0], sides[-1]
        self._aux: list[dict[int, Any]] = [{} for _ in sides]
        """Of each batch, by its number: that of its first evaluation."""

    @property
    def aux(self) -> Any:
        """That of each batch, in a list; of two loaders a pair of lists."""
        found = [[each[k] for k in sorted(each)] for each in self._aux]
        return tuple(found) if len(found) > 1 else found[0]

    def square(self, out: Any = None) -> Any:
        """The tiles on the diagonal and to the right of it, and their mirror images."""
        sizes, n = self._counted()[0], len(self.rows)
        if not n:
            raise no_samples()
        matrix = Matrix(sizes, sizes, out)
        with self._telling(n * (n + 1) // 2) as tell:
            for i in range(n):
                self.rows.each(self._row_of_square(i, matrix, tell), range(i, n))
        return self._reduced(matrix.whole)

    def _row_of_square(self, i: int, matrix: Matrix, tell: Tell) -> Callable[[int, tuple], None]:
        row: list[Held] = []

        def see(j: int, args: tuple) -> None:
            if j == i:
                one, tile, aux = self.meetings.squared(own(args))
                row.append(one)
            else:
                tile, aux = self.meetings.products(row[0], args)
                matrix.put(j, i, tile, mirrored=True)
            matrix.put(i, j, tile)
            self._keep_aux(0, j, aux)
            tell(self.rows.sizes[j])

        return see

    def row_by_row(self, out: Callable[[int, Any], Any]) -> None:
        """All tiles of a batch of the rows after another; the function is told each row of them."""
        sizes, columns = self._counted()
        if not (sizes and columns):
            raise no_samples()
        with self._telling(len(sizes) * len(columns)) as tell:
            for i, size in enumerate(sizes):
                one, aux = self.meetings.held(self.rows.at(i))
                self._keep_aux(0, i, aux)
                matrix = Matrix([size], columns)
                self._meet(one, -1, partial(matrix.put, 0), tell, i if len(self.sides) == 1 else None)
                out(sum(sizes[:i]), matrix.whole)

    def rectangle(self, params: Any, processes: Processes = ALONE, out: Any = None, gather: bool = False) -> Any:
        """The rows of this process; the columns are those of all processes, each of which has all batches in turn."""
        _, each = processes.told("samples", lambda: (None, self._counted()))
        columns = [size for _, sizes in each for size in sizes]
        if not columns or not any(rows for rows, _ in each):
            raise no_samples()
        matrix, start = Matrix(self.rows.sizes, columns, out), 0
        with self._telling(len(columns) * len(self.rows)) as tell:
            for rank, (_, sizes) in enumerate(each):
                for j in range(len(sizes)):
                    given = self._travelled(processes, rank, j)
                    mine = j if rank == processes.rank else None
                    column = partial(self._column, matrix, start + j, given, params, mine, tell)
                    processes.told("tiles", lambda column=column: (through(self.rounds, column), None))
                start += len(sizes)
        return self._reduced(self._of_all(matrix.whole, params, processes, gather))

    def _travelled(self, processes: Processes, rank: int, j: int) -> tuple[tuple, bytes]:
        """The arguments of a batch of a process, in this one; in others what it says of them."""

        def read() -> tuple[tuple[tuple, bytes], None]:
            args = self.columns.at(j) if processes.rank == rank else ()
            return (args, b"" if processes.size == 1 else _packed(args[1:])), None

        (args, said), _ = processes.told("batch", read)
        return args, processes.from_first(rank, said)

    def _column(
        self, matrix: Matrix, place: int, given: tuple[tuple, bytes], params: Any, mine: int | None, tell: Tell
    ) -> None:
        """The tiles of this process with a batch of the columns; `mine` is its number, if it is of this process."""
        args, said = given
        if len(self.rows):
            device = self.feed.goal(params)
            args = args or (params, *tree.map_tensors(lambda x: x.to(device), pickle.loads(said)))
            one, aux = self.meetings.held(args)
            if mine is not None:
                self._keep_aux(-1, mine, aux)
            put = partial(_put_column, matrix, place)
            self._meet(one, 0, put, tell, mine if len(self.sides) == 1 else None)

    def _meet(self, one: Held, side: int, put: Callable[[int, Any], None], tell: Tell, same: int | None) -> None:
        """The tiles of a batch with all of a side, among which it may be itself."""
        batches = self.sides[side]

        def see(k: int, args: tuple) -> None:
            tile, aux = self.meetings.products(one, args, k == same)
            self._keep_aux(side, k, aux)
            put(k, tile)
            tell(batches.sizes[k])

        batches.each(see, range(len(batches)))

    def _keep_aux(self, side: int, number: int, aux: Any) -> None:
        self._aux[side].setdefault(number, aux if self.rounds is None else self.rounds.present(aux))

    def _of_all(self, whole: Any, params: Any, processes: Processes, gather: bool) -> Any:
        """The rows of this process, or of all; where there are none, those of others say what they are like."""

        def shown() -> tuple[None, Any]:
            return None, None if whole is None else tree.map_tensors(lambda x: _alone(x[:0]), whole)

        _, each = processes.told("rows", shown)
        if whole is None:
            like, device = next(one for one in each if one is not None), self.feed.goal(params)
            whole = tree.map_tensors(lambda x: x.to(device), like)
        if not gather:
            return whole
        leaves, structure = tree.flatten(whole)
        return tree.unflatten(list(processes.exchanged([_rows_of(leaves)])[0]), structure)

    def _counted(self) -> tuple[list[int], list[int]]:
        """How many samples the batches of the rows have, and those of the columns, gone through for the first time."""
        for side in self.sides:
            side.count()
        return self.rows.sizes, self.columns.sizes

    def _reduced(self, whole: Any) -> Any:
        if (reduce := self.t.options.reduce) is None:
            return whole
        leaves = [reduce(path, x) for path, x in tree.named_leaves(whole)]
        return tree.unflatten(leaves, tree.flatten(whole)[1])

    @contextmanager
    def _telling(self, tiles: int) -> Iterator[Tell]:
        done = count(1)
        with told_of_parts(self.feed.progress, range(tiles), "tile") as tell:
            yield lambda samples: tell(next(done), samples)


def _kinds(x: Any, dim: int) -> str:
    """What the tensors of a tree are, one after the other, but for their number of samples."""
    kinds = {
        path: f"{y.dtype} {('N', *y.shape[: dim % y.ndim], *y.shape[dim % y.ndim + 1 :])}"
        for path, y in tree.named_leaves(x)
        if isinstance(y, torch.Tensor)
    }
    return ", ".join(f"{path} {kind}".strip() for path, kind in kinds.items())


def _put_column(matrix: Matrix, j: int, i: int, tile: Any) -> None:
    matrix.put(i, j, tile, mirrored=True)


def _packed(batch: tuple) -> bytes:
    try:
        return pickle.dumps(tree.map_tensors(_alone, batch))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise ArgumentTypeError(
            f"batches travel to the other processes, but this one has something that cannot be pickled ({error}). Give "
            "tensors, or trees of them and of plain values."
        ) from error


def _alone(x: torch.Tensor) -> torch.Tensor:
    """A tensor on the CPU that is not a part of a larger one, all of which would travel."""
    return x.detach().to("cpu", copy=True)


def _rows_of(tensors: list[torch.Tensor]) -> Exchange:
    return tuple((yield Rows(tensors, 0)))
