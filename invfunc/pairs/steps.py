"""Steps that run backwards: of residual networks, towards a fixed point, and of solvers of differential equations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs.couplings import Calls, Move, Moves, Rounded, as_part, combined, described, fitting
from invfunc.pairs.exact import Grid
from invfunc.pairs.pair import Invertible, needed
from invfunc.pairs.value import Value


def momentum(f: Callable[..., Any], gamma: float = 0.9) -> Invertible:
    """The pair `(x, v) -> (x', v')` of a residual network with momentum, for any f, without splitting x.

        v' = gamma * v + (1 - gamma) * f(x, p)          x = x' - v'
        x' = x + v'                                     v = (v' - (1 - gamma) * f(x, p)) / gamma

    Args:
        f: any function that keeps the shape of x, or a module. f is pure in torch.func's sense (see the conventions).
        gamma: between 0 and 1 (both excluded). The inverse divides by it: errors grow by 1 / gamma at each step.

    Returns:
        An `Invertible`, called as `pair((x, v), p, *args, **kwargs)`; zeros start v. Its log-determinant is the
        logarithm of gamma for each entry of v, [N].

    Raises:
        ArgumentTypeError: f is not a function.
        ArgumentError: gamma is not between 0 and 1, f changes the shape, or the state is not a pair of one shape.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.pairs.momentum(lambda x: 2 * x, gamma=0.5)
        >>> pair((torch.ones(2), torch.zeros(2)))
        (tensor([2., 2.]), tensor([1., 1.]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `with_log_det`.

    Cost: f once in either direction, and once in a backward pass.

    Source: M. Sander et al., Momentum Residual Neural Networks, 2021.
    """
    f = as_part("momentum(f)", "f", f)
    call = f"momentum({describe(f)}, gamma={gamma})"
    if not isinstance(gamma, (int, float)) or not 0 < gamma < 1:
        raise ArgumentError(f"{call}: gamma has to be between 0 and 1.")
    return Moves(call, ("f",), "xv", (Move(1, 0, gamma, 1 - gamma), Move(0, None))).pair(call, (f,))


def leapfrog(force: Callable[..., Any], step: float) -> Invertible:
    """The pair `(x, v) -> (x', v')` of a leapfrog step: a particle with position x and velocity v in a field of forces.

        w = v + step / 2 * force(x, p)
        x' = x + step * w
        v' = w + step / 2 * force(x', p)

    Args:
        force: any function that keeps the shape of x, or a module. force is pure in torch.func's sense (see the
            conventions).
        step: the length of the step in time.

    Returns:
        An `Invertible`, called as `pair((x, v), p, *args, **kwargs)`. Its log-determinant is 0.

    Raises:
        ArgumentTypeError: force is not a function, or step is not a number.
        ArgumentError: the state is not a pair of one shape, or force changes it.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.pairs.leapfrog(lambda x: -x, step=0.5)
        >>> pair((torch.ones(1), torch.zeros(1)))
        (tensor([0.8750]), tensor([-0.4688]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `with_log_det`.

    Cost: two forces in either direction, and two in a backward pass.

    Source: L. Verlet, 1967; B. Chang et al., Reversible Architectures for Arbitrarily Deep Residual Networks, 2018.
    """
    force = as_part("leapfrog(force, step)", "force", force)
    call = f"leapfrog({describe(force)}, step={step})"
    if not isinstance(step, (int, float)):
        raise ArgumentTypeError(f"{call}: step is of type {type(step).__name__}, but has to be a number.")
    v_by_force, x_by_v = Move(1, 0, by=step / 2), Move(0, None, by=step)
    return Moves(call, ("force",), "xv", (v_by_force, x_by_v, v_by_force)).pair(call, (force,))


def fixed_point(f: Callable[..., Any], beta: float = 0.5) -> Invertible:
    """The pair `(y, z) -> (y', z')` of a step towards the fixed point x = f(x, p), which runs backwards as well.

        y' = (1 - beta) * y + beta * f(z, p)        z = (z' - beta * f(y', p)) / (1 - beta)
        z' = (1 - beta) * z + beta * f(y', p)       y = (y' - beta * f(z, p)) / (1 - beta)

    y and z are two copies of the state. They start equal, `(x, x)`, and both converge to the fixed point. `equilibrium`
    takes as many steps as a tolerance needs.

    Args:
        f: any function that keeps the form of x, a tensor or any pytree of tensors; or a module. f is pure in
            torch.func's sense (see the conventions).
        beta: the size of a step, between 0 and 1 (both excluded). The inverse divides by 1 - beta: errors grow by 1 /
            (1 - beta) at each step, and by up to the square of that where f is steep (`drift`). Many steps back need
            float64 or `anchor_every=`.

    Returns:
        An `Invertible`, called as `pair((y, z), p, *args, **kwargs)`; `repeated(pair)((x, x), [p] * n)` takes n steps.
        As in every pair, p of a module is that of `functional(module)`, or None for its own, and its further inputs
        come after p. Its log-determinant is twice the logarithm of 1 - beta for each entry of y, [N].

    Raises:
        ArgumentTypeError: f is not a function.
        ArgumentError: beta is not between 0 and 1, f gives another form, or the state is not a pair of one form.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.pairs.fixed_point(torch.cos)
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
    return Moves(call, ("f",), "yz", tuple(Move(part, 0, 1 - beta, beta) for part in (0, 1))).pair(call, (f,))


Tableau = tuple[Sequence[Sequence[float]], Sequence[float]]
"""For each stage how far it goes along the stages before it, and the weight of each stage in the step."""

TABLEAUS: dict[str, Tableau] = {
    "euler": ([[]], [1]),
    "midpoint": ([[], [1 / 2]], [0, 1]),
    "heun": ([[], [1]], [1 / 2, 1 / 2]),
    "rk4": ([[], [1 / 2], [0, 1 / 2], [0, 0, 1]], [1 / 6, 1 / 3, 1 / 3, 1 / 6]),
    "ees25": ([[], [1 / 3], [-5 / 48, 15 / 16]], [1 / 10, 1 / 2, 2 / 5]),
}


def reversible_step(increment: Callable[..., Any], coupling: float | None = 0.99) -> Invertible:
    """The pair `(y, z) -> (y', z')` of one step of any solver, made invertible at the solver's order of accuracy.

        y' = c * y + (1 - c) * z + increment(z, start, end)
        z' = z - increment(y', end, start)

        z = z' + increment(y', end, start)
        y = (y' - (1 - c) * z - increment(z, start, end)) / c

    y and z are two copies of the state. They start equal, `(x, x)`, and stay as close as the solver is accurate.
    With `coupling=None` there is one copy, and the step back is the step from the end to the start. It is close to the
    inverse if the solver is made for it, as the tableau "ees25" of `runge_kutta` is:

        x' = x + increment(x, start, end)               x = x' + increment(x', end, start)

    Args:
        increment: `increment(x, start, end, *args, **kwargs)`, the change of x (a tensor or any pytree of tensors) in
            one step from start to end; in a step back the end is before the start. `runge_kutta(field)` makes one for a
            differential equation. start and end are times; for a stochastic equation they are `(time, noise)`, where
            the noise is the path up to that time. increment is pure in torch.func's sense (see the conventions).
        coupling: c, above 0 and at most 1. Below 1 it pulls the copies together. The inverse divides by it: errors grow
            by 1 / c at each step. None for one copy: half of the increments, and stable with longer steps; the error of
            a step back ("ees25": of order h^6) adds up over the steps. `drift` shows it, and `anchor_every=` bounds it.

    Returns:
        An `Invertible`, called as `pair((y, z), (start, end), *args, **kwargs)`. Parameters of a step come after the
        two times, `(start, end, p)`; increment gets them before the further arguments. So

            repeated(pair)((x, x), (times[:-1], times[1:]), params)

        solves along a tensor of times, with one copy as `repeated(pair)(x, ...)`. Its log-determinant is the logarithm
        of c for each entry of y, [N]; with one copy there is none.

    Raises:
        ArgumentTypeError: increment is not a function.
        ArgumentError: coupling is not above 0 and at most 1, or None; the second argument is not `(start, end, ...)`;
            the state is not a pair of one form, or increment gives another one.

    Example:
        >>> import torch, invfunc
        >>> euler = invfunc.pairs.reversible_step(lambda x, start, end: (start - end) * x, coupling=0.5)
        >>> y, z = euler((torch.ones(1), torch.ones(1)), (0.0, 0.5))
        >>> y, z
        (tensor([0.5000]), tensor([0.7500]))
        >>> invfunc.invert(euler)((y, z), (0.0, 0.5))
        (tensor([1.]), tensor([1.]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `with_log_det`.

    A way back through what decays is a way through what grows: where field contracts by a factor of k a step, errors of
    x grow by about k a step in the backward pass, with either form. Of a stiff equation keep anchors.

    Cost: increment twice in either direction, and twice in a backward pass; with one copy once, and twice in a backward
    pass. Many equal steps on a small state in `repeated` (at least 8, of at most 64 KiB) are one node of autograd.

    Source: S. McCallum and J. Foster, Efficient, Accurate and Stable Gradients for Neural ODEs, 2024; Explicit and
    Effectively Symmetric Schemes for Neural SDEs, arXiv 2509.20599, 2025.
    """
    needed("reversible_step(increment)", "increment", increment)
    call = f"reversible_step({describe(increment)}, coupling={coupling})"
    if coupling is None:
        return Invertible(partial(_stepped, call, increment, 0), partial(_stepped, call, increment, 1), name=call)
    if not isinstance(coupling, (int, float)) or not 0 < coupling <= 1:
        raise ArgumentError(f"{call}: coupling has to be above 0 and at most 1, or None for one copy of the state.")
    moves = Move(0, None, coupling, 1 - coupling), Move(0, 0), Move(1, 1, by=-1)
    return _IncrementSteps(call, ("increment",), "yz", moves).pair(call, (increment,))


@dataclass(frozen=True, eq=False)
class _IncrementSteps(Moves):
    """Moves by the increments of the way there and of the way back."""

    def calls(self, functions: tuple, args: list[Any]) -> Calls:
        return [(functions[0], way) for way in _ways(self.call, args)]


def _ways(call: str, args: Sequence[Any]) -> list[tuple]:
    """All that an increment gets behind the state, on the way there and on the way back."""
    ends, *more = args or (None,)
    if not isinstance(ends, (tuple, list)) or len(ends) < 2:
        raise ArgumentError(
            f"{call}: the second argument has to be (start, end), the times of the step, but is {described(ends)}. "
            "With parameters of this step alone it is (start, end, p); parameters of all steps come after it."
        )
    start, end, *own = ends
    return [(*way, *own, *more) for way in ((start, end), (end, start))]


def _stepped(call: str, increment: Callable, way: int, x: Any, *args: Any, **kwargs: Any) -> Any:
    """The only copy of the state after a step, there or back."""
    change = increment(x, *_ways(call, args)[way], **kwargs)
    return combined(torch.add, x, fitting(change, x, call, "what increment returns", "x"))


def runge_kutta(field: Callable[..., Any], tableau: str | Tableau = "rk4") -> Callable[..., Any]:
    """The increment of one step of a Runge-Kutta scheme for dx/dt = field(x, t).

        def increment(x, start, end, *args, **kwargs):
            h, slopes = end - start, []
            for row in a:
                slopes.append(field(x + h * (row @ slopes), start + h * sum(row), *args, **kwargs))
            return h * (b @ slopes)

    Args:
        field: `field(x, t, *args, **kwargs)`, of the form of x, a tensor or a pytree of tensors; or a module. field is
            pure in torch.func's sense (see the conventions).
        tableau: "euler" (order 1), "midpoint", "heun" (2) or "rk4" (4); "ees25" (2, in three stages), whose step from
            the end to the start undoes it up to h^6: for `reversible_step(increment, coupling=None)`; or `(a, b)` of an
            explicit scheme of your own, where row i of a has the weights of the stages before stage i.

    Returns:
        `increment(x, start, end, *args, **kwargs)`, of the form of x, as `reversible_step` takes it.

    Raises:
        ArgumentTypeError: field is not a function.
        ArgumentError: an unknown tableau; start or end is not a number; field gives another form than that of x.

    Example:
        >>> import torch, invfunc
        >>> step = invfunc.pairs.reversible_step(invfunc.pairs.runge_kutta(lambda x, t: -x))
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
                raise ArgumentError(f"{self}: {name} is {described(t)}, but has to be a number or a tensor of one.")
        h, slopes = end - start, []
        for row in self.a:
            stage = combined(lambda x, *slopes, row=row: x + h * _weighted(row, slopes), x, *slopes)
            slope = self.field(stage, start + h * sum(row), *args, **kwargs)
            slopes.append(fitting(slope, x, self.call, "what field returns", "x"))
        return combined(lambda *slopes: h * _weighted(self.b, slopes), *slopes)


def _weighted(weights: Sequence[float], slopes: Sequence[torch.Tensor]) -> Any:
    return sum(w * slope for w, slope in zip(weights, slopes, strict=False) if w)


def bdia(f: Callable[..., Any], grid: Grid | None = None) -> Invertible:
    """The pair `(w, x) -> (x, y)` that trains a plain residual block x + f(x, p), and restores every bit of w.

        y = gamma * (w + odd) + round((1 - gamma) * x + (1 + gamma) * f(x, p))
        w = (y - round((1 - gamma) * x + (1 + gamma) * f(x, p))) / gamma - odd

    w is the state before x. gamma is 1/2 or -1/2, drawn for each sample and block, so that y is x + f(x, p) on average:
    after training, use the plain network `x = x + f(x, p)`. All states are on a grid. odd is the unit of the grid if w
    is an odd multiple of it: halving w loses that bit, so it is saved.

    Args:
        f: any function that keeps the shape of x, such as attention with its MLP, or a module. It gets x in the dtype
            of its parameters, and its result is rounded to the grid; for gradients the rounding counts as the identity.
            f is pure in torch.func's sense (see the conventions).
        grid: by default `Grid()`.

    Returns:
        An `Invertible`, called as `pair((w, x), (plus, p), *args, **kwargs)`, or with `(plus,)` where f takes no
        parameters: plus is a boolean tensor [N], or one boolean for all samples, whether gamma is 1/2. The state starts
        on the grid, as `grid.enter((x, x + f(x, p)))` with the first block unchanged.

    Raises:
        ArgumentTypeError: f is not a function, or grid is not a Grid.
        ArgumentError: the state is not a pair of one shape, f changes it, or plus is not of N booleans.
        RangeError: the state is not on the grid, or leaves its range.

    Example:
        >>> import torch, invfunc
        >>> pair, grid = invfunc.pairs.bdia(torch.tanh), invfunc.pairs.Grid()
        >>> w, x = grid.enter((torch.rand(4, 2), torch.rand(4, 2)))
        >>> steps = [(torch.rand(4) < 0.5,) for _ in range(50)]
        >>> invfunc.pairs.drift(pair, (w, x), steps)[-1]
        0.0

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, with stacked `(plus, p)` too. There is no `invert` of
    it, as its inverse needs the bits that are hidden.

    Cost: f once in either direction, and once in a backward pass; an eighth of a byte for each entry and block.

    Source: G. Zhang et al., On Exact Bit-level Reversible Transformers Without Changing Architectures, 2025.
    """
    f = as_part("bdia(f)", "f", f)
    call = f"bdia({describe(f)})"
    if not isinstance(grid, (Grid, type(None))):
        raise ArgumentTypeError(f"{call[:-1]}, grid={grid!r}): grid is a Grid.")
    grid = grid or Grid()
    law = _Bidirectional(call, ("f",), "wx", (Move(0, 0), Move(1, 0)), grid=grid)
    return Invertible(law.forward, law.inverse, (Rounded(grid, f),), hidden=True, name=call)


@dataclass(frozen=True, eq=False)
class _Bidirectional(Moves):
    """Both directions: one moves the first part of its state by f of the other, the other its second part."""

    grid: Grid = Grid()

    def forward(self, *given: Any, **kwargs: Any) -> Any:
        parts, calls = self.read(given, "x")
        w, x = self.grid.checked(*parts)
        odd = (w.detach() / self.grid.unit).remainder(2) == 1
        gamma, moved = self._moved(self.moves[0], parts, calls, kwargs)
        y = gamma * (w + odd * self.grid.unit) + moved
        return self.grid.checked(x.view_as(x), y, entered=True), packed(odd)  # x itself would be given to two blocks

    def inverse(self, f: Any, state: Any = None, bits: Any = None, *given: Any, **kwargs: Any) -> Any:
        (x, y), calls = self.read((f, state, *given), "y")
        gamma, moved = self._moved(self.moves[1], [x, y], calls, kwargs)
        return (y - moved) / gamma - unpacked(bits, y) * self.grid.unit, x

    def calls(self, functions: tuple, args: list[Any]) -> Calls:
        own, *more = args or (None,)
        if not isinstance(own, (tuple, list)) or not 1 <= len(own) <= 2:
            raise ArgumentError(
                f"{self.call}: the second argument has to be (plus, p), or (plus,) for an f without parameters, but is "
                f"{type(own).__name__}. plus is True for samples with gamma = 1/2: torch.rand(N) < 0.5."
            )
        plus, params = own if len(own) == 2 else (own[0], None)
        return [(functions[0], (params, *more)), (torch.as_tensor, (plus,))]

    def _moved(self, move: Move, parts: list[Any], calls: Calls, kwargs: dict[str, Any]) -> tuple[Any, torch.Tensor]:
        """gamma, and what is added to the half of w, on the grid."""
        x, (as_tensor, (plus,)) = parts[1 - move.part], calls[1]
        plus = as_tensor(plus, device=x.device)
        if plus.dtype != torch.bool or plus.shape not in ((), x.shape[:1]):
            raise ArgumentError(
                f"{self.call}: plus is of {plus.dtype} and shape {list(plus.shape)}, but has a boolean for each of the "
                f"samples of x of shape {list(x.shape)}, torch.rand(N) < 0.5, or one for all."
            )
        plus = plus.view(-1, *[1] * (x.dim() - 1)) if plus.dim() else plus
        gamma = plus.to(x.dtype) - 0.5
        return gamma, self.grid.round((1 - gamma) * x + (1 + gamma) * self.said(move, parts, calls, kwargs))


def packed(bits: torch.Tensor) -> torch.Tensor:
    """Booleans, eight of them in a byte."""
    return (F.pad(bits.flatten(), (0, -bits.numel() % 8)).view(-1, 8) * _powers(bits.device)).sum(1, dtype=torch.uint8)


def unpacked(byte: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The booleans, in the shape of another tensor."""
    return (byte.unsqueeze(1) & _powers(byte.device)).ne(0).flatten()[: like.numel()].view(like.shape)


def _powers(device: torch.device) -> torch.Tensor:
    return torch.tensor([1, 2, 4, 8, 16, 32, 64, 128], dtype=torch.uint8, device=device)
