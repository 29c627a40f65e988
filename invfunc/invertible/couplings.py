"""Couplings: a part of the state changes by what the other part says, so that it can be undone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.invertible.exact import Grid
from invfunc.invertible.pair import Invertible
from invfunc.invertible.state import per_sample, two_parts
from invfunc.transform import check_callable, describe


def additive_coupling(
    F: Callable, G: Callable, *, split_dim: int | None = None, exact: bool | Grid = False
) -> Invertible:
    """The pair `(a, b) -> (a', b')` of a reversible residual block.

        a' = a + F(b, p)                    b = b' - G(a', q)
        b' = b + G(a', q)                   a = a' - F(b, p)

    Args:
        F, G: any functions that keep the shape of the other part; they need no inverse. (Of a module: `functional`, or
            `lambda b: module(b)`.)
        split_dim: take one tensor, whose halves along this axis are a and b, in place of a pair.
        exact: compute on a fixed-point grid (True: `Grid()`), where adding and subtracting make no rounding errors: the
            inverse gives back every bit, at any depth, as long as F and G see the same shapes. The state has to be on
            the grid: `Grid().enter(x)` puts it there. What F and G give is rounded to it; gradients take the rounding
            for the identity.

    Returns:
        An `Invertible`, called as `pair((a, b), (p, q), *args, **kwargs)`, the further arguments going to F and G; or
        `pair((a, b))` for F and G without parameters. Its log-determinant is 0.

    Raises:
        ArgumentTypeError: F or G is no function, or an option is of a wrong kind.
        ArgumentError: the state or the parameters are no pair; the axis to split has no two halves, or, where the
            log-determinant is asked for, is the leading one.
        RangeError: with `exact`, the state is not on the grid, or leaves its range.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.additive_coupling(lambda b, p: p * b, lambda a, q: q * a)
        >>> a, b = pair((torch.ones(2), torch.ones(2)), (2.0, 3.0))
        >>> a, b
        (tensor([3., 3.]), tensor([10., 10.]))
        >>> invfunc.invert(pair)((a, b), (2.0, 3.0))
        (tensor([1., 1.]), tensor([1., 1.]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`.

    Cost: F and G once in either direction, and once in a backward pass.

    Source: L. Dinh et al., NICE, 2014; A. Gomez et al., The Reversible Residual Network, 2017.
    """
    check_callable("additive_coupling", F)
    check_callable("additive_coupling", G)
    call = f"additive_coupling({describe(F)}, {describe(G)})"
    if not isinstance(exact, (bool, Grid)):
        raise ArgumentTypeError(f"{call[:-1]}, exact={exact!r}): exact is True, False or a Grid.")
    grid = exact if isinstance(exact, Grid) else Grid() if exact else None
    shared = (F, G) if grid is None else (partial(_rounded, grid, F), partial(_rounded, grid, G))

    def forward(F: Callable, G: Callable, state: Any, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        (a, b), (p, q) = two_parts(state, call, "x"), _each(params, call)
        if grid is not None:
            grid.checked(a, b)
        a = a + F(b, *p, *args, **kwargs)
        b = b + G(a, *q, *args, **kwargs)
        return (a, b) if grid is None else grid.checked(a, b, entered=True)

    def inverse(F: Callable, G: Callable, state: Any, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        (a, b), (p, q) = two_parts(state, call, "y"), _each(params, call)
        b = b - G(a, *q, *args, **kwargs)
        a = a - F(b, *p, *args, **kwargs)
        return a, b

    def log_det(F: Callable, G: Callable, state: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        return per_sample(torch.zeros_like(state[0]))

    return _on_one_tensor(Invertible(forward, inverse, shared, log_det=log_det, name=call), split_dim)


def affine_coupling(
    F: Callable, G: Callable, *, log_scale: Callable = torch.tanh, split_dim: int | None = None
) -> Invertible:
    """The pair `(a, b) -> (a', b')` that scales and shifts each part by what the other says.

        s, t = F(b, p)                              s, t = G(a', q)
        a' = a * exp(log_scale(s)) + t              b = (b' - t) * exp(-log_scale(s))
        s, t = G(a', q)                             s, t = F(b, p)
        b' = b * exp(log_scale(s)) + t              a = (a' - t) * exp(-log_scale(s))

    Args:
        F, G: functions that return `(s, t)`, each of the shape of the other part; they need no inverse.
        log_scale: the logarithm of the scale as a function of s. The default keeps the scale between 1/e and e, so that
            deep chains neither explode nor lose their digits; `lambda s: s` is the plain exponential.
        split_dim: take one tensor, whose halves along this axis are a and b, in place of a pair.

    Returns:
        An `Invertible`, called as that of `additive_coupling`. Its log-determinant is the sum of all log-scales, [N].

    Raises:
        ArgumentTypeError: F, G or log_scale is no function.
        ArgumentError: as `additive_coupling`; F or G returns no pair.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.affine_coupling(lambda b: (0 * b, b), lambda a: (0 * a, a))
        >>> pair((torch.ones(2), torch.ones(2)))
        (tensor([2., 2.]), tensor([3., 3.]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `with_log_det`.

    Cost: F and G once in either direction, and once in a backward pass.

    Source: L. Dinh et al., Density Estimation Using Real NVP, 2016.
    """
    for part in (F, G, log_scale):
        check_callable("affine_coupling", part)
    call = f"affine_coupling({describe(F)}, {describe(G)})"

    def forward(F: Callable, G: Callable, state: Any, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        (a, b), (p, q) = two_parts(state, call, "x"), _each(params, call)
        s, t = two_parts(F(b, *p, *args, **kwargs), call, "what F returns")
        a = a * log_scale(s).exp() + t
        s, t = two_parts(G(a, *q, *args, **kwargs), call, "what G returns")
        return a, b * log_scale(s).exp() + t

    def inverse(F: Callable, G: Callable, state: Any, params: Any = None, *args: Any, **kwargs: Any) -> Any:
        (a, b), (p, q) = two_parts(state, call, "y"), _each(params, call)
        s, t = G(a, *q, *args, **kwargs)
        b = (b - t) * (-log_scale(s)).exp()
        s, t = F(b, *p, *args, **kwargs)
        return (a - t) * (-log_scale(s)).exp(), b

    def log_det(F: Callable, G: Callable, state: Any, params: Any = None, *args: Any, **kwargs: Any) -> torch.Tensor:
        (a, b), (p, q) = two_parts(state, call, "x"), _each(params, call)
        s, t = F(b, *p, *args, **kwargs)
        first = log_scale(s)
        second = log_scale(G(a * first.exp() + t, *q, *args, **kwargs)[0])
        return per_sample(first) + per_sample(second)

    return _on_one_tensor(Invertible(forward, inverse, (F, G), log_det=log_det, name=call), split_dim)


def _rounded(grid: Grid, fn: Callable, *args: Any, **kwargs: Any) -> torch.Tensor:
    return grid.round(fn(*args, **kwargs))


def _each(params: Any, call: str) -> tuple[tuple, tuple]:
    """The parameters of F and of G, as what stands behind the state in their calls."""
    if params is None:
        return (), ()
    if not isinstance(params, (tuple, list)) or len(params) != 2:
        raise ArgumentError(
            f"{call}: the parameters have to be a pair, of F and of G, but are {type(params).__name__}. None of it "
            "calls them without."
        )
    return (params[0],), (params[1],)


def _on_one_tensor(pair: Invertible, dim: int | None) -> Invertible:
    """The pair on one tensor, of which the two parts of its state are the halves."""
    if dim is None:
        return pair
    if not isinstance(dim, int):
        raise ArgumentTypeError(f"{pair.name[:-1]}, split_dim={dim!r}): split_dim is an axis, a whole number.")
    number = len(pair.shared)

    def joined(fn: Callable) -> Callable:
        def on_one(*given: Any, **kwargs: Any) -> torch.Tensor:
            shared, (x, *args) = given[:number], given[number:]
            return torch.cat(fn(*shared, _halves(x, dim, pair), *args, **kwargs), dim)

        return on_one

    name = f"{pair.name[:-1]}, split_dim={dim})"

    def log_det(*given: Any, **kwargs: Any) -> torch.Tensor:
        shared, (x, *args) = given[:number], given[number:]
        assert pair.log_det is not None
        if isinstance(x, torch.Tensor) and dim % max(1, x.dim()) == 0:
            raise ArgumentError(
                f"{name}: the log-determinant is that of each entry of axis 0, which is the one that is split."
            )
        return pair.log_det(*shared, _halves(x, dim, pair), *args, **kwargs)

    return Invertible(joined(pair.forward), joined(pair.inverse), pair.shared, log_det=log_det, name=name)


def _halves(x: Any, dim: int, pair: Invertible) -> tuple[torch.Tensor, torch.Tensor]:
    if not isinstance(x, torch.Tensor) or not -x.dim() <= dim < x.dim() or x.shape[dim] < 2:
        shape = list(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
        raise ArgumentError(
            f"{pair.name[:-1]}, split_dim={dim}): x is {shape}, which has no two halves along this axis."
        )
    first, second = x.tensor_split(2, dim)
    return first.contiguous(), second.contiguous()  # as the inverse gives them
