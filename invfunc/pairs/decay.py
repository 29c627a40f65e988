"""Products with a fraction below one that can be undone to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch

from invfunc._torch.functorch import innermost, unwatched
from invfunc._torch.precision import in_float64
from invfunc.errors import ArgumentError, InverseError
from invfunc.pairs.exact import Grid, straight_through

_DENOMINATOR = 10_000

Words = tuple[torch.Tensor, ...]
"""Digits, of which only the last word is written; those before it are full."""


@dataclass(frozen=True)
class Decay:
    """`x -> n / d * x` on a grid, step after step, where x takes fewer digits each time.

    The digits that it loses are put into whole numbers beside it, from which they come back: log2(d / n) bits a step.
    """

    by: Fraction
    call: str
    """Of the optimiser, for errors."""

    @staticmethod
    def of(call: str, name: str, by: Any) -> Decay:
        """That by a number between 0 and 1 which is a fraction of small numbers, as 0.9 is 9/10."""
        if isinstance(by, (int, float, Fraction)) and 0 < by < 1:
            near, tolerance = Fraction(by).limit_denominator(_DENOMINATOR), Fraction(1, 10**12)  # of 0.9 as a float
            if abs(near - Fraction(by)) < tolerance and 0 < near < 1:
                return Decay(near, call)
        raise ArgumentError(
            f"{call}: {name} has to be between 0 and 1, and a fraction with a denominator up to {_DENOMINATOR}, as 0.9 "
            "or Fraction(9, 10): only such a product can be undone to the last bit."
        )

    @cached_property
    def capacity(self) -> int:
        """How many steps fit into a word of 63 bits."""
        n, d = self.by.as_integer_ratio()
        largest, steps = 0, 0
        while (largest := largest // n * d + d - 1) <= torch.iinfo(torch.int64).max:
            steps += 1
        return steps

    def forth(self, x: torch.Tensor, words: Words, gained: torch.Tensor, steps: int, grid: Grid) -> tuple[Any, Words]:
        """`n / d * x + gained` after so many steps, and all digits."""
        if steps and steps % self.capacity == 0:
            words = (*words, torch.zeros_like(words[-1]))
        x, last = _product(x, words[-1], self.by, grid.fraction_bits)
        return x + gained, (*words[:-1], last)

    def back(self, x: torch.Tensor, words: Words, gained: torch.Tensor, steps: int, grid: Grid) -> tuple[Any, Words]:
        """What that was computed from, with so many steps before it."""
        x, last = _product(x - gained, words[-1], 1 / self.by, grid.fraction_bits)
        if steps % self.capacity:
            return x, (*words[:-1], last)
        with unwatched():
            used_up = not bool(innermost(last).any())
        if not used_up:
            raise InverseError(
                f"{self.call}: the digits that were kept of at most {self.capacity} steps are not used up at their "
                "start, so that the gradients were not those of the way forth: the data are other ones, an operation "
                "is not deterministic (torch.use_deterministic_algorithms), or random numbers were drawn, which "
                "invertible_checkpoint draws again."
            )
        return x, words[:-1] if steps else (last,)


def _product(x: torch.Tensor, digits: torch.Tensor, by: Fraction, bits: int) -> tuple[torch.Tensor, torch.Tensor]:
    """n / d * x on the grid to less than a unit, and the digits; differentiated as without rounding.

    In units `n * x + u` is divided by d, where u is taken from the digits (as their remainder by n), and what remains
    is put there. By d / n it is undone.
    """
    n, d = by.as_integer_ratio()
    units = (in_float64(x.detach(), "a decay that is exact counts") * 2.0**bits).round_()  # it holds up to 2 ** 53
    whole = (units / d).trunc_()  # as n * x itself may have more than 53 bits
    fewer = digits.div(n, rounding_mode="trunc")
    part = torch.sub(units, whole, alpha=d).mul_(n) + torch.sub(digits, fewer, alpha=n)
    more = ((part + 0.5) / d).floor_()  # half a unit from where a rounded quotient would be another whole number
    left = part.sub_(more, alpha=d)
    product = whole.to(torch.int64).mul_(n) + more.to(torch.int64)
    rounded = product.to(x.dtype) * 2.0**-bits
    return straight_through(rounded, x * float(by)), fewer.mul_(d) + left.to(torch.int64)
