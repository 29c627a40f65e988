"""Errors of inverses that give back what went in."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from invfunc import tree
from invfunc._extras import axes, table
from invfunc._torch.values import differentiable, doubled
from invfunc.blocks.looks import precision_of, relative_error
from invfunc.blocks.run import BlockRun
from invfunc.errors import InverseError, InvFuncError, InvFuncWarning
from invfunc.invertible.chain import repeated
from invfunc.invertible.checkpoint import Checkpointed
from invfunc.pairs.pair import Invertible, as_pair, behind
from invfunc.transform import told


@dataclass(frozen=True)
class InverseReport:
    """The errors of both round trips, relative to the largest entry of each tensor, by its key path."""

    x: dict[str, float]
    """The errors of `f_inv(f(x))` against x."""
    y: dict[str, float]
    """The errors of `f(f_inv(y))` against y."""
    condition: float
    """Factor by which a relative error of y is larger in x: the cost of rounding y."""

    def _repr_html_(self) -> str:
        found = {"f_inv(f(x)) against x": self.x, "f(f_inv(y)) against y": self.y}
        rows = [(trip, name, error) for trip, errors in found.items() for name, error in errors.items()]
        below = f"A relative error of y is {self.condition:.3g} times larger in x."
        return table("check_inverse", ["round trip", "tensor", "relative error"], rows, below)


class Drift(list[float]):
    """The errors of what inverses give back: entry d is that after d + 1 of them."""

    def _repr_html_(self) -> str:
        last = len(self)
        shown = sorted({*(2**k for k in range(last.bit_length())), last} & {*range(1, last + 1)})
        return table("drift", ["inverses", "relative error"], [(d, self[d - 1]) for d in shown])

    def plot(self, ax: Any = None) -> Any:
        """Draw the errors over the number of inverses.

        Args:
            ax: the axes of matplotlib to draw into; by default those of a new figure.

        Returns:
            The axes.

        Raises:
            MissingExtraError: without matplotlib: `pip install 'invfunc[notebooks]'`.
        """
        ax = axes(ax)
        ax.plot(range(1, len(self) + 1), self, "o-", ms=3, color="#2f6db3")
        smallest = min((error for error in self if error > 0), default=1.0)
        ax.set_yscale("symlog" if 0.0 in self else "log", **({"linthresh": smallest} if 0.0 in self else {}))
        ax.set_xlabel("inverses, from the last block on")
        ax.set_ylabel("relative error")
        ax.spines[["top", "right"]].set_visible(False)
        return ax


def check_inverse(
    pair: Callable | tuple[Callable, Callable], x: Any, *args: Any, tolerance: float | None = None, **kwargs: Any
) -> InverseReport:
    """Compare `f_inv(f(x))` with x, and `f(f_inv(y))` with `y = f(x)`.

    Args:
        pair: an `Invertible`, what `invertible_checkpoint` made of one, or `(f, f_inv)`.
        x: the input at which they are compared, any pytree.
        args, kwargs: the further arguments of both functions.
        tolerance: the error that counts as rounding, relative to the largest entry of each tensor; by default the
            square root of the precision of its dtype. `math.inf` returns a report in any case.

    Returns:
        `InverseReport(x, y, condition)`: the errors of each tensor by its name, and the factor by which a small error
        of y grows in x. It warns if rounding alone takes half the digits of x.

    Raises:
        ArgumentTypeError: `pair` is not one of these.
        InverseError: an error is larger than `tolerance`, or what came back has another form, shape or dtype.
        ReplayError: a function writes into its arguments.

    Example:
        >>> import torch, invfunc
        >>> report = invfunc.check_inverse((lambda x: 2 * x, lambda y: y / 2), torch.ones(3))
        >>> report.x, report.y, round(report.condition, 2)
        ({'x': 0.0}, {'y': 0.0}, 1.0)

    Composes with: nothing; it reads numbers.

    Cost: two evaluations of f and three of f_inv, without gradients.

    Source: invtorch's `check`.
    """
    trip = _Trip(_as_pair("check_inverse", pair), x, args, kwargs)
    try:
        back = trip.back(trip.y)
        of_x = _errors("x", back, x, tolerance)
        of_y = _errors("y", trip.forth(back), trip.y, tolerance)
    except InvFuncError as error:
        raise told(error, f"check_inverse({trip.pair!r}, x, ...)") from error.__cause__
    condition = _condition(trip.back, trip.y, back)
    coarsest = max(map(precision_of, tree.tensors(x)), default=0.0)
    if condition * coarsest > coarsest**0.5:
        warnings.warn(
            f"{trip.pair!r} is ill-conditioned: an error of y is {condition:.1e} times larger in x, so that rounding "
            "takes more than half of its digits. Compute in float64, or keep anchors (anchor_every=).",
            InvFuncWarning,
            stacklevel=2,
        )
    return InverseReport(of_x, of_y, condition)


def drift(
    pair: Callable[..., Any] | tuple[Callable[..., Any], Callable[..., Any]],
    x: Any,
    params: Any,
    *args: Any,
    **kwargs: Any,
) -> Drift:
    """The error of the states that the inverses compute, as it grows from the last block to the first.

    For the memory of the states between the blocks see `held_states`.

    Args:
        pair: a `chain` or `repeated`; or one block (an `Invertible`, what `invertible_checkpoint` made of one, or
            `(f, f_inv)`), which is repeated.
        x: the input of the first block, any pytree.
        params: the parameters of the blocks, as the chain takes them.
        args, kwargs: the further arguments of all blocks.

    Returns:
        A list with an entry for each block: entry d is the largest error after d + 1 inverses, relative to the largest
        entry of its tensor. `.plot()` draws it.

    Raises:
        ArgumentTypeError: `pair` is not one of these.
        ArgumentError: `params` has not one entry for each block.
        InverseError: a block has no inverse.
        ReplayError: a function writes into its arguments.

    Example:
        >>> import torch, invfunc
        >>> third = invfunc.Invertible(lambda x, c: x / c, lambda y, c: y * c)
        >>> [error < 1e-6 for error in invfunc.pairs.drift(third, torch.rand(5), [3.0, 7.0])]
        [True, True]

    Composes with: nothing; it reads numbers.

    Cost: all blocks once in both directions, without gradients; every state is kept.

    Source: J. Behrmann et al., Understanding and Mitigating Exploding Inverses, 2021.
    """
    pair = _as_pair("drift", pair)
    composition = pair.composition or repeated(pair).composition
    assert composition is not None
    try:
        trips: list[_Trip] = []
        for g, p in composition.steps(params):
            given = behind(p, args, kwargs), kwargs
            trips.append(_Trip(_as_pair("drift", g), trips[-1].y if trips else x, *given))
        errors, y = [], trips[-1].y if trips else x
        while trips:
            trip = trips.pop()
            y = trip.back(y)
            errors.append(max(_errors("x", y, trip.x, math.inf).values(), default=0.0))
    except InvFuncError as error:
        raise told(error, f"drift({pair!r}, x, ...)") from error.__cause__
    return Drift(errors)


class _Trip:
    """x, y = f(x), and the ways between them, with the same random numbers on each."""

    def __init__(self, pair: Invertible, x: Any, args: tuple, kwargs: dict[str, Any]) -> None:
        self.pair, self.x = pair, x
        self._run = BlockRun(0)
        with torch.no_grad():
            self.y, _ = self._run.forward([(Checkpointed(pair, check="off"), args, kwargs)], x)

    def back(self, y: Any) -> Any:
        """`f_inv(y)`."""
        link = self._run.links[0]
        with torch.no_grad():
            return link.form.join(self._run.inverse(tree.separate(y)[0]))

    def forth(self, x: Any) -> Any:
        """`f(x)`."""
        with torch.no_grad():
            return self._run.once_more(x)


def _as_pair(name: str, pair: Any) -> Invertible:
    if isinstance(pair, tuple) and len(pair) == 2:
        return Invertible(*pair)
    return as_pair(f"{name}(pair, ...)", pair, " or (f, f_inv)")


def _errors(name: str, came: Any, wanted: Any, tolerance: float | None) -> dict[str, float]:
    """The error of each tensor, by its name."""
    errors = {}
    for (path, leaf), (_, like) in zip(tree.named_leaves(came), tree.named_leaves(wanted), strict=True):
        if isinstance(like, torch.Tensor):
            errors[name + path] = error = relative_error(leaf, like)
            most = precision_of(like) ** 0.5 if tolerance is None else tolerance
            if most < math.inf and not error <= most:
                raise InverseError(
                    f"{name}{path} comes back with an error of {error:.1e} of its largest entry, where {most:.1e} is "
                    "tolerated (tolerance=)."
                )
    return errors


def _condition(inverse: Callable, y: Any, x: Any) -> float:
    """The relative change of x over that of y, for a small change of y in a random direction."""
    generator = torch.Generator().manual_seed(0)

    def near(t: torch.Tensor) -> torch.Tensor:
        if not differentiable(t):
            return t
        signs = torch.randint(0, 2, t.shape, generator=generator).to(t.device, t.dtype) * 2 - 1
        return t + t.abs().max() * torch.finfo(t.dtype).eps ** 0.5 * signs if t.numel() else t

    moved = tree.map_tensors(near, y)
    changed = _distance(moved, y)
    return _distance(inverse(moved), x) / changed if changed else 1.0


def _distance(a: Any, b: Any) -> float:
    """Relative, over all tensors of real or complex numbers."""
    pairs = zip(tree.tensors(a), tree.tensors(b), strict=True)
    pairs = [(s, t) for s, t in pairs if differentiable(t)]
    largest = max((float(t.abs().max()) for _, t in pairs if t.numel()), default=0.0)
    squares = sum(float(doubled((s - t).abs()).square().sum()) for s, t in pairs)
    return (squares / max(1, sum(t.numel() for _, t in pairs))) ** 0.5 / (largest or 1.0)
