"""Fixed-point numbers in the mantissa of floating-point ones, whose sums and differences have no rounding errors."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost, unwatched
from invfunc.errors import ArgumentError, ArgumentTypeError, RangeError

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
        >>> grid = invfunc.Grid(fraction_bits=2)
        >>> grid.enter(torch.tensor([0.3, 1.6])), grid.limit
        (tensor([0.2500, 1.5000]), 4194304.0)
        >>> invfunc.Grid(fraction_bits=16, largest=1000.0).dtype
        torch.float64
    """

    fraction_bits: int = 16
    dtype: torch.dtype | None = None
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
        assert self.dtype is not None
        return 2.0 ** (_MANTISSA[self.dtype] - self.fraction_bits)

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
        scaled = x * 2.0**self.fraction_bits
        return scaled.round_().mul_(2.0**-self.fraction_bits).add_(0.0)  # -0.0 does not come back as such


def straight_through(value: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """A value that is differentiated as x."""
    return value + (x - x.detach())
