"""Reductions of a single column: of the shares of the gradient."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from invfunc._torch.functorch import plainly
from invfunc._torch.values import anywhere
from invfunc.errors import ArgumentError
from invfunc.linear_algebra.contract import contract, joined, present, promoted, squeezed, summed
from invfunc.loss.square_root import safe_root
from invfunc.reductions.estimates import Groups, group_of
from invfunc.reductions.reduction import Found, Over, Reduction, State, States


class EachSample(Reduction):
    """The shares themselves, one sample after the other."""

    each, row_axis = (0,), 0

    def step(self, shares: Any) -> State:
        return (shares.dense().squeeze(0),)

    def merge(self, a: State, b: State, over: Over) -> State:
        return (*a, *b) if over == "samples" else (joined(list(a)) + joined(list(b)),)

    def finish(self, state: State, found: Found) -> list[Any]:
        return [state[0] if len(state) == 1 else joined([*state])]

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(n, *leaf.shape),)


class SumOf(Reduction):
    """`sum_n fn(G[n])`, with any function of a gradient of one sample."""

    trees = 1

    def __init__(self, fn: Callable) -> None:
        self.fn = fn

    def step(self, shares: Any) -> State:
        return (shares.sum_of(lambda rows: per_sample(self.fn, rows, "sum_of")),)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        nothing = torch.zeros_like(leaf)
        return (self.fn(nothing) * n if n else nothing,)


class SquaredNorms(EachSample):
    """`sum_p G[n, p]^2` of each sample."""

    def step(self, shares: Any) -> State:
        return (shares.norms(),)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(n),)


class Norms(SquaredNorms):
    """`|G[n]|` of each sample, over all parameters, or over those of each unit."""

    whole = True

    def __init__(self, units: Sequence[str], each: bool) -> None:
        """`units` are those of the parameters; `each` has a result for each of them."""
        self.units_of, self.each_unit = units, each

    def together(self, states: States) -> State:
        rows: dict[str, list[torch.Tensor]] = {}
        for i, state in states.items():
            rows.setdefault(self.units_of[i], []).append(joined(list(state)))
        return ({unit: summed(each) for unit, each in rows.items()},)

    def finish(self, state: State, found: Found) -> list[Any]:
        norms = {unit: safe_root(squares) for unit, squares in state[0].items()}
        return [norms if self.each_unit else norms[""]]


class CentredSquares(Reduction):
    """`sum_n (G[n] - mean G)^2 / (n - correction)`, merged by the formula of Chan, Golub and LeVeque (1979)."""

    trees = 1

    def __init__(self, correction: float) -> None:
        self.correction = correction

    def step(self, shares: Any) -> State:
        total, centred = shares.moments()
        return total.new_full((), shares.count), total, centred  # a fill: no device is waited for

    def merge(self, a: State, b: State, over: Over) -> State:
        (m, total, centred), (n, other, more) = a, b
        apart = other / n - total / m
        return m + n, total + other, centred + more + apart.square() * (m * n / (m + n))

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        wide = torch.promote_types(leaf.dtype, torch.float32)
        return leaf.new_full((), n, dtype=wide), torch.zeros_like(leaf), torch.zeros_like(leaf)

    def finish(self, state: State, found: Found) -> list[Any]:
        divisor = found.n - self.correction
        if divisor <= 0:
            raise ArgumentError(f"correction={self.correction} leaves no divisor above 0 for {found.n} samples.")
        return [state[2] / divisor]


class SumAndCentredSquares(CentredSquares):
    """The gradient, and the centred squares of its shares."""

    several, trees = True, 2

    def finish(self, state: State, found: Found) -> list[Any]:
        return [state[1], *super().finish(state, found)]

    def assemble(self, results: list[Any], found: Found) -> Any:
        return tuple(results)


class ClippedSum(Reduction):
    """`sum_n weight(|G[n]|, max_norm) G[n]`, with the norm over all parameters, or over those of each group."""

    axes = ("samples",)  # the norm is of several parameters
    several, trees = True, 1
    units: tuple[str, ...] = ()

    def __init__(
        self, max_norm: Any, weight: Callable[[Any, Any], Any] | None = None, groups: Groups | None = None
    ) -> None:
        self.max_norm, self.weight, self.groups = max_norm, weight, groups
        self.before = Norms(self.units, groups is not None)
        each = max_norm.values() if isinstance(max_norm, Mapping) else [max_norm]
        self.constants = tuple(x for x in each if isinstance(x, torch.Tensor))

    def at(self, problem: Any) -> ClippedSum:
        names = {path: group_of(path, self.groups) for path in problem.paths}
        units = tuple(name for name in names.values() if name is not None)
        if len(units) < len(names):
            without = ", ".join(path for path, name in names.items() if name is None)
            raise ArgumentError(f"groups has no name for {without}, but each parameter has to be in a group.")
        if isinstance(self.max_norm, Mapping) and {*self.max_norm} != {*units}:
            there = [*dict.fromkeys(units)]
            raise ArgumentError(f"max_norm is of the groups {[*self.max_norm]}, but the groups are {there}.")
        found = ClippedSum(self.max_norm, self.weight, self.groups)
        found.units, found.before = units, Norms(units, self.groups is not None)
        return found

    def jointly(self, shares: Sequence[Any]) -> Iterator[tuple[int, State, State]]:
        *rest, widest = sorted(shares, key=lambda each: each.leaf.numel())
        others = summed([each.norms() for each in rest]) if rest else None
        max_norm = self.max_norm_of(self.units[widest.place])

        def weights(own: torch.Tensor, block: Any) -> torch.Tensor:
            return self._weights(safe_root(own if others is None else own + others[block]), max_norm)

        total, squares = widest.sum_and_norms(weights)
        squares = squares if others is None else squares + others
        yield widest.place, (squares,), (total,)
        del total  # which may have been given away
        scale = self._weights(safe_root(squares), max_norm) if rest else None
        nothing = squares.new_zeros(()).expand(len(squares))  # all of a unit are with its widest parameter
        for each in rest:
            yield each.place, (nothing,), (each.weighted(scale),)

    def clips(self, norms: Any) -> bool:
        """Tells whether some sample has another weight than 1, as far as that is seen from its norms."""
        each = norms if isinstance(norms, dict) else {"": norms}
        return self.weight is not None or any(anywhere(x > self.max_norm_of(unit)) for unit, x in each.items())

    def max_norm_of(self, unit: str) -> Any:
        """The largest norm of a unit."""
        return self.max_norm[unit] if isinstance(self.max_norm, Mapping) else self.max_norm

    def _weights(self, norms: torch.Tensor, max_norm: Any) -> torch.Tensor:
        if self.weight is None:
            return (norms / max_norm).clamp(min=1).reciprocal()
        return per_sample(self.weight, norms, "weight(norm, max_norm)", max_norm)

    def assemble(self, results: list[Any], found: Found) -> Any:
        return results[0], found.before


def per_sample(fn: Callable, rows: torch.Tensor, name: str, *rest: Any) -> torch.Tensor:
    """A function of the caller's, of each sample's numbers alone, which gives as many."""
    try:
        with torch.enable_grad():
            found = torch.vmap(fn, (0, *[None] * len(rest)))(rows, *rest)
    except (RuntimeError, ValueError) as error:
        raise ArgumentError(
            f"{name} is called for all samples at once, by torch.vmap. It may not branch on numbers (write "
            f"torch.where), draw random ones or leave torch, and returns a tensor. It ended with: {error}"
        ) from error
    if not isinstance(found, torch.Tensor) or found.shape != rows.shape:
        shape = tuple(found.shape[1:]) if isinstance(found, torch.Tensor) else type(found).__name__
        raise ArgumentError(
            f"{name} of a tensor {tuple(rows.shape[1:])} gives {shape}, but has to give as many numbers."
        )
    if found.requires_grad and not any(isinstance(x, torch.Tensor) and x.requires_grad for x in (rows, *rest)):
        raise ArgumentError(
            f"{name} reads a tensor that requires a gradient, which the result would not have: detach it."
        )
    return found


@dataclass(frozen=True)
class Projection:
    """The matrices that a parameter `[O, I]` is multiplied with: `first^T G rest`. Of a vector the rest is `[1, 1]`."""

    first: torch.Tensor
    """`[O, rows]`"""
    rest: torch.Tensor
    """`[I, columns]`"""

    def of(self, share: torch.Tensor) -> torch.Tensor:
        """The sketches `[b, rows * columns]` of shares `[b, *p]` that are there."""
        matrices = share.reshape(len(share), len(self.first), len(self.rest))
        terms = squeezed(promoted([("Noi", matrices), ("oR", self.first), ("iC", self.rest)]))
        return contract(terms, present("NRC", terms)).reshape(len(share), -1)


class Sketches(EachSample):
    """`P^T G[n] Q` of each sample, with P and Q that a key and the number of the parameter make."""

    def __init__(self, rows: int, columns: int, projection: str, key: int) -> None:
        self.rows, self.columns, self.projection, self.key = rows, columns, projection, key

    def step(self, shares: Any) -> State:
        return (shares.sketches(self.sides(shares.place, shares.leaf)),)

    def init(self, leaf: torch.Tensor, n: int, columns: int) -> State:
        return (leaf.new_zeros(n, self.rows * self.columns),)

    def sides(self, place: int, leaf: torch.Tensor) -> Projection:
        """The matrices of a parameter, the same ones in each call; a row or column of numbers has one of them."""
        size = leaf.shape[0] if leaf.ndim else 1
        others = leaf.numel() // max(1, size)
        dtype = torch.promote_types(leaf.dtype, torch.float32)
        with plainly():
            generator = torch.Generator().manual_seed(self.key + place)
            draw = partial(_drawn, PROJECTIONS[self.projection], generator=generator, dtype=dtype)
            if min(size, others) < 2:
                first, rest = draw(leaf.numel(), self.rows * self.columns), torch.ones(1, 1, dtype=dtype)
            else:
                first, rest = draw(size, self.rows), draw(others, self.columns)
            return Projection(first.to(leaf.device), rest.to(leaf.device))


def _drawn(kind: Callable, size: int, count: int, *, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """S `[size, count]`, where S S^T is the identity on average: with as many columns as rows always."""
    if size <= count:
        return torch.eye(size, count, dtype=dtype)
    return kind(size, count, dtype, generator)


def _signs(size: int, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Random signs."""
    return torch.randint(2, (size, count), generator=generator, dtype=dtype).mul_(2).sub_(1).div_(math.sqrt(count))


def _sparse(size: int, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """A random sign somewhere in each row."""
    columns = torch.randint(count, (size,), generator=generator)
    signs = torch.randint(2, (size,), generator=generator, dtype=dtype).mul_(2).sub_(1)
    return F.one_hot(columns, count) * signs[:, None]


def _mask(size: int, count: int, dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Each column picks another row."""
    rows = torch.randperm(size, generator=generator)[:count]
    found = torch.zeros(size, count, dtype=dtype)
    found[rows, torch.arange(count)] = math.sqrt(size / count)
    return found


PROJECTIONS = {"signs": _signs, "sparse": _sparse, "mask": _mask}
"""The kinds of random matrices."""
