"""All pairs of samples, tile by tile: where the products of two batches go, and batches that come again for others."""

from __future__ import annotations

from collections.abc import Callable, Container
from itertools import accumulate
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import storage_of
from invfunc.arguments.problem import InDims
from invfunc.errors import ArgumentError
from invfunc.evaluation.batches import Batches, size_of
from invfunc.evaluation.fingerprint import fingerprint
from invfunc.evaluation.rows import check_own

See = Callable[[int, tuple], None]
"""Sees the arguments of the batch with a number."""


class Again:
    """Batches that are gone through again and again, and have to be the same ones each time."""

    def __init__(self, batches: Batches, in_dims: InDims) -> None:
        self.batches, self.in_dims = batches, in_dims
        self.sizes: list[int] = []
        """How many samples each of them has."""
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

    def each(self, see: See, wanted: Container[int]) -> None:
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
        self.each(lambda _, args: found.append(own(args)), (number,))
        return found[0]


def own(args: tuple) -> tuple:
    """The arguments of a batch, where a loader may write the next one in their memory."""
    return args[0], *tree.map_tensors(torch.clone, args[1:])


def _others() -> ArgumentError:
    return ArgumentError(
        "the loader gave other batches than the first time, or gave them in another order, but each of them is to meet "
        "all others. Give what gives the same ones again, as a DataLoader with shuffle=False does."
    )


class Matrix:
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
            self.whole = tree.map_tensors(self._made, tile) if self.out is None else self._given(tile)
        for x, y in zip(tree.tensors((self.whole,)), tree.tensors((tile,)), strict=True):
            x.narrow(0, *self.rows[i]).narrow(x.ndim // 2, *self.columns[j]).copy_(y)

    def _made(self, tile: torch.Tensor) -> torch.Tensor:
        return tile.new_empty(self._of(tile))

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


def check_out(out: Any, params: Any) -> None:
    """Check that there are tensors that can be written, of which none shares memory with others or with parameters."""
    taken = {storage_of(p) for p in tree.tensors((params,))}
    for path, x in tree.named_leaves(out):
        check_own(f"out{path}", x, taken)


def _mirrored(tile: torch.Tensor) -> torch.Tensor:
    """`[N, *out, M, *out]` with the M first."""
    half = tile.ndim // 2
    return tile.permute(*range(half, tile.ndim), *range(half))


def _ranges(sizes: list[int]) -> list[tuple[int, int]]:
    """Where batches of these sizes start, one behind the other, and how long they are."""
    return [*zip(accumulate([0, *sizes[:-1]]), sizes, strict=True)] if sizes else []
