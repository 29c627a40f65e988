"""Steps towards a fixed point that run backwards."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from invfunc.callables import describe
from invfunc.errors import ArgumentError
from invfunc.pairs.copies import TwoCopies
from invfunc.pairs.pair import Invertible
from invfunc.pairs.part import as_part
from invfunc.pairs.state import combined


def fixed_point(f: Callable, beta: float = 0.5) -> Invertible:
    """The pair `(y, z) -> (y', z')` of a step towards the fixed point x = f(x, p), which runs backwards as well.

        y' = (1 - beta) * y + beta * f(z, p)        z = (z' - beta * f(y', p)) / (1 - beta)
        z' = (1 - beta) * z + beta * f(y', p)       y = (y' - beta * f(z, p)) / (1 - beta)

    y and z are two copies of the state, which begin as the same, `(x, x)`, and both come to rest at the fixed point.
    `equilibrium` takes as many steps as a tolerance asks for.

    Args:
        f: any function that keeps the form of x, a tensor or any pytree of tensors; or a module. f is pure in
            torch.func's sense (see the conventions).
        beta: between 0 and 1, without them: how far a step goes. The inverse divides by 1 - beta: errors grow by 1 /
            (1 - beta) at each step, and by up to the square of that where f is steep (`drift`). Many steps back need
            float64 or `anchor_every=`.

    Returns:
        An `Invertible`, called as `pair((y, z), p, *args, **kwargs)`; `repeated(pair)((x, x), [p] * n)` takes n steps.
        As in every pair, p of a module is that of `functional(module)`, or None for its own, and its further inputs
        stand behind p. Its log-determinant is twice the logarithm of 1 - beta for each entry of y, [N].

    Raises:
        ArgumentTypeError: f is not a function, or a state has something else than tensors in it.
        ArgumentError: beta is not between 0 and 1, f gives another form, or the state is not a pair of one form.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.fixed_point(torch.cos)
        >>> y, z = invfunc.repeated(pair)((torch.ones(1), torch.ones(1)), [None] * 40)
        >>> y, y.cos()
        (tensor([0.7391]), tensor([0.7391]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `with_log_det`, `drift`.

    Cost: f twice in either direction, and twice in a backward pass.

    Source: Reversible Deep Equilibrium Models, arXiv 2509.12917, 2025.
    """
    f = as_part("fixed_point(f)", "f", f)
    call = f"fixed_point({describe(f)}, beta={beta})"
    if not isinstance(beta, (int, float)) or not 0 < beta < 1:
        raise ArgumentError(f"{call}: beta has to be between 0 and 1.")
    return _FixedPoint(call, 2 * math.log(1 - beta), beta).pair(call, (f,))


@dataclass(frozen=True, eq=False)
class _FixedPoint(TwoCopies):
    beta: float

    def forward(self, f: Any, state: Any = None, *given: Any, **kwargs: Any) -> Any:
        y, z = self.read(f, state, "x")
        y = combined(self._towards, y, self.of(f, z, *given, **kwargs))
        return y, combined(self._towards, z, self.of(f, y, *given, **kwargs))

    def inverse(self, f: Any, state: Any = None, *given: Any, **kwargs: Any) -> Any:
        y, z = self.read(f, state, "y")
        z = combined(self._back, z, self.of(f, y, *given, **kwargs))
        return combined(self._back, y, self.of(f, z, *given, **kwargs)), z

    def _towards(self, x: Any, to: Any) -> Any:
        return (1 - self.beta) * x + self.beta * to

    def _back(self, x: Any, to: Any) -> Any:
        return (x - self.beta * to) / (1 - self.beta)
