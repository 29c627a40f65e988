"""Implicit layers: as many steps towards a fixed point as it takes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch

from invfunc import tree
from invfunc._torch.functorch import innermost, unwatched
from invfunc._torch.precision import in_float64
from invfunc.callables import describe
from invfunc.errors import ArgumentError, ArgumentTypeError, InvFuncWarning
from invfunc.invertible.chain import check_anchor
from invfunc.invertible.checkpoint import Checkpointed
from invfunc.pairs.steps import fixed_point
from invfunc.pairs.value import Value
from invfunc.transform import shown


class Equilibrium(NamedTuple):
    """Point where the steps came to rest, evaluations of the function that it took, and how far it still is.

    `residual` is the largest difference between x and f(x) that the last step has seen, and between its two copies,
    relative to the largest entry of x.
    """

    value: Any
    evaluations: int
    residual: float


def equilibrium(
    f: Callable[..., Any],
    beta: float = 0.5,
    *,
    tolerance: float = 1e-3,
    max_steps: int = 50,
    anchor_every: int | None = None,
) -> Callable[..., Any]:
    """A layer whose output is a fixed point, x = f(x, p), in the memory of one step and with exact gradients.

        def solve(x, *args, **kwargs):
            state = (x, x)
            while residual(state) > tolerance:
                state = fixed_point(f, beta)(state, *args, **kwargs)
            return Equilibrium(state[1], evaluations, residual(state))

    The backward pass goes back through the same steps, so that its gradient is that of the numbers which came out,
    wherever they are, and not that of a fixed point which has not been reached. As rounding errors grow on the way
    back, both copies are kept in float64; f gets them, and gives its result, in the dtype of x.

    Args:
        f: any function that keeps the form of x, a tensor or any pytree of tensors; or a module. It has to contract:
            else there is nothing to come to. f is pure in torch.func's sense (see the conventions).
        beta: as in `fixed_point`.
        tolerance: how large the residual may be, relative to the largest entry of x.
        max_steps: after this many steps it stops in any case, with a warning where the residual is larger than that.
        anchor_every: keep the state of every n-th step, so that rounding errors of the way back grow between two
            anchors only. They grow by at most 1 / (1 - beta)**2 at each step if f contracts; by default an anchor is
            where they may have taken half of the digits of float64: at every 13th step for a beta of 0.5.

    Returns:
        `solve(x, *args, **kwargs) -> Equilibrium(value, evaluations, residual)`: x is where the steps begin, any pytree
        of tensors; what stands behind it goes to f, and nothing else. So a module has its own parameters, and
        `solve(x, u)` evaluates `module(x, u)`; to pass others, take `f, params = functional(module)` and
        `equilibrium(state_first(f))(x, params, u)`. All samples take the same steps, until the last one has arrived.

    Raises:
        ArgumentTypeError: f is not a function.
        ArgumentError: as in `fixed_point`; tolerance, max_steps or anchor_every is not above 0.

    Example:
        >>> import torch, invfunc
        >>> solve = invfunc.pairs.equilibrium(lambda x, w: torch.tanh(w * x + 1))
        >>> w = torch.tensor(0.5, requires_grad=True)
        >>> x = solve(torch.zeros(3), w)
        >>> x.value.detach(), x.evaluations
        (tensor([0.8950, 0.8950, 0.8950]), 26)
        >>> torch.autograd.grad(x.value.sum(), w)
        (tensor(0.5917),)

    Composes with: `.backward()` and every transform of torch.func, as `invertible_checkpoint`; inside of vmap return
    its value. `repeated(fixed_point(f))` takes a number of steps that is known before.

    Cost: two evaluations of f a step, and as many in the backward pass.

    Source: S. Bai et al., Deep Equilibrium Models, 2019; Reversible Deep Equilibrium Models, arXiv 2509.12917, 2025.
    """
    if not callable(f):
        raise ArgumentTypeError(f"equilibrium(f): f is of type {type(f).__name__}, but has to be a function.")
    pair = fixed_point(_Narrow(f), beta)
    call = f"equilibrium({describe(pair.shared[0])}, beta={beta})"
    for name, value, kinds in (("tolerance", tolerance, (int, float)), ("max_steps", max_steps, int)):
        if not isinstance(value, kinds) or isinstance(value, bool) or not value > 0:
            raise ArgumentError(f"{call[:-1]}, {name}={value!r}): {name} has to be above 0.")
    check_anchor("equilibrium", anchor_every)
    half = -math.log(torch.finfo(torch.float64).eps) / 2
    every = anchor_every or max(1, int(half / -2 / math.log(1 - beta)))
    return _Solver(call, Checkpointed(pair, check="off"), beta, tolerance, max_steps, every)


@dataclass(frozen=True, eq=False, repr=False)
class _Narrow(Value):
    """A function of a state in dtypes that are told, of one in float64."""

    f: Callable

    @property
    def __name__(self) -> str:
        return describe(self.f)

    def __call__(self, x: Any, dtypes: tuple[torch.dtype, ...], *args: Any, **kwargs: Any) -> Any:
        leaves, form = tree.flatten(x)
        narrow = [t.to(dtype) for t, dtype in zip(leaves, dtypes, strict=True)]
        return _wide(self.f(tree.unflatten(narrow, form), *args, **kwargs))


def _wide(x: Any) -> Any:
    return tree.map_tensors(lambda t: in_float64(t, "an equilibrium keeps two copies of its state"), x)


@shown
@dataclass(frozen=True, eq=False, repr=False)
class _Solver(Value):
    """The loop of steps."""

    call: str
    step: Checkpointed
    beta: float
    tolerance: float
    max_steps: int
    anchor_every: int

    def __repr__(self) -> str:
        return self.call

    def __call__(self, x: Any, *args: Any, **kwargs: Any) -> Equilibrium:
        dtypes = tuple(t.dtype for t in tree.tensors(x))
        state, residual, steps = (_wide(x), _wide(x)), math.inf, 0
        anchored = replace(self.step, keep=True)
        while steps < self.max_steps and residual > self.tolerance:
            step = anchored if steps and steps % self.anchor_every == 0 else self.step
            before, state = state, step(state, dtypes, *args, **kwargs)
            residual = self._residual(before, state)
            steps += 1
            del before  # which the next step takes over
        if not residual <= self.tolerance:
            warnings.warn(
                f"{self.call}(x, ...): after {steps} steps the residual is {residual:.1e}, where {self.tolerance:.1e} "
                "is tolerated (tolerance=). Take more (max_steps=), or an f that contracts more.",
                InvFuncWarning,
                stacklevel=2,
            )
        leaves, form = tree.flatten(state[1])
        value = tree.unflatten([t.to(dtype) for t, dtype in zip(leaves, dtypes, strict=True)], form)
        return Equilibrium(value, 2 * steps, residual)

    def _residual(self, before: Any, after: Any) -> float:
        """Relative to the largest entry: f(z) - y and f(y') - z, from how far both have moved, and y' - z'."""
        if torch.compiler.is_compiling():
            return self._largest(*map(tree.tensors, (*before, *after)))
        with unwatched(), torch.no_grad():  # values that are only looked at
            return self._largest(*([innermost(t) for t in tree.tensors(part)] for part in (*before, *after)))

    def _largest(self, *parts: list[torch.Tensor]) -> float:
        off, sizes = [torch.zeros(())], [torch.zeros(())]
        for y, z, after, last in zip(*(map(torch.Tensor.detach, part) for part in parts), strict=True):
            moved = (after - y) / self.beta, (last - z) / self.beta, after - last
            off += [t.abs().amax().cpu() for t in moved if t.numel()]
            sizes += [t.abs().amax().cpu() for t in (last,) if t.numel()]
        most, size = (float(torch.stack([t.double() for t in found]).amax()) for found in (off, sizes))
        return most / size if size else most  # NaN if there is one anywhere
