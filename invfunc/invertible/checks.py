"""How well an inverse gives back what went in."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from invfunc import tree
from invfunc.errors import ArgumentTypeError, InverseError

from .chain import repeated
from .checkpoint import Checkpointed, default_tolerance, relative_error
from .pair import Invertible


@dataclass(frozen=True)
class InverseReport:
    """The errors of both round trips, relative to the largest entry of each tensor, by its key path."""

    x: dict[str, float]
    """Of `f_inv(f(x))` against x."""
    y: dict[str, float]
    """Of `f(f_inv(y))` against y."""
    condition: float
    """How many times larger a relative error of y is in x: what rounding y costs."""


def check_inverse(
    pair: Callable | tuple[Callable, Callable], x: Any, *args: Any, tolerance: float | None = None, **kwargs: Any
) -> InverseReport:
    """Compare `f_inv(f(x))` with x, and `f(f_inv(y))` with `y = f(x)`.

    Args:
        pair: an `Invertible`, what `invertible_checkpoint` made of one, or `(f, f_inv)`.
        x: where to look, any pytree.
        args, kwargs: the further arguments of both functions.
        tolerance: the error that is taken for rounding, relative to the largest entry of each tensor; by default the
            square root of the precision of its dtype, `math.inf` for a report in any case.

    Returns:
        `InverseReport(x, y, condition)`: the errors of each tensor by its name, and how much larger a small error of y is
        in x. There is a warning where rounding alone takes half the digits of x.

    Raises:
        ArgumentTypeError: `pair` is none.
        InverseError: an error is larger than `tolerance`, or what came back has another form, shape or dtype.

    Example:
        >>> import torch, invfunc
        >>> report = invfunc.check_inverse((lambda x: 2 * x, lambda y: y / 2), torch.ones(3))
        >>> report.x, report.y, round(report.condition, 2)
        ({'x': 0.0}, {'y': 0.0}, 1.0)

    Composes with: nothing; it reads numbers.

    Cost: two evaluations of f and three of f_inv, without gradients.

    Source: invtorch's `check`.
    """
    pair = _as_pair("check_inverse", pair)
    generator_free = torch.no_grad()
    with generator_free:
        y = pair.forward(*pair.shared, x, *args, **kwargs)
        hidden = (y[1],) if pair.hidden else ()
        y = y[0] if pair.hidden else y

        def inverse(y: Any) -> Any:
            return pair.inverse(*pair.shared, y, *hidden, *args, **kwargs)

        back = inverse(y)
        of_x = _compared(pair, "x", back, x, tolerance)
        of_y = _compared(pair, "y", pair(back, *args, **kwargs), y, tolerance)
        condition = _condition(inverse, y, back)
    floats = [t for t in tree.tensors(x) if t.is_floating_point() or t.is_complex()]
    coarsest = max((torch.finfo(t.dtype).eps for t in floats), default=0.0)
    if condition * coarsest > coarsest**0.5:
        warnings.warn(
            f"{pair!r} is ill-conditioned: an error of y is {condition:.1e} times larger in x, so that rounding takes more "
            "than half of its digits. Compute in float64, or keep anchors (anchor_every=).",
            stacklevel=2,
        )
    return InverseReport(of_x, of_y, condition)


def drift(pair: Callable | tuple[Callable, Callable], x: Any, params: Any, *args: Any, **kwargs: Any) -> list[float]:
    """The error of what the inverses give back, as it grows from the last block to the first.

    Args:
        pair: a `chain` or `repeated`; or one block (an `Invertible`, what `invertible_checkpoint` made of one, or
            `(f, f_inv)`), which is repeated.
        x: the input of the first block, any pytree.
        params: those of the blocks, as the chain takes them.
        args, kwargs: the further arguments of all blocks.

    Returns:
        A list with an entry for each block: entry d is the largest error after d + 1 inverses, relative to the largest
        entry of its tensor.

    Raises:
        ArgumentTypeError: `pair` is none.
        InverseError: a block has no inverse.

    Example:
        >>> import torch, invfunc
        >>> third = invfunc.Invertible(lambda x, c: x / c, lambda y, c: y * c)
        >>> [error < 1e-6 for error in invfunc.drift(third, torch.rand(5), [3.0, 7.0])]
        [True, True]

    Composes with: nothing; it reads numbers.

    Cost: all blocks once in both directions, without gradients; every state is kept.

    Source: J. Behrmann et al., Understanding and Mitigating Exploding Inverses, 2021.
    """
    pair = _as_pair("drift", pair)
    composition = pair.composition or repeated(pair).composition
    assert composition is not None
    states, errors = [x], []
    with torch.no_grad():
        steps = [
            (_as_pair("drift", g), () if p is None else (p, *args), {} if p is None else kwargs)
            for g, p in composition.steps(params)
        ]
        hidden = []
        for g, given, named in steps:
            y = g.forward(*g.shared, states[-1], *given, **named)
            y, own = (y[0], (y[1],)) if g.hidden else (y, ())
            states.append(y)
            hidden.append(own)
        y = states.pop()
        for (g, given, named), own in zip(reversed(steps), reversed(hidden), strict=True):
            y = g.inverse(*g.shared, y, *own, *given, **named)
            errors.append(max(_compared(g, "x", y, states.pop(), float("inf")).values(), default=0.0))
    return errors


def _as_pair(name: str, pair: Any) -> Invertible:
    if isinstance(pair, Checkpointed):
        return pair.pair
    if isinstance(pair, tuple) and len(pair) == 2:
        return Invertible(*pair)
    if isinstance(pair, Invertible):
        return pair
    raise ArgumentTypeError(
        f"{name}(pair, ...): pair is of type {type(pair).__name__}, but has to be an Invertible or (f, f_inv)."
    )


def _compared(pair: Invertible, name: str, came: Any, wanted: Any, tolerance: float | None) -> dict[str, float]:
    """The error of each tensor."""
    there, here = tree.named_leaves(came), tree.named_leaves(wanted)
    if [path for path, _ in there] != [path for path, _ in here]:
        raise InverseError(f"check_inverse({pair!r}): {name} comes back as {_form(there)}, but was {_form(here)}.")
    errors = {}
    for (path, leaf), (_, like) in zip(there, here, strict=True):
        if not isinstance(like, torch.Tensor):
            continue
        if not isinstance(leaf, torch.Tensor) or (leaf.shape, leaf.dtype) != (like.shape, like.dtype):
            raise InverseError(
                f"check_inverse({pair!r}): {name}{path} comes back as {_kind(leaf)}, but was {_kind(like)}."
            )
        error = relative_error(leaf, like)
        most = default_tolerance(like) if tolerance is None else tolerance
        if not error <= most:
            raise InverseError(
                f"check_inverse({pair!r}): {name}{path} comes back with an error of {error:.1e} of its largest entry, where "
                f"{most:.1e} is tolerated (tolerance=)."
            )
        errors[name + path] = error
    return errors


def _form(leaves: list[tuple[str, Any]]) -> str:
    return "{" + ", ".join(path or "a tensor" for path, _ in leaves) + "}"


def _kind(leaf: Any) -> str:
    return f"{list(leaf.shape)} {leaf.dtype}" if isinstance(leaf, torch.Tensor) else type(leaf).__name__


def _condition(inverse: Callable, y: Any, x: Any) -> float:
    """The relative change of x over that of y, for a small change of y in a random direction."""
    generator = torch.Generator().manual_seed(0)

    def near(t: torch.Tensor) -> torch.Tensor:
        if not (t.is_floating_point() or t.is_complex()):
            return t
        signs = torch.randint(0, 2, t.shape, generator=generator).to(t.device, t.dtype) * 2 - 1
        return t + t.abs().max() * torch.finfo(t.dtype).eps ** 0.5 * signs if t.numel() else t

    moved = tree.map_tensors(near, y)
    changed = _distance(moved, y)
    return _distance(inverse(moved), x) / changed if changed else 1.0


def _distance(a: Any, b: Any) -> float:
    """Relative, over all tensors."""
    pairs = [
        (s.double(), t.double()) for s, t in zip(tree.tensors(a), tree.tensors(b), strict=True) if not t.is_complex()
    ]
    largest = max((float(t.abs().max()) for _, t in pairs if t.numel()), default=0.0)
    squares = sum(float((s - t).square().sum()) for s, t in pairs)
    return (squares / max(1, sum(t.numel() for _, t in pairs))) ** 0.5 / (largest or 1.0)
