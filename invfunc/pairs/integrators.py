"""Residual networks that run backwards as the dynamics do that they discretise."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError
from invfunc.pairs.pair import Invertible, Law
from invfunc.pairs.part import Unwritten, as_part, fitting, given_functions
from invfunc.pairs.state import per_sample, two_parts, wide


def momentum(f: Callable, gamma: float = 0.9) -> Invertible:
    """The pair `(x, v) -> (x', v')` of a residual network with momentum, for any f, without splitting x.

        v' = gamma * v + (1 - gamma) * f(x, p)          x = x' - v'
        x' = x + v'                                     v = (v' - (1 - gamma) * f(x, p)) / gamma

    Args:
        f: any function that keeps the shape of x, or a module. f is pure in torch.func's sense (see the conventions).
        gamma: between 0 and 1, without them. The inverse divides by it: errors grow by 1 / gamma at each step.

    Returns:
        An `Invertible`, called as `pair((x, v), p, *args, **kwargs)`; zeros start v. Its log-determinant is the
        logarithm of gamma for each entry of v, [N].

    Raises:
        ArgumentTypeError: f is not a function.
        ArgumentError: gamma is not between 0 and 1, f changes the shape, or the state is not a pair of one shape.

    Example:
        >>> import torch, invfunc
        >>> pair = invfunc.momentum(lambda x: 2 * x, gamma=0.5)
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
    return _Momentum(call, gamma).pair(call, (Unwritten(call, "the function", f),))


@dataclass(frozen=True, eq=False)
class _Dynamics(Law):
    """Positions and velocities, and a function of the positions."""

    call: str

    def read(self, fn: Any, state: Any, name: str) -> tuple[torch.Tensor, torch.Tensor]:
        """x and v, of one shape."""
        x, v = two_parts(given_functions((fn,), self.call, state), self.call, name)
        return x, fitting(v, x, self.call, "the state", "x")

    def of(self, fn: Callable, x: torch.Tensor, *given: Any, **kwargs: Any) -> torch.Tensor:
        """What the function gives, in the shape of x."""
        return fitting(fn(x, *given, **kwargs), x, self.call, "the function", "x")


@dataclass(frozen=True, eq=False)
class _Momentum(_Dynamics):
    gamma: float

    def forward(self, f: Any, state: Any = None, *given: Any, **kwargs: Any) -> Any:
        x, v = self.read(f, state, "x")
        v = self.gamma * v + (1 - self.gamma) * self.of(f, x, *given, **kwargs)
        return x + v, v

    def inverse(self, f: Any, state: Any = None, *given: Any, **kwargs: Any) -> Any:
        x, v = self.read(f, state, "y")
        x = x - v
        return x, (v - (1 - self.gamma) * self.of(f, x, *given, **kwargs)) / self.gamma

    def log_det(self, f: Any, state: Any = None, *given: Any, **kwargs: Any) -> torch.Tensor:
        _, v = self.read(f, state, "x")
        return per_sample(torch.full_like(wide(v), math.log(self.gamma)))


@dataclass(frozen=True, eq=False)
class _Leapfrog(_Dynamics):
    step: float

    def forward(self, force: Any, state: Any = None, *given: Any, **kwargs: Any) -> Any:
        return self._moved(self.step, force, self.read(force, state, "x"), *given, **kwargs)

    def inverse(self, force: Any, state: Any = None, *given: Any, **kwargs: Any) -> Any:
        return self._moved(-self.step, force, self.read(force, state, "y"), *given, **kwargs)

    def log_det(self, force: Any, state: Any = None, *given: Any, **kwargs: Any) -> torch.Tensor:
        return per_sample(torch.zeros_like(self.read(force, state, "x")[0]))

    def _moved(self, by: float, force: Any, state: tuple, *given: Any, **kwargs: Any) -> Any:
        x, v = state
        v = v + by / 2 * self.of(force, x, *given, **kwargs)
        x = x + by * v
        return x, v + by / 2 * self.of(force, x, *given, **kwargs)


def leapfrog(force: Callable, step: float) -> Invertible:
    """The pair `(x, v) -> (x', v')` of one step of a particle in a field of forces, which runs backwards as well.

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
        >>> pair = invfunc.leapfrog(lambda x: -x, step=0.5)
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
    return _Leapfrog(call, step).pair(call, (Unwritten(call, "the function", force),))
