"""Destinations of rows of samples that need not be in memory together: to tensors that are there, or to a function."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import storage_of
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.reductions.quantity import Quantity

Part = tuple[str, torch.Tensor, int]
"""A tensor with its name and the axis that counts the samples."""


class Rows:
    """Takes the results of each batch behind those of the batches before."""

    def __init__(self, out: Any, quantities: Sequence[Quantity], several: bool) -> None:
        """`several` says that there is a tree for each quantity, in a tuple."""
        self.out, self.quantities, self.several, self.most = out, quantities, several, 0
        self.calls = callable(out)

    def check(self, known: int, params: Any) -> None:
        """Look for what is wrong before the first batch, if there will be so many samples."""
        if self.calls:
            return
        taken = {storage_of(p) for p in tree.tensors((params,))}
        for name, x, axis in self._parts(self.out):
            check_own(name, x, taken)
            if x.ndim <= axis or x.shape[axis] < known:
                raise ArgumentError(
                    f"{name} has shape {tuple(x.shape)}, but there are {known} samples for axis {axis}."
                )

    def put(self, results: Sequence[Any], start: int, n: int) -> None:
        """Write the results of n samples; nothing, if one of them does not fit."""
        rows = tuple(results) if self.several else results[0]
        if self.calls:
            self.out(start, rows)
            return
        given, found = list(self._parts(self.out)), list(self._parts(rows))
        if [name for name, _, _ in given] != [name for name, _, _ in found]:
            wanted = ", ".join(name for name, _, _ in found)
            raise ArgumentError(f"out has other parts than the result, which are {wanted}.")
        for (name, x, axis), (_, y, _) in zip(given, found, strict=True):
            fits = x.ndim == y.ndim and x.shape[:axis] == y.shape[:axis] and x.shape[axis + 1 :] == y.shape[axis + 1 :]
            if not fits or x.dtype != y.dtype:
                sizes = ", ".join("N" if d == axis else str(size) for d, size in enumerate(y.shape))
                raise ArgumentError(f"{name} is {x.dtype} {tuple(x.shape)}, but has to be {y.dtype} ({sizes}).")
            if x.shape[axis] < start + n:
                raise ArgumentError(f"{name} has room for {x.shape[axis]} samples, but there are at least {start + n}.")
        for (_, x, axis), (_, y, _) in zip(given, found, strict=True):
            x.narrow(axis, start, n).copy_(y)
        self.most = max(self.most, n)

    def scaled(self, n: int, by: float) -> None:
        """Make the loss so many times as large in the rows of n samples, some at a time."""
        for q, out in zip(self.quantities, self._outs(self.out), strict=True):
            for x in tree.tensors((out,)):
                for rows in x.narrow(q.reduction.each[0], 0, n).split(self.most, q.reduction.each[0]):
                    rows.copy_(q.reduction.scaled((rows,), q.factor(by))[0])

    def result(self, n: int) -> Any:
        """Tensors that were written; None if a function was told."""
        if self.calls:
            return None
        axes = [q.reduction.each[0] for q in self.quantities]
        outs = [
            tree.map_tensors(lambda x: x.narrow(axis, 0, n), out)  # noqa: B023
            for axis, out in zip(axes, self._outs(self.out), strict=True)
        ]
        return tuple(outs) if self.several else outs[0]

    def _outs(self, out: Any) -> Sequence[Any]:
        if not self.several:
            return [out]
        if not isinstance(out, (tuple, list)) or len(out) != len(self.quantities):
            raise ArgumentTypeError(f"out has to be a tuple of {len(self.quantities)}, one for each statistic.")
        return out

    def _parts(self, out: Any) -> Iterator[Part]:
        for k, (q, one) in enumerate(zip(self.quantities, self._outs(out), strict=True)):
            for path, x in tree.named_leaves(one):
                yield f"out[{k}]{path}" if self.several else f"out{path}", x, q.reduction.each[0]


def check_own(name: str, x: Any, taken: set[int]) -> None:
    """Check that it is a tensor with memory of its own, which is taken from now on."""
    if not isinstance(x, torch.Tensor):
        kind = type(x).__name__
        raise ArgumentTypeError(f"{name} is of type {kind}, but has to be a tensor (torch.from_numpy makes one).")
    if storage_of(x) in taken or any(step == 0 and size > 1 for step, size in zip(x.stride(), x.shape, strict=True)):
        raise ArgumentError(f"{name} has no memory of its own; make it with torch.empty, or map a file.")
    taken.add(storage_of(x))
