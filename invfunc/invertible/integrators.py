"""Residual networks that run backwards as the dynamics do that they discretise."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.invertible.pair import Invertible
from invfunc.invertible.state import per_sample, two_parts
from invfunc.transform import check_callable, describe


def momentum(f: Callable, gamma: float = 0.9) -> Invertible:
    """The pair `(x, v) -> (x', v')` of a residual network with momentum, for any f, without splitting x.

        v' = gamma * v + (1 - gamma) * f(x, p)          x = x' - v'
        x' = x + v'                                     v = (v' - (1 - gamma) * f(x, p)) / gamma

    Args:
        f: any function that keeps the shape of x.
        gamma: between 0 and 1, without them. The inverse divides by it: errors grow by 1 / gamma at each step.

    Returns:
        An `Invertible`, called as `pair((x, v), p, *args, **kwargs)`; zeros start v. Its log-determinant is the
        logarithm of gamma for each entry of v, [N].

    Raises:
        ArgumentTypeError: f is no function.
        ArgumentError: gamma is not between 0 and 1, or the state is no pair.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.momentum(lambda x: 2 * x, gamma=0.5)
        >>> pair((torch.ones(2), torch.zeros(2)))
        (tensor([2., 2.]), tensor([1., 1.]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `with_log_det`.

    Cost: f once in either direction, and once in a backward pass.

    Source: M. Sander et al., Momentum Residual Neural Networks, 2021.
    """
    check_callable("momentum", f)
    call = f"momentum({describe(f)}, gamma={gamma})"
    if not isinstance(gamma, (int, float)) or not 0 < gamma < 1:
        raise ArgumentError(f"{call}: gamma has to be between 0 and 1.")

    def forward(f: Callable, state: Any, *given: Any, **kwargs: Any) -> Any:
        x, v = two_parts(state, call, "x")
        v = gamma * v + (1 - gamma) * f(x, *given, **kwargs)
        return x + v, v

    def inverse(f: Callable, state: Any, *given: Any, **kwargs: Any) -> Any:
        x, v = two_parts(state, call, "y")
        x = x - v
        return x, (v - (1 - gamma) * f(x, *given, **kwargs)) / gamma

    def log_det(f: Callable, state: Any, *given: Any, **kwargs: Any) -> torch.Tensor:
        return per_sample(torch.full_like(state[1], math.log(gamma)))

    return Invertible(forward, inverse, (f,), log_det=log_det, name=call)


def leapfrog(force: Callable, step: float) -> Invertible:
    """The pair `(x, v) -> (x', v')` of one step of a particle in a field of forces, which runs backwards as well.

        w = v + step / 2 * force(x, p)
        x' = x + step * w
        v' = w + step / 2 * force(x', p)

    Args:
        force: any function that keeps the shape of x.
        step: the length of the step in time.

    Returns:
        An `Invertible`, called as `pair((x, v), p, *args, **kwargs)`. Its log-determinant is 0.

    Raises:
        ArgumentTypeError: force is no function, or step no number.
        ArgumentError: the state is no pair.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.leapfrog(lambda x: -x, step=0.5)
        >>> pair((torch.ones(1), torch.zeros(1)))
        (tensor([0.8750]), tensor([-0.4688]))

    Composes with: `invertible_checkpoint`, `chain`, `repeated`, `with_log_det`.

    Cost: two forces in either direction, and two in a backward pass.

    Source: L. Verlet, 1967; B. Chang et al., Reversible Architectures for Arbitrarily Deep Residual Networks, 2018.
    """
    check_callable("leapfrog", force)
    call = f"leapfrog({describe(force)}, step={step})"
    if not isinstance(step, (int, float)):
        raise ArgumentTypeError(f"{call}: step is of type {type(step).__name__}, but has to be a number.")

    def move(by: float, name: str) -> Callable:
        def moved(force: Callable, state: Any, *given: Any, **kwargs: Any) -> Any:
            x, v = two_parts(state, call, name)
            v = v + by / 2 * force(x, *given, **kwargs)
            x = x + by * v
            return x, v + by / 2 * force(x, *given, **kwargs)

        return moved

    def log_det(force: Callable, state: Any, *given: Any, **kwargs: Any) -> torch.Tensor:
        return per_sample(torch.zeros_like(state[0]))

    return Invertible(move(step, "x"), move(-step, "y"), (force,), log_det=log_det, name=call)
