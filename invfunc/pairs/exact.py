"""Fixed-point numbers in the mantissa of floating-point ones, whose sums and products can be undone to the last bit."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property
from typing import Any

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost, unwatched
from invfunc._torch.precision import in_float64
from invfunc.errors import ArgumentError, ArgumentTypeError, InverseError, RangeError

_MANTISSA = {torch.float32: 24, torch.float64: 53}
_OFF = "is not on the grid; put it there with Grid.enter(x)."


@dataclass(frozen=True)
class Grid:
    """The multiples of `2 ** -fraction_bits`, up to where a dtype holds all of them.

    For a and r on the grid `a + r` is computed exactly as long as it is in the range, and so is `(a + r) - r == a`.

    Args:
        fraction_bits: the bits behind the point.
        dtype: what holds the numbers, `torch.float32` (24 bits in all: up to 2 ** (24 - fraction_bits)) or
            `torch.float64` (53). By default float32, unless `largest` asks for more.
        largest: how large the numbers become.

    Raises:
        ArgumentTypeError: fraction_bits is not a whole number, or what `enter` is given is not a real tensor.
        ArgumentError: dtype holds no such grid.
        RangeError: `enter` is given numbers beyond the range.

    Example:
        >>> import torch, invfunc
        >>> grid = invfunc.pairs.Grid(fraction_bits=2)
        >>> grid.enter(torch.tensor([0.3, 1.6])), grid.limit
        (tensor([0.2500, 1.5000]), 4194304.0)
        >>> invfunc.pairs.Grid(fraction_bits=16, largest=1000.0).dtype
        torch.float64
    """

    fraction_bits: int = 16
    dtype: Any = None
    largest: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.fraction_bits, int):
            raise ArgumentTypeError(f"{self!r}: fraction_bits is a whole number.")
        if self.dtype is None:
            fits = self.largest <= 2.0 ** (24 - self.fraction_bits)
            object.__setattr__(self, "dtype", torch.float32 if fits else torch.float64)
        if self.dtype not in _MANTISSA:
            raise ArgumentError(f"{self!r}: the numbers are held by torch.float32 or torch.float64.")
        if self.largest > self.limit:
            raise ArgumentError(f"{self!r}: numbers up to {self.largest} do not fit, the range ends at {self.limit}.")

    @property
    def limit(self) -> float:
        """The end of the range."""
        return 2.0 ** (_MANTISSA[self.dtype] - self.fraction_bits)

    @property
    def unit(self) -> float:
        """The distance of two numbers."""
        return 2.0**-self.fraction_bits

    def enter(self, x: tree.Tree) -> tree.Tree:
        """The nearest numbers of the grid, of its dtype, for all tensors of a pytree; the gradient is that of the
        identity."""
        return tree.map_leaves(lambda leaf: self.checked(self.round(leaf), entered=True)[0], x)

    def round(self, x: torch.Tensor) -> torch.Tensor:
        """The nearest numbers on the grid, without a check of the range."""
        if not isinstance(x, torch.Tensor) or x.is_complex():
            kind = x.dtype if isinstance(x, torch.Tensor) else type(x).__name__
            raise ArgumentTypeError(f"{self!r}: a tensor of real numbers is put on a grid, not {kind}.")
        x = x.to(self.dtype)
        return straight_through(self._nearest(x.detach()), x)

    def checked(self, *tensors: torch.Tensor, entered: bool = False) -> tuple[torch.Tensor, ...]:
        """The tensors, if they are within the range, and on the grid; `entered` says that this is known."""
        if torch.compiler.is_compiling():
            return tensors
        with unwatched():  # values that are only looked at
            for x in map(innermost, tensors):
                if x.dtype != self.dtype:
                    raise RangeError(f"{self!r}: a state of {x.dtype} {_OFF}")
                low, high = (float(end) for end in x.aminmax()) if x.numel() else (0.0, 0.0)
                if not (-self.limit < low and high < self.limit):
                    raise RangeError(
                        f"{self!r}: numbers between {low:.3g} and {high:.3g} leave the range, which ends at "
                        f"{self.limit:.6g}. Take fewer fraction_bits, or dtype=torch.float64."
                    )
                if not entered and not torch.equal(self._nearest(x), x):
                    raise RangeError(f"{self!r}: the state {_OFF}")
        return tensors

    def _nearest(self, x: torch.Tensor) -> torch.Tensor:
        return (x / self.unit).round_().mul_(self.unit).add_(0.0)  # -0.0 does not come back as such


def straight_through(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A value that is differentiated as x."""
    return value + (x - x.detach())


# Products

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
        """The decay by a number between 0 and 1 which is a fraction of small numbers, as 0.9 is 9/10."""
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
        """Number of steps that fit into a word of 63 bits."""
        n, d = self.by.as_integer_ratio()
        largest, steps = 0, 0
        while (largest := largest // n * d + d - 1) <= torch.iinfo(torch.int64).max:
            steps += 1
        return steps

    def forth(self, x: torch.Tensor, words: Words, gained: torch.Tensor, steps: int, grid: Grid) -> tuple[Any, Words]:
        """`n / d * x + gained` after so many steps, and all digits."""
        if steps and steps % self.capacity == 0:
            words = (*words, torch.zeros_like(words[-1]))
        x, last = _product(x, words[-1], self.by, grid.unit)
        return x + gained, (*words[:-1], last)

    def back(self, x: torch.Tensor, words: Words, gained: torch.Tensor, steps: int, grid: Grid) -> tuple[Any, Words]:
        """The number that it was computed from, with so many steps before it."""
        x, last = _product(x - gained, words[-1], 1 / self.by, grid.unit)
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


def _product(x: torch.Tensor, digits: torch.Tensor, by: Fraction, unit: float) -> tuple[torch.Tensor, torch.Tensor]:
    """n / d * x on the grid to less than a unit, and the digits; differentiated as without rounding.

    In units `n * x + u` is divided by d, where u is taken from the digits (as their remainder by n), and what remains
    is put there. By d / n it is undone.
    """
    n, d = by.as_integer_ratio()
    units = (in_float64(x.detach(), "a decay that is exact counts") / unit).round_()  # it holds up to 2 ** 53
    whole = (units / d).trunc_()  # as n * x itself may have more than 53 bits
    fewer = digits.div(n, rounding_mode="trunc")
    part = torch.sub(units, whole, alpha=d).mul_(n) + torch.sub(digits, fewer, alpha=n)
    more = ((part + 0.5) / d).floor_()  # half a unit from where a rounded quotient would be another whole number
    left = part.sub_(more, alpha=d)
    product = whole.to(torch.int64).mul_(n) + more.to(torch.int64)
    rounded = product.to(x.dtype) * unit
    return straight_through(rounded, x * float(by)), fewer.mul_(d) + left.to(torch.int64)
