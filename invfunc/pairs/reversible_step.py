"""Steps of solvers of differential equations that run backwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs.copies import TwoCopies
from invfunc.pairs.pair import Invertible
from invfunc.pairs.state import combined


def reversible_step(increment: Callable, coupling: float = 0.99) -> Invertible:
    """The pair `(y, z) -> (y', z')` of one step of any solver, which runs backwards as well, at the solver's own order.

        y' = c * y + (1 - c) * z + increment(z, start, end)
        z' = z - increment(y', end, start)

        z = z' + increment(y', end, start)
        y = (y' - (1 - c) * z - increment(z, start, end)) / c

    y and z are two copies of the state, which begin as the same, `(x, x)`, and stay as near as the solver is exact.

    Args:
        increment: `increment(x, start, end, *args, **kwargs)`, by how much one step from start to end changes x, a
            tensor or any pytree of tensors; a step back has its end before its start. `runge_kutta(field)` makes one
            for a differential equation. start and end are times, or anything else that has a value wherever a step
            begins and ends: for a stochastic equation `(time, noise)`, where the noise is the path up to that time.
            increment is pure in torch.func's sense (see the conventions).
        coupling: c, above 0 and at most 1. Below 1 it draws the copies together. The inverse divides by it: errors grow
            by 1 / c at each step.

    Returns:
        An `Invertible`, called as `pair((y, z), (start, end), *args, **kwargs)`. What stands behind the two ends,
        `(start, end, p)`, is the step's own, and is given to increment in front of the further arguments. So

            repeated(pair)((x, x), (times[:-1], times[1:]), params)

        solves along a tensor of times. Its log-determinant is the logarithm of c for each entry of y, [N].

    Raises:
        ArgumentTypeError: increment is not a function, or a state has something else than tensors in it.
        ArgumentError: coupling is not above 0 and at most 1; the second argument is not `(start, end, ...)`; the
            state is not a pair of one form, or increment gives another one.

    Example:
        >>> import torch, invfunc
        >>> euler = invfunc.reversible_step(lambda x, start, end: (start - end) * x, coupling=0.5)
        >>> y, z = euler((torch.ones(1), torch.ones(1)), (0.0, 0.5))
        >>> y, z
        (tensor([0.5000]), tensor([0.7500]))
        >>> invfunc.invert(euler)((y, z), (0.0, 0.5))
        (tensor([1.]), tensor([1.]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `with_log_det`.

    Cost: increment twice in either direction, and twice in a backward pass. Many equal steps on a small state in
    `repeated` (at least 8, of at most 64 KiB) are one node of autograd.

    Source: S. McCallum and J. Foster, Efficient, Accurate and Stable Gradients for Neural ODEs, 2024.
    """
    if not callable(increment):
        kind = type(increment).__name__
        raise ArgumentTypeError(f"reversible_step(increment): increment is of type {kind}, but has to be a function.")
    call = f"reversible_step({describe(increment)}, coupling={coupling})"
    if not isinstance(coupling, (int, float)) or not 0 < coupling <= 1:
        raise ArgumentError(f"{call}: coupling has to be above 0 and at most 1.")
    return _Step(call, math.log(coupling), coupling).pair(call, (increment,))


@dataclass(frozen=True, eq=False)
class _Step(TwoCopies):
    coupling: float

    def forward(self, increment: Any, state: Any = None, ends: Any = None, *given: Any, **kwargs: Any) -> Any:
        (y, z), (there, back) = self.read(increment, state, "x"), self._ways(ends)
        c, moved = self.coupling, self.of(increment, z, *there, *given, **kwargs)
        y = combined(lambda y, z, by: c * y + (1 - c) * z + by, y, z, moved)
        moved = self.of(increment, y, *back, *given, **kwargs)
        return y, combined(lambda z, by: z - by, z, moved)

    def inverse(self, increment: Any, state: Any = None, ends: Any = None, *given: Any, **kwargs: Any) -> Any:
        (y, z), (there, back) = self.read(increment, state, "y"), self._ways(ends)
        z = combined(lambda z, by: z + by, z, self.of(increment, y, *back, *given, **kwargs))
        c, moved = self.coupling, self.of(increment, z, *there, *given, **kwargs)
        return combined(lambda y, z, by: (y - (1 - c) * z - by) / c, y, z, moved), z

    def _ways(self, ends: Any) -> tuple[tuple, tuple]:
        """What increment is given behind a state, on the way there and back."""
        if not isinstance(ends, (tuple, list)) or len(ends) < 2:
            found = f"{type(ends).__name__}" + (f" of {len(ends)}" if isinstance(ends, (tuple, list)) else "")
            raise ArgumentError(
                f"{self.call}: behind the state has to be (start, end), between which the step goes, but there is "
                f"{found}. Parameters of the step alone are (start, end, p), those of all stand behind."
            )
        start, end, *own = ends
        return (start, end, *own), (end, start, *own)
