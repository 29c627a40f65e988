"""Solvers of differential equations, whose steps run backwards."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from invfunc.callables import describe
from invfunc.errors import ArgumentError
from invfunc.pairs.moves import Calls, Move, Moves
from invfunc.pairs.pair import Invertible
from invfunc.pairs.part import needed
from invfunc.pairs.state import combined, fitting
from invfunc.pairs.value import Value

Tableau = tuple[Sequence[Sequence[float]], Sequence[float]]
"""For each stage how far it goes along the stages before it, and the weight of each stage in the step."""

TABLEAUS: dict[str, Tableau] = {
    "euler": ([[]], [1]),
    "midpoint": ([[], [1 / 2]], [0, 1]),
    "heun": ([[], [1]], [1 / 2, 1 / 2]),
    "rk4": ([[], [1 / 2], [0, 1 / 2], [0, 0, 1]], [1 / 6, 1 / 3, 1 / 3, 1 / 6]),
}


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
        ArgumentTypeError: increment is not a function.
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
    needed("reversible_step(increment)", "increment", increment)
    call = f"reversible_step({describe(increment)}, coupling={coupling})"
    if not isinstance(coupling, (int, float)) or not 0 < coupling <= 1:
        raise ArgumentError(f"{call}: coupling has to be above 0 and at most 1.")
    moves = Move(0, None, coupling, 1 - coupling), Move(0, 0), Move(1, 1, by=-1)
    return _Steps(call, ("increment",), "yz", moves).pair_of(increment)


@dataclass(frozen=True, eq=False)
class _Steps(Moves):
    """Moves by the increments of the way there and of the way back."""

    def calls(self, functions: tuple, args: list[Any]) -> Calls:
        ends, *more = args or (None,)
        if not isinstance(ends, (tuple, list)) or len(ends) < 2:
            found = f"{type(ends).__name__}" + (f" of {len(ends)}" if isinstance(ends, (tuple, list)) else "")
            raise ArgumentError(
                f"{self.call}: behind the state has to be (start, end), between which the step goes, but there is "
                f"{found}. Parameters of the step alone are (start, end, p), those of all stand behind."
            )
        start, end, *own = ends
        return [(functions[0], (*way, *own, *more)) for way in ((start, end), (end, start))]


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
    needed("runge_kutta(field, tableau)", "field", field)
    call = f"runge_kutta({describe(field)}, {tableau!r})"
    try:
        a, b = TABLEAUS[tableau] if isinstance(tableau, str) else tableau
        rows, weights = [[float(w) for w in row] for row in a], [float(w) for w in b]
        explicit = len(rows) == len(weights) and all(len(row) <= i for i, row in enumerate(rows))
    except (TypeError, ValueError, KeyError):
        explicit, weights = False, []
    if not explicit or abs(sum(weights) - 1) > 1e-6:
        raise ArgumentError(
            f"{call}: the tableau is one of {', '.join(map(repr, TABLEAUS))}, or (a, b), where row i of a has the "
            "weights of the at most i stages before stage i, and b has one for each row, which sum to 1."
        )
    return _Increment(call, field, rows, weights)


@dataclass(frozen=True, eq=False, repr=False)
class _Increment(Value):
    """One step of a scheme."""

    call: str
    field: Callable
    a: Sequence[Sequence[float]]
    b: Sequence[float]

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
            slopes.append(fitting(slope, x, self.call, "what field returns", "x"))
        return combined(lambda *slopes: h * _weighted(self.b, slopes), *slopes)


def _weighted(weights: Sequence[float], slopes: Sequence[torch.Tensor]) -> Any:
    return sum(w * slope for w, slope in zip(weights, slopes, strict=False) if w)
