"""Steps of solvers of ordinary differential equations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs.part import fitting_state
from invfunc.pairs.state import combined
from invfunc.pairs.value import Value

Tableau = tuple[Sequence[Sequence[float]], Sequence[float]]
"""For each stage how far it goes along the stages before it, and the weight of each stage in the step."""

TABLEAUS: dict[str, Tableau] = {
    "euler": ([[]], [1]),
    "midpoint": ([[], [1 / 2]], [0, 1]),
    "heun": ([[], [1]], [1 / 2, 1 / 2]),
    "rk4": ([[], [1 / 2], [0, 1 / 2], [0, 0, 1]], [1 / 6, 1 / 3, 1 / 3, 1 / 6]),
}


def runge_kutta(field: Callable, tableau: str | Tableau = "rk4") -> Callable:
    """The increment of one step of a Runge-Kutta scheme for dx/dt = field(x, t).

        def increment(x, start, end, *args, **kwargs):
            h, slopes = end - start, []
            for row in a:
                slopes.append(field(x + h * (row @ slopes), start + h * sum(row), *args, **kwargs))
            return h * (b @ slopes)

    Args:
        field: `field(x, t, *args, **kwargs)`, of the form of x, a tensor or a pytree of tensors; or a module. field is
            pure in torch.func's sense (see the conventions).
        tableau: "euler" (order 1), "midpoint", "heun" (2) or "rk4" (4); or `(a, b)` of an explicit scheme of one's own,
            where row i of a has the weights of the stages before stage i.

    Returns:
        `increment(x, start, end, *args, **kwargs)`, of the form of x, as `reversible_step` takes it.

    Raises:
        ArgumentTypeError: field is not a function.
        ArgumentError: an unknown tableau; start or end is not a number; field gives another form than that of x.

    Example:
        >>> import torch, invfunc
        >>> step = invfunc.reversible_step(invfunc.runge_kutta(lambda x, t: -x))
        >>> start, times = torch.ones(1), torch.linspace(0, 1, 11)
        >>> invfunc.repeated(step)((start, start), (times[:-1], times[1:]))[0] * torch.e
        tensor([1.0000])

    Composes with: `reversible_step`, and every transform of torch.func.

    Cost: field once for each stage.

    Source: W. Kutta, 1901; E. Hairer, S. Norsett and G. Wanner, Solving Ordinary Differential Equations I, 1993.
    """
    call = "runge_kutta(field, tableau)"
    if not callable(field):
        raise ArgumentTypeError(f"{call}: field is of type {type(field).__name__}, but has to be a function.")
    call = f"runge_kutta({describe(field)}, {tableau!r})"
    return _Increment(call, field, *_explicit(call, tableau))


def _explicit(call: str, tableau: Any) -> Tableau:
    """The rows and the weights, if they are those of an explicit scheme that is consistent."""
    if isinstance(tableau, str) and tableau in TABLEAUS:
        return TABLEAUS[tableau]
    try:
        a, b = tableau
        rows, weights = [[float(w) for w in row] for row in a], [float(w) for w in b]
    except (TypeError, ValueError):
        names = ", ".join(f'"{name}"' for name in TABLEAUS)
        raise ArgumentError(f"{call}: the tableau is one of {names}, or (a, b).") from None
    if len(rows) != len(weights) or any(len(row) > i for i, row in enumerate(rows)):
        raise ArgumentError(
            f"{call}: row i of a has the weights of the at most i stages before stage i, and b has one for each of the "
            f"{len(rows)} rows."
        )
    if abs(sum(weights) - 1) > 1e-6:
        raise ArgumentError(f"{call}: the weights b sum to {sum(weights):g}, but to 1 in any scheme that converges.")
    return rows, weights


@dataclass(frozen=True, eq=False, repr=False)
class _Increment(Value):
    """One step of a scheme."""

    call: str
    field: Callable
    a: Sequence[Sequence[float]]
    b: Sequence[float]

    @property
    def __name__(self) -> str:
        return self.call

    def __repr__(self) -> str:
        return self.call

    def __call__(self, x: Any, start: Any, end: Any, *args: Any, **kwargs: Any) -> Any:
        for name, t in (("start", start), ("end", end)):
            if not isinstance(t, (int, float)) and not (isinstance(t, torch.Tensor) and t.dim() == 0):
                found = f"of shape {list(t.shape)}" if isinstance(t, torch.Tensor) else f"of type {type(t).__name__}"
                raise ArgumentError(f"{self.call}: {name} is {found}, but has to be a number or a tensor of one.")
        h, slopes = end - start, []
        for row in self.a:
            stage = combined(lambda x, *slopes, row=row: x + h * _weighted(row, slopes), x, *slopes)
            slope = self.field(stage, start + h * sum(row), *args, **kwargs)
            slopes.append(fitting_state(slope, x, self.call, "the field", "x"))
        return combined(lambda *slopes: h * _weighted(self.b, slopes), *slopes)


def _weighted(weights: Sequence[float], slopes: Sequence[torch.Tensor]) -> Any:
    return sum(w * slope for w, slope in zip(weights, slopes, strict=False) if w)
